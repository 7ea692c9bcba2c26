// Sharing out numbered pieces of work among a pool's workers.
#pragma once

#include <atomic>
#include <cstdint>

#include "headwater/worker_pool.hpp"

namespace headwater {

// Calls task(index, worker) for each index below `count`, on whichever worker is free.
template <class Task>
void parallel_for(WorkerPool& pool, std::int64_t count, const Task& task) {
    if (count <= 1 || pool.num_threads() == 1) {
        for (std::int64_t i = 0; i < count; ++i) {
            task(i, 0);
        }
        return;
    }
    std::atomic<std::int64_t> next = 0;
    auto job = [&](int worker) {
        for (std::int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < count;
             i = next.fetch_add(1, std::memory_order_relaxed)) {
            task(i, worker);
        }
    };
    pool.run(job);
}

}  // namespace headwater
