#include "headwater/shm_segment.hpp"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <functional>
#include <utility>

#include "headwater/failure.hpp"

namespace headwater {

namespace {

constexpr const char* kShmFolder = "/dev/shm";
constexpr std::size_t kMaxNameChars = 200;

std::string path_of(const std::string& name) { return std::string(kShmFolder) + "/" + name; }

[[noreturn]] void refuse(const std::string& name, const std::string& problem) {
    throw Failure(FailureKind::kSegment, "segment '" + name + "': " + problem);
}

[[noreturn]] void refuse_system(const std::string& name, const char* action, int error_number) {
    refuse(name, system_message(action, error_number));
}

template <typename T>
void check_expected(const std::string& name, const char* check, const std::optional<T>& expected,
                    T found) {
    if (expected && *expected != found) {
        refuse(name, std::string("check '") + check + "' failed: expected " +
                         std::to_string(*expected) + ", found " + std::to_string(found) +
                         "; the handle is older or newer than the segment");
    }
}

bool is_plain(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
}

std::string hex(const Digest& digest) {
    constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    for (const std::uint8_t byte : digest) {
        text += kDigits[byte >> 4];
        text += kDigits[byte & 15];
    }
    return text;
}

void check_room(const std::string& name, std::uint64_t needed_bytes) {
    struct statvfs status{};
    if (::statvfs(kShmFolder, &status) != 0) {
        refuse_system(name, "cannot read the free space of /dev/shm", errno);
    }
    const std::uint64_t available_bytes = std::uint64_t{status.f_bavail} * status.f_frsize;
    if (needed_bytes > available_bytes) {
        throw Failure(FailureKind::kSharedMemoryFull,
                      "segment '" + name + "': /dev/shm is too small: needs " +
                          std::to_string(needed_bytes) + " bytes, has " +
                          std::to_string(available_bytes) + " available, " +
                          std::to_string(needed_bytes - available_bytes) +
                          " short; enlarge it (docker run --shm-size=..., or mount -o "
                          "remount,size=... /dev/shm) or free segments (headwater shm reap)");
    }
}

SegmentHeader make_header(const CreateOptions& options) {
    SegmentHeader header{};
    header.magic = kMagic;
    header.header_version = kHeaderVersion;
    header.kind = options.kind;
    header.lifetime = options.lifetime;
    header.state = static_cast<std::uint32_t>(SegmentState::kFilling);
    header.layout_version = options.layout_version;
    header.total_bytes = kHeaderBytes + options.payload_bytes;
    header.epoch = options.epoch;
    header.owner_uid = ::geteuid();
    header.owner_pid = static_cast<std::uint32_t>(::getpid());
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    header.created_unix_nano = static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
    header.digest = options.digest;
    return header;
}

void check_state(const std::string& name, SegmentState state) {
    if (state != SegmentState::kReady) {
        refuse(name, std::string("check 'state' failed: expected ready, found ") +
                         state_name(static_cast<std::uint32_t>(state)));
    }
}

void check_attach(const std::string& name, const SegmentHeader& header,
                  const AttachOptions& options) {
    check_state(name, static_cast<SegmentState>(header.state));
    check_expected(name, "total bytes", options.total_bytes, header.total_bytes);
    check_expected(name, "epoch", options.epoch, header.epoch);
    check_expected(name, "layout version", options.layout_version, header.layout_version);
    if (options.digest && *options.digest != header.digest) {
        refuse(name, "check 'digest' failed: expected " + hex(*options.digest) + ", found " +
                         hex(header.digest) + "; it was made from other data");
    }
    if (options.is_writable && header.is_sealed != 0) {
        refuse(name, "check 'sealed' failed: it is sealed and can only be attached read-only");
    }
}

}  // namespace

void check_segment_name(const std::string& name) {
    if (name.empty() || name.size() > kMaxNameChars || name == "." || name == ".." ||
        !std::all_of(name.begin(), name.end(), is_plain)) {
        // Any bytes may have come in; a message must be text.
        std::string printable = name.substr(0, kMaxNameChars);
        std::replace_if(printable.begin(), printable.end(), std::not_fn(is_plain), '?');
        refuse(printable,
               "check 'name' failed: a name has 1 to 200 characters A-Z a-z 0-9 . _ - and is "
               "neither '.' nor '..'");
    }
}

std::unique_ptr<Segment> Segment::create(const std::string& name, const CreateOptions& options) {
    check_segment_name(name);
    if (options.payload_bytes == 0 || options.payload_bytes > (std::uint64_t{1} << 62)) {
        refuse(name, "payload_bytes must be between 1 and 2^62, got " +
                         std::to_string(options.payload_bytes));
    }
    const SegmentHeader header = make_header(options);
    check_room(name, header.total_bytes);

    // Nameless first: what others can see is complete and owned from its first moment.
    LockedFile file(::open(kShmFolder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
    if (!file.is_open()) {
        refuse_system(name, "cannot create a file in /dev/shm", errno);
    }
    if (::fchmod(file.fd(), 0600) != 0 ||
        ::ftruncate(file.fd(), static_cast<off_t>(header.total_bytes)) != 0 ||
        ::pwrite(file.fd(), &header, kHeaderBytes, 0) != static_cast<ssize_t>(kHeaderBytes)) {
        refuse_system(name, "cannot set up its file", errno);
    }
    file.try_read_lock(kAttachLockByte);
    std::unique_ptr<Ownership> ownership = Ownership::try_take(file);
    auto mapping =
        std::make_shared<Mapping>(name, std::move(file), header.total_bytes, /*is_writable=*/true);

    const std::string source = "/proc/self/fd/" + std::to_string(mapping->file().fd());
    if (::linkat(AT_FDCWD, source.c_str(), AT_FDCWD, path_of(name).c_str(), AT_SYMLINK_FOLLOW) !=
        0) {
        if (errno == EEXIST) {
            throw Failure(FailureKind::kSegmentExists, "segment '" + name + "' exists already");
        }
        refuse_system(name, "cannot give it its name", errno);
    }
    return std::unique_ptr<Segment>(new Segment(name, std::move(mapping), std::move(ownership)));
}

std::unique_ptr<Segment> Segment::attach(const std::string& name, const AttachOptions& options) {
    check_segment_name(name);
    const int access = options.is_writable ? O_RDWR : O_RDONLY;
    LockedFile file(::open(path_of(name).c_str(), access | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (!file.is_open()) {
        if (errno == ENOENT) {
            throw Failure(FailureKind::kSegmentNotFound, "segment '" + name + "' does not exist");
        }
        if (errno == ELOOP) {
            refuse(name, "check 'file type' failed: it is a symbolic link");
        }
        refuse_system(name, "cannot open it", errno);
    }
    SegmentHeader header{};
    if (const auto problem = find_header_problem(file.fd(), header)) {
        refuse(name, *problem);
    }
    check_attach(name, header, options);
    // The lock first, then the look whether a reaper was faster.
    if (!file.try_read_lock(kAttachLockByte) || file.is_unlinked()) {
        throw Failure(FailureKind::kSegmentNotFound, "segment '" + name + "' has been removed");
    }
    auto mapping =
        std::make_shared<Mapping>(name, std::move(file), header.total_bytes, options.is_writable);
    check_state(name, mapping->state());
    return std::unique_ptr<Segment>(new Segment(name, std::move(mapping), nullptr));
}

Segment::Segment(std::string name, std::shared_ptr<Mapping> mapping,
                 std::unique_ptr<Ownership> ownership)
    : name_(std::move(name)), mapping_(std::move(mapping)), ownership_(std::move(ownership)) {}

Segment::~Segment() { close(); }

bool Segment::is_closed() const {
    const std::lock_guard lock(mutex_);
    return mapping_ == nullptr;
}

bool Segment::is_owner() const {
    const std::lock_guard lock(mutex_);
    return ownership_ != nullptr && ownership_->is_mine();
}

std::shared_ptr<Mapping> Segment::mapping() const {
    const std::lock_guard lock(mutex_);
    if (mapping_ == nullptr) {
        refuse(name_, "it is closed");
    }
    return mapping_;
}

Ownership& Segment::require_owner(const char* action) const {
    if (ownership_ == nullptr || !ownership_->is_mine()) {
        refuse(name_, std::string("only its owner may ") + action + " it");
    }
    return *ownership_;
}

void Segment::seal() {
    const std::lock_guard lock(mutex_);
    Ownership& owner = require_owner("seal");
    mapping_->make_read_only();
    owner.header().is_sealed = 1;
    owner.set_state(SegmentState::kReady);
}

void Segment::mark_ready() {
    const std::lock_guard lock(mutex_);
    require_owner("mark").set_state(SegmentState::kReady);
}

void Segment::poison() {
    const std::lock_guard lock(mutex_);
    require_owner("poison").set_state(SegmentState::kPoisoned);
}

void Segment::unlink() {
    const std::lock_guard lock(mutex_);
    require_owner("unlink");
    // Nobody else takes the name away while we own the segment, so once is enough and a second try
    // could hit a successor of the same name.
    if (!std::exchange(is_unlinked_, true) && ::unlink(path_of(name_).c_str()) != 0 &&
        errno != ENOENT) {
        refuse_system(name_, "cannot unlink it", errno);
    }
}

void Segment::adopt_ownership() {
    const std::shared_ptr<Mapping> mapped = mapping();
    const std::lock_guard lock(mutex_);
    if (ownership_ != nullptr) {
        return;
    }
    std::unique_ptr<Ownership> ownership = Ownership::try_take(mapped->file());
    if (ownership == nullptr) {
        refuse(name_, "check 'owner' failed: it is owned by process " +
                          std::to_string(mapped->header().owner_pid) + ", which is alive");
    }
    if (mapped->file().is_unlinked()) {
        throw Failure(FailureKind::kSegmentNotFound, "segment '" + name_ + "' has been removed");
    }
    ownership->header().owner_pid = static_cast<std::uint32_t>(::getpid());
    ownership_ = std::move(ownership);
}

void Segment::release_ownership() {
    const std::lock_guard lock(mutex_);
    require_owner("release");
    ownership_.reset();
}

void Segment::close() {
    const std::lock_guard lock(mutex_);
    if (ownership_ != nullptr && ownership_->is_mine() && !is_unlinked_ &&
        ownership_->header().lifetime == Lifetime::kBound) {
        ::unlink(path_of(name_).c_str());
        is_unlinked_ = true;
    }
    ownership_.reset();
    mapping_.reset();
    held_slots_.clear();
}

std::uint64_t Segment::load_u64(std::uint64_t offset) const {
    const std::shared_ptr<Mapping> mapped = mapping();
    if (offset % sizeof(std::uint64_t) != 0) {
        refuse(name_, "offset " + std::to_string(offset) + " is not a multiple of 8");
    }
    const auto* word = reinterpret_cast<const std::uint64_t*>(mapped->at(offset, 8));
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

void Segment::store_u64(std::uint64_t offset, std::uint64_t value) const {
    const std::shared_ptr<Mapping> mapped = mapping();
    if (offset % sizeof(std::uint64_t) != 0) {
        refuse(name_, "offset " + std::to_string(offset) + " is not a multiple of 8");
    }
    auto* word = reinterpret_cast<std::uint64_t*>(mapped->writable_at(offset, 8));
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

bool Segment::try_lock_slot(std::uint64_t slot) {
    const std::shared_ptr<Mapping> mapped = mapping();
    const std::lock_guard lock(mutex_);
    // Locks of one open file do not exclude each other, so two users of this object are told apart
    // here.
    if (held_slots_.contains(slot) || !mapped->file().try_write_lock(kSlotLockBase + slot)) {
        return false;
    }
    held_slots_.insert(slot);
    return true;
}

void Segment::unlock_slot(std::uint64_t slot) {
    const std::shared_ptr<Mapping> mapped = mapping();
    const std::lock_guard lock(mutex_);
    if (held_slots_.erase(slot) == 0) {
        refuse(name_, "the writer lock of slot " + std::to_string(slot) + " is not held here");
    }
    mapped->file().unlock(kSlotLockBase + slot);
}

bool Segment::is_slot_locked(std::uint64_t slot) const {
    const std::shared_ptr<Mapping> mapped = mapping();
    const std::lock_guard lock(mutex_);
    return held_slots_.contains(slot) || mapped->file().is_locked_by_other(kSlotLockBase + slot);
}

}  // namespace headwater
