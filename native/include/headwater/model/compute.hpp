// What every part of a model computes with, and the working memory that all layers share.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "headwater/kernels.hpp"
#include "headwater/linear_layer.hpp"
#include "headwater/parallel.hpp"
#include "headwater/worker_pool.hpp"

namespace headwater {

struct Compute {
    WorkerPool* pool;
    const Kernels* kernels;
    Mode mode;
};

// A piece of paged attention: see paged_attention.cpp.
struct AttentionTileSpec {
    std::int64_t span;
    // Queries [first_query, first_query + num_queries) of the span's new tokens.
    std::int64_t first_query;
    std::int64_t num_queries;
    std::int64_t kv_head;
    // Query heads [first_head, first_head + num_heads) of that KV head.
    std::int64_t first_head;
    std::int64_t num_heads;
    // The splits of the context that any of them sees.
    std::int64_t first_split;
    std::int64_t end_split;
    // Index of the tile's first row among the rows of all tiles.
    std::int64_t first_row;
};

// Grows to what the largest batch needs and is never shrunk; one forward pass at a time uses it.
struct Workspace {
    // Normalised hidden states, and what is added to the residual stream.
    Arena layer;
    // Projections that an attention keeps while it goes through the batch in slices.
    Arena layer_inputs;
    Arena attention;
    Arena partials;
    // The gate's.
    Arena choices;
    // What the network of every token adds to the routed experts.
    Arena common;
    std::vector<AttentionTileSpec> tiles;
};

// Pieces of `counts` floats each, aligned to a cache line, in one arena; they are valid until the
// arena is carved again.
template <std::size_t N>
std::array<float*, N> carve(Arena& arena, const std::array<std::int64_t, N>& counts) {
    constexpr std::int64_t kLineFloats = 16;
    std::int64_t total = 0;
    for (const std::int64_t count : counts) {
        total += (count + kLineFloats - 1) / kLineFloats * kLineFloats;
    }
    auto* next = reinterpret_cast<float*>(arena.reserve(total * 4));
    std::array<float*, N> pieces{};
    for (std::size_t i = 0; i < N; ++i) {
        pieces[i] = next;
        next += (counts[i] + kLineFloats - 1) / kLineFloats * kLineFloats;
    }
    return pieces;
}

// Calls task(row) for each token, shared out where there are enough of them for that to pay;
// `elements` says how much each task has to do.
template <class Task>
void for_tokens(const Compute& compute, std::int64_t num_tokens, std::int64_t elements,
                const Task& task) {
    constexpr std::int64_t kElementsPerChunk = 1 << 14;
    const std::int64_t per_chunk = std::max<std::int64_t>(1, kElementsPerChunk / elements);
    parallel_for(*compute.pool, (num_tokens + per_chunk - 1) / per_chunk,
                 [&](std::int64_t chunk, int) {
                     const std::int64_t stop = std::min((chunk + 1) * per_chunk, num_tokens);
                     for (std::int64_t row = chunk * per_chunk; row < stop; ++row) {
                         task(row);
                     }
                 });
}

}  // namespace headwater
