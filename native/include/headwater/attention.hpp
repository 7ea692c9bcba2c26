// Attention of a few queries over a piece of one sequence's pages: what each instruction set's
// kernel computes, and how the results of pieces are put together.
//
// A query's context is cut into splits at fixed positions. Each split is one tile's work, and
// splits are merged from the first to the last. So a query's result has the same bits whatever
// other queries are in its tile, however its prompt was cut, and however many threads there are.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headwater {

// Splits start at multiples of this position.
inline constexpr std::int64_t kSplitTokens = 256;
inline constexpr std::int64_t kMaxTileRows = 64;

// Keys and values of one KV head of a sequence, in FP16 pages; strides and offsets in elements.
// Token t lies at pages + block_ids[t / block_tokens] * block_stride
//                       + t % block_tokens * token_stride.
struct PagedCache {
    const std::uint16_t* pages;
    const std::int64_t* block_ids;
    std::int64_t block_tokens;
    std::int64_t block_stride;
    std::int64_t token_stride;
    std::int64_t key_offset;
    std::int64_t value_offset;

    const std::uint16_t* token(std::int64_t position) const {
        return pages + block_ids[position / block_tokens] * block_stride +
               position % block_tokens * token_stride;
    }
};

struct AttentionTile {
    const PagedCache* cache;
    std::int64_t key_dim;
    std::int64_t value_dim;
    std::int64_t num_rows;
    // Per row a query [key_dim], times the softmax scale.
    const float* const* queries;
    // Per row the positions [visible_begin, visible_end) that it sees.
    const std::int64_t* visible_begin;
    const std::int64_t* visible_end;
    // Keys [key_begin, key_end) of one split are read, and no others.
    std::int64_t key_begin;
    std::int64_t key_end;
    // Per row the greatest score (-infinity where it sees none of the keys), the sum of
    // exp(score - greatest), and the sum [value_dim] of the values with those weights.
    float* maxima;
    float* sums;
    float* weighted;
    // Working memory of attention_scratch_bytes(key_dim), aligned to 64.
    std::byte* scratch;
};

// Scores of all rows, pointers to the split's tokens, and one group of keys laid out for reading.
constexpr std::int64_t attention_scratch_bytes(std::int64_t key_dim) {
    return kSplitTokens * (kMaxTileRows * 4 + 8) + (key_dim + 1) / 2 * 64 * 4;
}

// What a row knows of the splits seen so far. `weighted` is [value_dim].
struct AttentionState {
    float* maximum;
    float* sum;
    float* weighted;
};

// The state of a row that has seen nothing.
void clear_attention(const AttentionState& state, std::int64_t value_dim);

// Adds the next split's result to `state`.
void merge_attention(const AttentionState& state, const AttentionState& next,
                     std::int64_t value_dim);

// The row's output [value_dim]: values weighted by the softmax. `sink`, where not null, is a score
// that takes part in the softmax without a value.
void finish_attention(const AttentionState& state, const float* sink, std::int64_t value_dim,
                      float* output);

}  // namespace headwater
