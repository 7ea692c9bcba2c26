// Attention of a batch's new tokens over the pages of their sequences, shared out among workers.
#pragma once

#include <cstdint>

#include "headwater/attention.hpp"
#include "headwater/model/compute.hpp"
#include "headwater/model/token_batch.hpp"

namespace headwater {

// Query heads of a KV head are neighbours. Strides and offsets count FP16 elements of the pages:
// see PagedCache; KV head h lies h * head_stride further on.
struct AttentionShape {
    std::int64_t num_heads;
    std::int64_t num_kv_heads;
    std::int64_t key_dim;
    std::int64_t value_dim;
    std::int64_t block_stride;
    std::int64_t token_stride;
    std::int64_t head_stride;
    std::int64_t value_offset;
    // Tokens that a query sees, itself and those before it; 0: all.
    std::int64_t window = 0;
    // Per query head a score without a value; null: none.
    const float* sinks = nullptr;
};

// For rows [first_row, end_row) of the batch, whose keys and values are in the pages already:
// queries FP32 [rows, num_heads, key_dim], times the softmax scale, to outputs
// [rows, num_heads, value_dim].
void paged_attention(const Compute& compute, Workspace& workspace, const AttentionShape& shape,
                     const TokenBatch& batch, std::int64_t first_row, std::int64_t end_row,
                     const std::uint16_t* pages, const float* queries, float* outputs);

}  // namespace headwater
