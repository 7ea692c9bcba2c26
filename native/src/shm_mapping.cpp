// Mapping, SegmentView and Ownership: the parts a Segment is put together from.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "headwater/failure.hpp"
#include "headwater/shm_segment.hpp"

namespace headwater {

namespace {

#ifndef MADV_POPULATE_WRITE
constexpr int MADV_POPULATE_WRITE = 23;  // Linux 5.14; absent from glibc 2.36 and older
#endif

constexpr std::uint64_t kPageBytes = 4096;

}  // namespace

Mapping::Mapping(std::string name, LockedFile file, std::size_t total_bytes, bool is_writable)
    : name_(std::move(name)),
      file_(std::move(file)),
      total_bytes_(total_bytes),
      is_writable_(is_writable) {
    const int protection = is_writable ? PROT_READ | PROT_WRITE : PROT_READ;
    void* address = ::mmap(nullptr, total_bytes, protection, MAP_SHARED, file_.fd(), 0);
    if (address == MAP_FAILED) {
        throw Failure(FailureKind::kSegment,
                      system_message("segment '" + name_ + "': cannot map " +
                                         std::to_string(total_bytes) + " bytes",
                                     errno));
    }
    base_ = static_cast<std::byte*>(address);
    if (is_writable) {
        ::mprotect(base_, kHeaderBytes, PROT_READ);
    }
    // Advice only: whether shared memory gets huge pages is the administrator's choice.
    ::madvise(base_, total_bytes, MADV_HUGEPAGE);
}

Mapping::~Mapping() { ::munmap(base_, total_bytes_); }

const SegmentHeader& Mapping::header() const noexcept {
    return *reinterpret_cast<const SegmentHeader*>(base_);
}

SegmentState Mapping::state() const noexcept {
    // Plain builtin: std::atomic_ref cannot refer to const memory before C++26.
    return static_cast<SegmentState>(__atomic_load_n(&header().state, __ATOMIC_ACQUIRE));
}

std::byte* Mapping::at(std::uint64_t offset, std::uint64_t num_bytes) const {
    if (offset > payload_bytes() || num_bytes > payload_bytes() - offset) {
        throw Failure(FailureKind::kSegment,
                      "segment '" + name_ + "': offset " + std::to_string(offset) + " plus " +
                          std::to_string(num_bytes) + " bytes is outside its payload of " +
                          std::to_string(payload_bytes()) + " bytes");
    }
    return base_ + kHeaderBytes + offset;
}

std::byte* Mapping::writable_at(std::uint64_t offset, std::uint64_t num_bytes) const {
    if (!is_writable_) {
        throw Failure(FailureKind::kSegment,
                      "segment '" + name_ + "' is mapped read-only and cannot be written");
    }
    return at(offset, num_bytes);
}

void Mapping::populate(std::uint64_t offset, std::uint64_t num_bytes) const {
    if (num_bytes == 0) {
        return;
    }
    writable_at(offset, num_bytes);
    const std::uint64_t first = (kHeaderBytes + offset) / kPageBytes * kPageBytes;
    const std::uint64_t length = kHeaderBytes + offset + num_bytes - first;
    if (::madvise(base_ + first, length, MADV_POPULATE_WRITE) == 0) {
        return;
    }
    // An old kernel does not know the advice; allocating the file's blocks serves as well.
    if (errno == EINVAL && ::fallocate(file_.fd(), FALLOC_FL_KEEP_SIZE, static_cast<off_t>(first),
                                       static_cast<off_t>(length)) == 0) {
        return;
    }
    throw Failure(FailureKind::kSharedMemoryFull,
                  system_message("segment '" + name_ + "': /dev/shm or memory has no room for " +
                                     std::to_string(num_bytes) + " bytes at offset " +
                                     std::to_string(offset) + "; free memory or enlarge /dev/shm",
                                 errno));
}

void Mapping::make_read_only() {
    const std::lock_guard lock(seal_mutex_);
    if (num_writable_views_ > 0) {
        throw Failure(FailureKind::kSegment, "segment '" + name_ + "': cannot seal while " +
                                                 std::to_string(num_writable_views_) +
                                                 " writable view(s) of it are alive; drop them");
    }
    if (::mprotect(base_, total_bytes_, PROT_READ) != 0) {
        throw Failure(FailureKind::kSegment,
                      system_message("segment '" + name_ + "': cannot make it read-only", errno));
    }
    is_writable_ = false;
}

SegmentView::SegmentView(std::shared_ptr<Mapping> mapping, std::uint64_t offset,
                         std::uint64_t num_bytes)
    : mapping_(std::move(mapping)), data_(mapping_->at(offset, num_bytes)), num_bytes_(num_bytes) {
    const std::lock_guard lock(mapping_->seal_mutex_);
    is_writable_ = mapping_->is_writable();
    mapping_->num_writable_views_ += is_writable_ ? 1 : 0;
}

SegmentView::~SegmentView() { mapping_->num_writable_views_ -= is_writable_ ? 1 : 0; }

Ownership::Ownership(LockedFile file, SegmentHeader* header)
    : file_(std::move(file)), header_(header), pid_(::getpid()) {}

Ownership::~Ownership() { ::munmap(header_, kHeaderBytes); }

std::unique_ptr<Ownership> Ownership::try_take(const LockedFile& file) {
    LockedFile owner_file = file.reopen();
    if (!owner_file.try_write_lock(kOwnerLockByte)) {
        return nullptr;
    }
    void* page =
        ::mmap(nullptr, kHeaderBytes, PROT_READ | PROT_WRITE, MAP_SHARED, owner_file.fd(), 0);
    if (page == MAP_FAILED) {
        throw Failure(FailureKind::kSegment,
                      system_message("cannot map the header of a segment", errno));
    }
    return std::unique_ptr<Ownership>(
        new Ownership(std::move(owner_file), static_cast<SegmentHeader*>(page)));
}

void Ownership::set_state(SegmentState state) noexcept {
    std::atomic_ref(header_->state)
        .store(static_cast<std::uint32_t>(state), std::memory_order_release);
}

bool Ownership::is_mine() const noexcept { return pid_ == ::getpid(); }

}  // namespace headwater
