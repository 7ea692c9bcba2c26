// A file descriptor, and the byte-range locks that say who is alive.
//
// The locks are Linux open-file-description locks: they belong to the open file and not to the
// process, so two descriptors of one process exclude each other, and the kernel drops them when the
// last descriptor and mapping of that open file are gone, however the process ended.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace headwater {

// Lock bytes of a segment file. A lock is only a name; it has nothing to do with the file's
// content.
inline constexpr std::uint64_t kOwnerLockByte = 0;   // write-locked by the owner
inline constexpr std::uint64_t kAttachLockByte = 1;  // read-locked by everybody who maps the file
inline constexpr std::uint64_t kSlotLockBase = 64;   // + i: write-locked by the writer of slot i

class LockedFile {
  public:
    LockedFile() = default;
    explicit LockedFile(int fd) noexcept : fd_(fd) {}
    LockedFile(LockedFile&& other) noexcept;
    LockedFile& operator=(LockedFile&& other) noexcept;
    ~LockedFile();

    int fd() const noexcept { return fd_; }
    bool is_open() const noexcept { return fd_ >= 0; }
    void close() noexcept;

    // Opens the same file once more for reading and writing: a second open file with its own locks.
    LockedFile reopen() const;

    // False when somebody else holds a lock in the way. The file must be open for writing.
    bool try_write_lock(std::uint64_t byte) const;
    // False when somebody else holds a write lock. The file must be open for reading.
    bool try_read_lock(std::uint64_t byte) const;
    void unlock(std::uint64_t byte) const;
    // Whether anybody else holds any lock on the byte.
    bool is_locked_by_other(std::uint64_t byte) const;
    // Whether the file has lost its name.
    bool is_unlinked() const;

  private:
    bool try_lock(std::uint64_t byte, short type) const;

    int fd_ = -1;
};

}  // namespace headwater
