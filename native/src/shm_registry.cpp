#include "headwater/shm_registry.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "headwater/failure.hpp"
#include "headwater/locked_file.hpp"

namespace headwater {

namespace {

std::string path_of(const std::string& name) { return "/dev/shm/" + name; }

LockedFile open_segment(const std::string& name, int access) {
    return LockedFile(::open(path_of(name).c_str(), access | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
}

std::vector<std::string> names_with_prefix(const std::string& prefix) {
    const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/dev/shm"), ::closedir);
    if (folder == nullptr) {
        throw Failure(FailureKind::kSegment, system_message("cannot list /dev/shm", errno));
    }
    std::vector<std::string> names;
    while (const dirent* entry = ::readdir(folder.get())) {
        const std::string name = entry->d_name;
        if (name != "." && name != ".." && name.starts_with(prefix)) {
            names.push_back(name);
        }
    }
    std::sort(names.begin(), names.end());
    return names;
}

// Says nothing about the owner.
bool is_removable(const LockedFile& file, const SegmentHeader& header, bool release_weights) {
    if (header.lifetime == Lifetime::kBound ||
        header.state != static_cast<std::uint32_t>(SegmentState::kReady)) {
        return true;
    }
    return release_weights && !file.is_locked_by_other(kAttachLockByte);
}

bool reap_one(const std::string& name, bool release_weights) {
    const LockedFile file = open_segment(name, O_RDWR);
    SegmentHeader header{};
    if (!file.is_open() || find_header_problem(file.fd(), header)) {
        return false;
    }
    // A look before the lock: what stays anyway must not seem owned to somebody about to adopt it.
    if (!is_removable(file, header, release_weights)) {
        return false;
    }
    // With the owner lock in hand and the name still there, nobody else can take the name away;
    // with the attach lock, nobody can attach either.
    if (!file.try_write_lock(kOwnerLockByte) || file.is_unlinked()) {
        return false;
    }
    // Once more: the owner may have made it ready just before it let go.
    if (find_header_problem(file.fd(), header) || !is_removable(file, header, release_weights)) {
        return false;
    }
    const bool is_bound = header.lifetime == Lifetime::kBound;
    if (!is_bound && !file.try_write_lock(kAttachLockByte)) {
        return false;
    }
    return ::unlink(path_of(name).c_str()) == 0;
}

}  // namespace

std::vector<SegmentInfo> list_segments(const std::string& prefix) {
    std::vector<SegmentInfo> infos;
    for (const std::string& name : names_with_prefix(prefix)) {
        const LockedFile file = open_segment(name, O_RDONLY);
        if (!file.is_open() && errno == ENOENT) {
            continue;  // gone since the folder was read
        }
        SegmentInfo info;
        info.name = name;
        info.state = "foreign";
        SegmentHeader header{};
        const auto problem = file.is_open() ? find_header_problem(file.fd(), header)
                                            : system_message("cannot open it", errno);
        if (problem) {
            info.problem = *problem;
        } else {
            info.state = state_name(header.state);
            info.total_bytes = header.total_bytes;
            info.kind = static_cast<std::uint32_t>(header.kind);
            info.lifetime = static_cast<std::uint32_t>(header.lifetime);
            info.is_sealed = header.is_sealed != 0;
            info.epoch = header.epoch;
            info.layout_version = header.layout_version;
            info.digest = header.digest;
            info.owner_pid = header.owner_pid;
            info.created_unix_nano = header.created_unix_nano;
            info.is_owner_alive = file.is_locked_by_other(kOwnerLockByte);
            info.is_attached = file.is_locked_by_other(kAttachLockByte);
        }
        infos.push_back(std::move(info));
    }
    return infos;
}

std::vector<std::string> reap(const std::string& prefix, bool release_weights) {
    std::vector<std::string> removed;
    for (const std::string& name : names_with_prefix(prefix)) {
        if (reap_one(name, release_weights)) {
            removed.push_back(name);
        }
    }
    return removed;
}

}  // namespace headwater
