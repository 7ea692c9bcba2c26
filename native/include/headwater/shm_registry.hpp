// Looks over the segments in /dev/shm and removes what the dead left behind.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "headwater/shm_header.hpp"

namespace headwater {

// One file in /dev/shm. When it fails a check, `state` is "foreign", `problem` says which check,
// and the other fields but the name are zero.
struct SegmentInfo {
    std::string name;
    std::string state;
    std::string problem;
    std::uint64_t total_bytes = 0;
    std::uint32_t kind = 0;
    std::uint32_t lifetime = 0;
    bool is_sealed = false;
    std::uint64_t epoch = 0;
    std::uint32_t layout_version = 0;
    Digest digest{};
    std::uint32_t owner_pid = 0;
    std::uint64_t created_unix_nano = 0;
    bool is_owner_alive = false;
    bool is_attached = false;  // mapped by anybody, its owner included
};

// Every file whose name starts with `prefix`, sorted by name. Touches nothing.
std::vector<SegmentInfo> list_segments(const std::string& prefix);

// Unlinks segments that nobody owns: bound ones, those that never became ready, and with
// `release_weights` also persistent ones that nobody maps. Foreign files are left alone. Returns
// the names removed. Any number of reapers may run at once.
std::vector<std::string> reap(const std::string& prefix, bool release_weights);

}  // namespace headwater
