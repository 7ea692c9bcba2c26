// ExpertFetch: a job that reads weights of experts into the caches, before anybody asks for them.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "headwater/moe_layer.hpp"
#include "headwater/worker_pool.hpp"

namespace headwater {

// Each worker fetches what MoeRun will have it begin with, so that this lies in its own
// second-level cache: rows of gate and up of the first experts.
class ExpertFetch {
  public:
    // `experts` are in range, and will be asked for in this order.
    ExpertFetch(const WorkerPool& pool, const MoeLayer& layer,
                std::span<const std::int32_t> experts);

    // Fetches until `is_over` says so, which is asked every few kilobytes, or the caches are full.
    // Returns how many bytes that was.
    template <class IsOver>
    std::int64_t run(int worker, const IsOver& is_over) const noexcept {
        const int home = pool_.shard_of(worker, num_shards_);
        const WorkerPool::Team team = pool_.team_of(home, num_shards_);
        std::int64_t fetched = 0;
        for (std::int64_t task = worker - team.first; task < num_tasks_; task += team.size) {
            for (const Range range : ranges_of(home, task)) {
                for (std::int64_t at = 0; at < range.size; at += kPiece) {
                    if (fetched >= bytes_per_worker_ || is_over()) {
                        return fetched;
                    }
                    const std::int64_t size = std::min(kPiece, range.size - at);
                    fetch(range.data + at, size);
                    fetched += size;
                }
            }
        }
        return fetched;
    }

  private:
    static constexpr std::int64_t kPiece = 4096;
    struct Range {
        const std::byte* data;
        std::int64_t size;
    };

    // Rows of gate, and of up.
    std::array<Range, 2> ranges_of(int shard, std::int64_t task) const noexcept;
    static void fetch(const std::byte* data, std::int64_t num_bytes) noexcept;

    const WorkerPool& pool_;
    const MoeLayer& layer_;
    const std::span<const std::int32_t> experts_;
    const int num_shards_;
    const std::int64_t rows_per_task_;
    const std::int64_t tasks_per_expert_;
    const std::int64_t num_tasks_;
    const std::int64_t bytes_per_worker_;
};

}  // namespace headwater
