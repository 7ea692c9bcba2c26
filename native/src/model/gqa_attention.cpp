#include "headwater/model/gqa_attention.hpp"

#include <string>
#include <utility>

#include "headwater/failure.hpp"
#include "headwater/half.hpp"
#include "headwater/parallel.hpp"

namespace headwater {

namespace {

void require(bool condition, const char* problem) {
    if (!condition) {
        throw Failure(FailureKind::kConfig, std::string("attention: ") + problem);
    }
}

}  // namespace

GqaAttention::GqaAttention(const Spec& spec, GqaWeights weights, std::shared_ptr<Rotary> rotary)
    : spec_(spec), weights_(std::move(weights)), rotary_(std::move(rotary)) {
    require(spec_.num_kv_heads > 0 && spec_.num_heads % spec_.num_kv_heads == 0,
            "the KV heads must divide the query heads");
    require(rotary_->dim() == spec_.head_dim, "the rotary embedding must cover a head");
    require(weights_.q.rows == spec_.num_heads * spec_.head_dim, "q must have a row per element");
    require(weights_.k.rows == spec_.num_kv_heads * spec_.head_dim &&
                weights_.v.rows == weights_.k.rows,
            "k and v must have a row per element");
    require(weights_.o.columns == weights_.q.rows, "o must have a column per row of q");
    for (const auto& norm : {&weights_.q_norm, &weights_.k_norm}) {
        require(!norm->has_value() || (*norm)->size() == spec_.head_dim,
                "norms must have the size of a head");
    }
}

void GqaAttention::run(const Compute& compute, Workspace& workspace, const TokenBatch& batch,
                       const float* x, std::uint16_t* pages, float* out) const {
    const std::int64_t num_tokens = batch.num_tokens();
    const std::int64_t q_size = weights_.q.rows;
    const std::int64_t kv_size = weights_.k.rows;
    const auto [queries, keys, values, attended] = carve<4>(
        workspace.attention,
        {num_tokens * q_size, num_tokens * kv_size, num_tokens * kv_size, num_tokens * q_size});
    const LinearPart projections[] = {{&weights_.q, queries, q_size},
                                      {&weights_.k, keys, kv_size},
                                      {&weights_.v, values, kv_size}};
    linear(*compute.pool, *compute.kernels, projections, x, weights_.q.columns, num_tokens,
           compute.mode);
    rotary_->set_positions(batch.positions());
    for_tokens(compute, num_tokens, q_size, [&](std::int64_t row) {
        place(batch, row, queries + row * q_size, keys + row * kv_size, values + row * kv_size,
              pages);
    });
    const std::int64_t token_stride = spec_.num_kv_heads * spec_.head_dim;
    const AttentionShape shape = {
        .num_heads = spec_.num_heads,
        .num_kv_heads = spec_.num_kv_heads,
        .key_dim = spec_.head_dim,
        .value_dim = spec_.head_dim,
        .block_stride = batch.block_tokens() * page_elements(),
        .token_stride = token_stride,
        .head_stride = spec_.head_dim,
        .value_offset = batch.block_tokens() * token_stride,
    };
    paged_attention(compute, workspace, shape, batch, 0, num_tokens, pages, queries, attended);
    const LinearPart output[] = {{&weights_.o, out, weights_.o.rows}};
    linear(*compute.pool, *compute.kernels, output, attended, q_size, num_tokens, compute.mode);
}

// Normalises, rotates and scales the queries where they are; stores the keys, likewise treated,
// and the values in the pages.
void GqaAttention::place(const TokenBatch& batch, std::int64_t row, float* queries, float* keys,
                         const float* values, std::uint16_t* pages) const {
    const std::int64_t dim = spec_.head_dim;
    for (std::int64_t head = 0; head < spec_.num_heads; ++head) {
        float* query = queries + head * dim;
        if (weights_.q_norm) {
            weights_.q_norm->apply(query, query);
        }
        rotary_->rotate(row, query, spec_.softmax_scale, query);
    }
    std::uint16_t* key_page = pages + batch.block(row) * batch.block_tokens() * page_elements() +
                              batch.offset(row) * spec_.num_kv_heads * dim;
    std::uint16_t* value_page = key_page + batch.block_tokens() * spec_.num_kv_heads * dim;
    for (std::int64_t head = 0; head < spec_.num_kv_heads; ++head) {
        float* key = keys + head * dim;
        if (weights_.k_norm) {
            weights_.k_norm->apply(key, key);
        }
        rotary_->rotate(row, key, 1.0F, key);
    }
    for (std::int64_t i = 0; i < weights_.k.rows; ++i) {
        key_page[i] = half_from_float(keys[i]);
        value_page[i] = half_from_float(values[i]);
    }
}

}  // namespace headwater
