// ExpertFetch: a job that reads weights of experts into the caches, before anybody asks for them.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "headwater/moe_layer.hpp"
#include "headwater/worker_pool.hpp"

namespace headwater {

// Each worker fetches what MoeRun will have it begin with, so that this lies in its own
// second-level cache: rows of gate and up of the first experts. It leaves out every other half of a
// tile of rows, which memory can then bring while the half that is there is multiplied.
class ExpertFetch {
  public:
    // `experts` are in range, and will be asked for in this order; all workers together fetch no
    // more than `most_bytes`, what the caches hold.
    ExpertFetch(const WorkerPool& pool, const MoeLayer& layer,
                std::span<const std::int32_t> experts, std::int64_t most_bytes);

    // Until `is_over` says so, which is asked every few kilobytes, or there is no more to fetch.
    // Returns how many bytes that was.
    std::int64_t run(int worker, const std::function<bool()>& is_over) const;

  private:
    const WorkerPool& pool_;
    const MoeLayer& layer_;
    const std::span<const std::int32_t> experts_;
    const std::int64_t rows_per_task_;
    const std::int64_t tasks_per_expert_;
    const std::int64_t most_per_worker_;
};

}  // namespace headwater
