#include "headwater/memory_read.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "headwater/parallel.hpp"

namespace headwater {

namespace {

constexpr std::int64_t kRun = 1 << 20;

// The compiler picks the widest loads the CPU has when the extension is loaded.
__attribute__((target_clones("avx512f", "avx2", "default"))) std::uint64_t sum(
    const std::byte* data, std::int64_t num_bytes) {
    constexpr int kLanes = 32;
    std::uint64_t lanes[kLanes] = {};
    std::int64_t at = 0;
    for (; at + kLanes * 8 <= num_bytes; at += kLanes * 8) {
        for (int lane = 0; lane < kLanes; ++lane) {
            std::uint64_t word;
            std::memcpy(&word, data + at + lane * 8, 8);
            lanes[lane] += word;
        }
    }
    std::uint64_t total = 0;
    for (; at + 8 <= num_bytes; at += 8) {
        std::uint64_t word;
        std::memcpy(&word, data + at, 8);
        total += word;
    }
    for (const std::uint64_t lane : lanes) {
        total += lane;
    }
    return total;
}

}  // namespace

std::uint64_t read_memory(WorkerPool& pool, const std::byte* data, std::int64_t num_bytes) {
    std::atomic<std::uint64_t> total = 0;
    parallel_for(pool, (num_bytes + kRun - 1) / kRun, [&](std::int64_t run, int) {
        const std::int64_t start = run * kRun;
        total += sum(data + start, std::min(kRun, num_bytes - start));
    });
    return total;
}

}  // namespace headwater
