// Segment: one POSIX shared-memory object with a checked header, an owner and attachers.
//
// Creating is not attaching: only the creator owns, and only an owner seals, poisons or unlinks.
// Ownership moves by release_ownership() and adopt_ownership(). Layout: shm_header.hpp; locks:
// locked_file.hpp; what is done about the dead: shm_registry.hpp.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "headwater/locked_file.hpp"
#include "headwater/shm_header.hpp"

namespace headwater {

// Throws Failure unless `name` is a plain file name of at most 200 characters A-Z a-z 0-9 . _ -
void check_segment_name(const std::string& name);

// The mapped file. Header bytes are mapped read-only for everybody; the payload as asked for.
// Shared by the segment, its views and its readers: memory and attach lock go with the last of
// them.
class Mapping {
  public:
    Mapping(std::string name, LockedFile file, std::size_t total_bytes, bool is_writable);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    const std::string& name() const noexcept { return name_; }
    const LockedFile& file() const noexcept { return file_; }
    std::size_t payload_bytes() const noexcept { return total_bytes_ - kHeaderBytes; }
    bool is_writable() const noexcept { return is_writable_; }
    const SegmentHeader& header() const noexcept;
    SegmentState state() const noexcept;

    // The address of payload bytes [offset, offset + num_bytes); throws when they are out of
    // bounds.
    std::byte* at(std::uint64_t offset, std::uint64_t num_bytes) const;
    // As at(), and throws unless the payload is writable.
    std::byte* writable_at(std::uint64_t offset, std::uint64_t num_bytes) const;
    // Backs the bytes with memory, so that a later access cannot fail.
    void populate(std::uint64_t offset, std::uint64_t num_bytes) const;
    // Ends writing through this mapping; throws while a writable view is alive.
    void make_read_only();

  private:
    friend class SegmentView;

    std::string name_;
    LockedFile file_;
    std::size_t total_bytes_;
    std::byte* base_ = nullptr;
    std::mutex seal_mutex_;
    std::atomic<bool> is_writable_;
    std::atomic<int> num_writable_views_ = 0;
};

// Payload bytes on loan; keeps the mapping alive.
class SegmentView {
  public:
    SegmentView(std::shared_ptr<Mapping> mapping, std::uint64_t offset, std::uint64_t num_bytes);
    ~SegmentView();
    SegmentView(const SegmentView&) = delete;
    SegmentView& operator=(const SegmentView&) = delete;

    std::byte* data() const noexcept { return data_; }
    std::size_t num_bytes() const noexcept { return num_bytes_; }
    bool is_writable() const noexcept { return is_writable_; }

  private:
    std::shared_ptr<Mapping> mapping_;
    std::byte* data_;
    std::size_t num_bytes_;
    bool is_writable_;
};

// The owner lock, and the header page through which only the owner writes.
class Ownership {
  public:
    // Nothing when somebody else owns the file.
    static std::unique_ptr<Ownership> try_take(const LockedFile& file);
    ~Ownership();
    Ownership(const Ownership&) = delete;
    Ownership& operator=(const Ownership&) = delete;

    SegmentHeader& header() noexcept { return *header_; }
    void set_state(SegmentState state) noexcept;
    // A forked child has the descriptor too, but must not act as the owner.
    bool is_mine() const noexcept;

  private:
    Ownership(LockedFile file, SegmentHeader* header);

    LockedFile file_;
    SegmentHeader* header_;
    int pid_;
};

struct CreateOptions {
    std::uint64_t payload_bytes;
    SegmentKind kind;
    Lifetime lifetime;
    std::uint64_t epoch;
    std::uint32_t layout_version;
    Digest digest;
};

struct AttachOptions {
    bool is_writable = false;
    std::optional<std::uint64_t> total_bytes;
    std::optional<std::uint64_t> epoch;
    std::optional<std::uint32_t> layout_version;
    std::optional<Digest> digest;
};

class Segment {
  public:
    // Makes a segment in state filling. The name appears with header and owner lock in place.
    static std::unique_ptr<Segment> create(const std::string& name, const CreateOptions& options);
    // Maps a ready segment that passes every check.
    static std::unique_ptr<Segment> attach(const std::string& name, const AttachOptions& options);
    ~Segment();

    const std::string& name() const noexcept { return name_; }
    bool is_closed() const;
    bool is_owner() const;
    // Throws once closed.
    std::shared_ptr<Mapping> mapping() const;

    // Owner only. Ready, and no byte of the payload changes any more.
    void seal();
    // Owner only. Ready, and still writable.
    void mark_ready();
    // Owner only. Never to be attached again.
    void poison();
    // Owner only. Takes the name away; mappings live on.
    void unlink();
    // Takes the owner lock of an attached segment; throws when somebody else lives who holds it.
    void adopt_ownership();
    // Gives the owner lock up; the segment stays.
    void release_ownership();
    // Gives everything up but what views hold; an owned bound segment is unlinked first.
    void close();

    std::uint64_t load_u64(std::uint64_t offset) const;
    void store_u64(std::uint64_t offset, std::uint64_t value) const;

    // Takes the writer lock of a slot; false when anybody holds it, this object included. The
    // segment must be attached writable, or be the creator's.
    bool try_lock_slot(std::uint64_t slot);
    void unlock_slot(std::uint64_t slot);
    // Whether anybody, this object included, holds the writer lock.
    bool is_slot_locked(std::uint64_t slot) const;

  private:
    Segment(std::string name, std::shared_ptr<Mapping> mapping,
            std::unique_ptr<Ownership> ownership);
    Ownership& require_owner(const char* action) const;

    const std::string name_;
    mutable std::mutex mutex_;
    std::shared_ptr<Mapping> mapping_;
    std::unique_ptr<Ownership> ownership_;
    bool is_unlinked_ = false;
    std::set<std::uint64_t> held_slots_;
};

}  // namespace headwater
