#include "headwater/shm_header.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "headwater/failure.hpp"

namespace headwater {

namespace {

std::string describe_mismatch(const char* check, const std::string& expected,
                              const std::string& found) {
    return std::string("check '") + check + "' failed: expected " + expected + ", found " + found;
}

std::string octal(unsigned mode) {
    char text[16];
    std::snprintf(text, sizeof text, "%04o", mode);
    return text;
}

bool is_known(const SegmentHeader& header) {
    const auto kind = static_cast<std::uint32_t>(header.kind);
    const auto lifetime = static_cast<std::uint32_t>(header.lifetime);
    return (kind == 1 || kind == 2) && (lifetime == 1 || lifetime == 2);
}

}  // namespace

std::optional<std::string> find_header_problem(int fd, SegmentHeader& header) {
    struct stat status{};
    if (::fstat(fd, &status) != 0) {
        return system_message("cannot read its status", errno);
    }
    if (!S_ISREG(status.st_mode)) {
        return "check 'file type' failed: it is not a regular file";
    }
    if (status.st_uid != ::geteuid()) {
        return describe_mismatch("owner uid", std::to_string(::geteuid()),
                                 std::to_string(status.st_uid));
    }
    if ((status.st_mode & 07777) != 0600) {
        return describe_mismatch("mode", "0600", octal(status.st_mode & 07777));
    }
    const auto file_bytes = static_cast<std::uint64_t>(status.st_size);
    if (file_bytes < kHeaderBytes) {
        return describe_mismatch("size", "at least 4096 bytes", std::to_string(file_bytes));
    }
    if (::pread(fd, &header, kHeaderBytes, 0) != static_cast<ssize_t>(kHeaderBytes)) {
        return system_message("cannot read its header", errno);
    }
    if (header.magic != kMagic) {
        return "check 'magic' failed: it is not a Headwater segment";
    }
    if (header.header_version != kHeaderVersion) {
        return describe_mismatch("header version", std::to_string(kHeaderVersion),
                                 std::to_string(header.header_version));
    }
    if (header.total_bytes != file_bytes) {
        return describe_mismatch("size",
                                 std::to_string(header.total_bytes) + " bytes as in its header",
                                 std::to_string(file_bytes));
    }
    if (!is_known(header)) {
        return "check 'kind and lifetime' failed: the values are unknown to this version";
    }
    return std::nullopt;
}

const char* state_name(std::uint32_t state) {
    switch (static_cast<SegmentState>(state)) {
        case SegmentState::kFilling:
            return "filling";
        case SegmentState::kReady:
            return "ready";
        case SegmentState::kPoisoned:
            return "poisoned";
    }
    return "foreign";
}

}  // namespace headwater
