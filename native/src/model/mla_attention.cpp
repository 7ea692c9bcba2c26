#include "headwater/model/mla_attention.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "headwater/failure.hpp"
#include "headwater/half.hpp"
#include "headwater/model/paged_attention.hpp"

namespace headwater {

namespace {

// Queries in the latent space are many times larger than hidden states; so many tokens' at once
// keep them below 40 MB for the largest models, and are enough for products to be efficient.
constexpr std::int64_t kSliceTokens = 128;
// Tokens for which a head's rows of kv_b are expanded once.
constexpr std::int64_t kTokensPerTask = 32;

void require(bool condition, const char* problem) {
    if (!condition) {
        throw Failure(FailureKind::kConfig, std::string("attention: ") + problem);
    }
}

}  // namespace

// Rows [first, stop) of the batch; `compressed` is what `q` takes, for these rows.
struct MlaAttention::Slice {
    std::int64_t first;
    std::int64_t stop;
    const float* compressed;
    const std::uint16_t* pages;
    float* out;

    std::int64_t num_tokens() const { return stop - first; }
};

MlaAttention::MlaAttention(const Spec& spec, MlaWeights weights, std::shared_ptr<Rotary> rotary)
    : spec_(spec), weights_(std::move(weights)), rotary_(std::move(rotary)) {
    require(rotary_->dim() == spec_.rope_dim, "the rotary embedding must cover the rotary key");
    require(weights_.q_a.has_value() == weights_.q_a_norm.has_value(), "q_a needs its norm");
    require(!weights_.q_a || (weights_.q_a->rows == weights_.q.columns &&
                              weights_.q_a_norm->size() == weights_.q.columns),
            "q must take what q_a gives");
    require(weights_.q.rows == spec_.num_heads * (spec_.nope_dim + spec_.rope_dim),
            "q must have a row per element");
    require(weights_.kv_a.rows == page_elements(), "kv_a must have a row per cached element");
    require(weights_.kv_a_norm.size() == spec_.latent_dim, "kv_a's norm must cover the latent");
    require(weights_.kv_b.rows == spec_.num_heads * (spec_.nope_dim + spec_.value_dim) &&
                weights_.kv_b.columns == spec_.latent_dim,
            "kv_b must have a row per element of keys and values");
    require(weights_.o.columns == spec_.num_heads * spec_.value_dim,
            "o must have a column per element of the values");
}

void MlaAttention::run(const Compute& compute, Workspace& workspace, const TokenBatch& batch,
                       const float* x, std::uint16_t* pages, float* out) const {
    const std::int64_t num_tokens = batch.num_tokens();
    const std::int64_t entry_size = page_elements();
    const std::int64_t compressed_size = weights_.q.columns;
    const bool is_compressed = weights_.q_a.has_value();
    const auto [entries, compressed] =
        carve<2>(workspace.layer_inputs,
                 {num_tokens * entry_size, is_compressed ? num_tokens * compressed_size : 0});
    const LinearPart projections[] = {
        {&weights_.kv_a, entries, entry_size},
        {is_compressed ? &*weights_.q_a : nullptr, compressed, compressed_size}};
    linear(*compute.pool, *compute.kernels, {projections, is_compressed ? 2U : 1U}, x,
           weights_.kv_a.columns, num_tokens, compute.mode);
    rotary_->set_positions(batch.positions());
    for_tokens(compute, num_tokens, entry_size + compressed_size, [&](std::int64_t row) {
        place(batch, row, entries + row * entry_size, pages);
        if (is_compressed) {
            float* mine = compressed + row * compressed_size;
            weights_.q_a_norm->apply(mine, mine);
        }
    });
    const float* q_inputs = is_compressed ? compressed : x;
    for (std::int64_t first = 0; first < num_tokens; first += kSliceTokens) {
        run_slice(compute, workspace, batch,
                  {first, std::min(first + kSliceTokens, num_tokens),
                   q_inputs + first * compressed_size, pages, out + first * weights_.o.rows});
    }
}

// Stores a token's normalised latent and its rotated key in the pages.
void MlaAttention::place(const TokenBatch& batch, std::int64_t row, float* entry,
                         std::uint16_t* pages) const {
    weights_.kv_a_norm.apply(entry, entry);
    rotary_->rotate(row, entry + spec_.latent_dim, 1.0F, entry + spec_.latent_dim);
    std::uint16_t* page =
        pages + (batch.block(row) * batch.block_tokens() + batch.offset(row)) * page_elements();
    for (std::int64_t i = 0; i < page_elements(); ++i) {
        page[i] = half_from_float(entry[i]);
    }
}

void MlaAttention::run_slice(const Compute& compute, Workspace& workspace, const TokenBatch& batch,
                             const Slice& slice) const {
    const std::int64_t num_tokens = slice.num_tokens();
    const std::int64_t num_heads = spec_.num_heads;
    const auto [queries, absorbed, latents, values] =
        carve<4>(workspace.attention,
                 {num_tokens * weights_.q.rows, num_tokens * num_heads * page_elements(),
                  num_tokens * num_heads * spec_.latent_dim, num_tokens * weights_.o.columns});
    const LinearPart projection[] = {{&weights_.q, queries, weights_.q.rows}};
    linear(*compute.pool, *compute.kernels, projection, slice.compressed, weights_.q.columns,
           num_tokens, compute.mode);
    absorb(compute, slice, queries, absorbed);
    const AttentionShape shape = {
        .num_heads = num_heads,
        .num_kv_heads = 1,
        .key_dim = page_elements(),
        .value_dim = spec_.latent_dim,
        .block_stride = batch.block_tokens() * page_elements(),
        .token_stride = page_elements(),
        .head_stride = 0,
        .value_offset = 0,
    };
    paged_attention(compute, workspace, shape, batch, slice.first, slice.stop, slice.pages,
                    absorbed, latents);
    expand(compute, num_tokens, latents, values);
    const LinearPart output[] = {{&weights_.o, slice.out, weights_.o.rows}};
    linear(*compute.pool, *compute.kernels, output, values, weights_.o.columns, num_tokens,
           compute.mode);
}

void MlaAttention::absorb(const Compute& compute, const Slice& slice, const float* queries,
                          float* absorbed) const {
    const std::int64_t num_chunks = (slice.num_tokens() + kTokensPerTask - 1) / kTokensPerTask;
    parallel_for(*compute.pool, spec_.num_heads * num_chunks, [&](std::int64_t task, int) {
        const std::int64_t head = task / num_chunks;
        const std::int64_t first = task % num_chunks * kTokensPerTask;
        const std::int64_t count = std::min(kTokensPerTask, slice.num_tokens() - first);
        const float* inputs[kTokensPerTask];
        float* outputs[kTokensPerTask];
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t index = (first + i) * spec_.num_heads + head;
            inputs[i] = queries + index * (spec_.nope_dim + spec_.rope_dim);
            outputs[i] = absorbed + index * page_elements();
        }
        const std::int64_t first_row = head * (spec_.nope_dim + spec_.value_dim);
        compute.kernels->multiply_floats_transposed(
            {&weights_.kv_b, first_row, first_row + spec_.nope_dim, inputs, outputs, count});
        for (std::int64_t i = 0; i < count; ++i) {
            for (std::int64_t j = 0; j < spec_.latent_dim; ++j) {
                outputs[i][j] *= spec_.softmax_scale;
            }
            rotary_->rotate(slice.first + first + i, inputs[i] + spec_.nope_dim,
                            spec_.softmax_scale, outputs[i] + spec_.latent_dim);
        }
    });
}

void MlaAttention::expand(const Compute& compute, std::int64_t num_tokens, const float* latents,
                          float* values) const {
    const std::int64_t num_chunks = (num_tokens + kTokensPerTask - 1) / kTokensPerTask;
    parallel_for(*compute.pool, spec_.num_heads * num_chunks, [&](std::int64_t task, int) {
        const std::int64_t head = task / num_chunks;
        const std::int64_t first = task % num_chunks * kTokensPerTask;
        const std::int64_t count = std::min(kTokensPerTask, num_tokens - first);
        const float* inputs[kTokensPerTask];
        float* outputs[kTokensPerTask];
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t index = (first + i) * spec_.num_heads + head;
            inputs[i] = latents + index * spec_.latent_dim;
            outputs[i] = values + index * spec_.value_dim;
        }
        const std::int64_t first_row = head * (spec_.nope_dim + spec_.value_dim) + spec_.nope_dim;
        compute.kernels->multiply_floats(
            {&weights_.kv_b, first_row, first_row + spec_.value_dim, inputs, outputs, count});
    });
}

}  // namespace headwater
