// The speed limit of decode: how fast a pool's workers can read memory and do nothing with it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "headwater/worker_pool.hpp"

namespace headwater {

// Reads every byte once, in runs of 1 MiB per worker; returns a sum, so that nothing is left out.
// `num_bytes` is a multiple of 64.
std::uint64_t read_memory(WorkerPool& pool, const std::byte* data, std::int64_t num_bytes);

}  // namespace headwater
