#include "hybrid/expert_fetch.hpp"

#include <immintrin.h>
#include <unistd.h>

#include "task_cut.hpp"

namespace headwater {

namespace {

constexpr std::int64_t kLine = 64;

// What a worker's caches hold: its own of the second level, and a part of one of the third. Where
// there are several of those, that is too little, which does no harm.
std::int64_t cache_bytes(int num_threads) {
    constexpr std::int64_t kUnknown = 1 << 20;
    const std::int64_t own = sysconf(_SC_LEVEL2_CACHE_SIZE);
    const std::int64_t shared = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return (own > 0 ? own : kUnknown) + std::max<std::int64_t>(shared, 0) / num_threads;
}

}  // namespace

ExpertFetch::ExpertFetch(const WorkerPool& pool, const MoeLayer& layer,
                         std::span<const std::int32_t> experts)
    : pool_(pool),
      layer_(layer),
      experts_(experts),
      num_shards_(static_cast<int>(layer.shards().size())),
      rows_per_task_(layer.gate_up_rows(static_cast<std::int64_t>(experts.size()))),
      tasks_per_expert_(ceil_div(layer.shards()[0][0].gate.rows, rows_per_task_)),
      num_tasks_(tasks_per_expert_ * static_cast<std::int64_t>(experts.size())),
      bytes_per_worker_(cache_bytes(pool.num_threads())) {}

std::array<ExpertFetch::Range, 2> ExpertFetch::ranges_of(int shard,
                                                         std::int64_t task) const noexcept {
    const auto expert = static_cast<std::size_t>(experts_[task / tasks_per_expert_]);
    const ExpertWeights& weights = layer_.shards()[static_cast<std::size_t>(shard)][expert];
    const std::int64_t begin = task % tasks_per_expert_ * rows_per_task_;
    const std::int64_t end = std::min(begin + rows_per_task_, weights.gate.rows);
    const auto rows = [&](const Matrix& matrix) {
        return Range{matrix.data + begin * matrix.row_bytes, (end - begin) * matrix.row_bytes};
    };
    return {rows(weights.gate), rows(weights.up)};
}

void ExpertFetch::fetch(const std::byte* data, std::int64_t num_bytes) noexcept {
    // Into the second-level cache. Plain loads fetch half as much in the same time: they fill the
    // first-level one as well, whose misses a core can have few of (measured on Xeon).
    for (std::int64_t at = 0; at < num_bytes; at += kLine) {
        _mm_prefetch(reinterpret_cast<const char*>(data + at), _MM_HINT_T1);
    }
}

}  // namespace headwater
