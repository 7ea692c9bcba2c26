// The first 4096 bytes of every segment, and the checks a file must pass to be taken for one.
//
//   byte  size  field              meaning
//      0     8  magic              "HEADWATR"
//      8     4  header_version     1
//     12     4  kind               1 weights, 2 KV pool
//     16     4  lifetime           1 bound: dies with its owner; 2 persistent: outlives processes
//     20     4  state              1 filling, 2 ready, 3 poisoned; atomic, release/acquire
//     24     4  is_sealed          1 once the payload never changes again
//     28     4  layout_version     version of the payload's layout; the payload's maker counts it
//     32     8  total_bytes        size of the file, these 4096 bytes included
//     40     8  epoch              counts the owner's starts
//     48     4  owner_uid          user that made the segment
//     52     4  owner_pid          process that owns or last owned it; for people, never checked
//     56     8  created_unix_nano  when it was made
//     64    32  digest             SHA-256 of what the payload was made from; zero if of nothing
//     96  4000  reserved           zero
//
// Numbers are little-endian. The payload begins at byte 4096.
#pragma once

#include <sys/stat.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace headwater {

inline constexpr std::size_t kHeaderBytes = 4096;
inline constexpr std::array<char, 8> kMagic = {'H', 'E', 'A', 'D', 'W', 'A', 'T', 'R'};
inline constexpr std::uint32_t kHeaderVersion = 1;

enum class SegmentKind : std::uint32_t { kWeights = 1, kKv = 2 };
enum class Lifetime : std::uint32_t { kBound = 1, kPersistent = 2 };
enum class SegmentState : std::uint32_t { kFilling = 1, kReady = 2, kPoisoned = 3 };

using Digest = std::array<std::uint8_t, 32>;

struct SegmentHeader {
    std::array<char, 8> magic;
    std::uint32_t header_version;
    SegmentKind kind;
    Lifetime lifetime;
    std::uint32_t state;
    std::uint32_t is_sealed;
    std::uint32_t layout_version;
    std::uint64_t total_bytes;
    std::uint64_t epoch;
    std::uint32_t owner_uid;
    std::uint32_t owner_pid;
    std::uint64_t created_unix_nano;
    Digest digest;
    std::array<std::uint8_t, 4000> reserved;
};
static_assert(sizeof(SegmentHeader) == kHeaderBytes);
static_assert(offsetof(SegmentHeader, state) == 20);
static_assert(offsetof(SegmentHeader, total_bytes) == 32);
static_assert(offsetof(SegmentHeader, digest) == 64);

// What is wrong with a file as a segment, or nothing. `header` gets the file's header when it is
// long enough to have one. Says nothing about state.
std::optional<std::string> find_header_problem(int fd, SegmentHeader& header);

// "filling", "ready", "poisoned"; "foreign" for anything else.
const char* state_name(std::uint32_t state);

}  // namespace headwater
