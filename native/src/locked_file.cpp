#include "headwater/locked_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "headwater/failure.hpp"

namespace headwater {

namespace {

struct flock lock_request(std::uint64_t byte, short type) {
    struct flock request{};  // l_pid must be zero for open-file-description locks
    request.l_type = type;
    request.l_whence = SEEK_SET;
    request.l_start = static_cast<off_t>(byte);
    request.l_len = 1;
    return request;
}

[[noreturn]] void fail_locking(int error_number) {
    throw Failure(FailureKind::kSegment,
                  system_message("cannot lock a shared-memory segment", error_number));
}

}  // namespace

std::string system_message(const std::string& what, int error_number) {
    return what + ": " + std::generic_category().message(error_number);
}

LockedFile::LockedFile(LockedFile&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

LockedFile& LockedFile::operator=(LockedFile&& other) noexcept {
    if (this != &other) {
        close();
        fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
}

LockedFile::~LockedFile() { close(); }

void LockedFile::close() noexcept {
    if (is_open()) {
        ::close(std::exchange(fd_, -1));
    }
}

LockedFile LockedFile::reopen() const {
    const std::string path = "/proc/self/fd/" + std::to_string(fd_);
    LockedFile copy(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (!copy.is_open()) {
        throw Failure(FailureKind::kSegment, system_message("cannot reopen " + path, errno));
    }
    return copy;
}

bool LockedFile::try_lock(std::uint64_t byte, short type) const {
    struct flock request = lock_request(byte, type);
    if (::fcntl(fd_, F_OFD_SETLK, &request) == 0) {
        return true;
    }
    if (errno == EAGAIN || errno == EACCES) {
        return false;
    }
    fail_locking(errno);
}

bool LockedFile::try_write_lock(std::uint64_t byte) const { return try_lock(byte, F_WRLCK); }

bool LockedFile::try_read_lock(std::uint64_t byte) const { return try_lock(byte, F_RDLCK); }

void LockedFile::unlock(std::uint64_t byte) const { try_lock(byte, F_UNLCK); }

bool LockedFile::is_locked_by_other(std::uint64_t byte) const {
    struct flock request = lock_request(byte, F_WRLCK);
    if (::fcntl(fd_, F_OFD_GETLK, &request) != 0) {
        fail_locking(errno);
    }
    return request.l_type != F_UNLCK;
}

bool LockedFile::is_unlinked() const {
    struct stat status{};
    return ::fstat(fd_, &status) != 0 || status.st_nlink == 0;
}

}  // namespace headwater
