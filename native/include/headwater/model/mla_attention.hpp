// Multi-head latent attention of one layer, in its absorbed form, over the paged KV store.
//
// The pages hold one latent and one rotary key per token. A head's queries are taken to the latent
// space by the key rows of kv_b, and what they attend to is taken back by its value rows: memory
// does not grow with heads x context.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "headwater/float_product.hpp"
#include "headwater/matrix.hpp"
#include "headwater/model/compute.hpp"
#include "headwater/model/rms_norm.hpp"
#include "headwater/model/rotary.hpp"
#include "headwater/model/token_batch.hpp"

namespace headwater {

struct MlaWeights {
    // Without q_a, `q` takes hidden states; with it, what q_a and q_a_norm make of them.
    std::optional<Matrix> q_a;
    std::optional<RmsNorm> q_a_norm;
    Matrix q;
    Matrix kv_a;
    RmsNorm kv_a_norm;
    // Per head the key rows [nope_dim, latent_dim], then the value rows [value_dim, latent_dim].
    FloatMatrix kv_b;
    Matrix o;
};

// Pages are [blocks, block_tokens, latent_dim + rope_dim].
class MlaAttention {
  public:
    struct Spec {
        std::int64_t num_heads;
        std::int64_t latent_dim;
        std::int64_t nope_dim;
        std::int64_t rope_dim;
        std::int64_t value_dim;
        float softmax_scale;
    };

    // Throws Failure(kConfig) when the weights do not fit the spec.
    MlaAttention(const Spec& spec, MlaWeights weights, std::shared_ptr<Rotary> rotary);

    std::int64_t page_elements() const noexcept { return spec_.latent_dim + spec_.rope_dim; }
    // x FP32 [num_tokens, hidden], normalised -> out; the new entries go to the pages.
    void run(const Compute& compute, Workspace& workspace, const TokenBatch& batch, const float* x,
             std::uint16_t* pages, float* out) const;

  private:
    struct Slice;

    void place(const TokenBatch& batch, std::int64_t row, float* entry, std::uint16_t* pages) const;
    void run_slice(const Compute& compute, Workspace& workspace, const TokenBatch& batch,
                   const Slice& slice) const;
    // Queries [tokens, num_heads, nope + rope] -> [tokens, num_heads, latent + rope], scaled.
    void absorb(const Compute& compute, const Slice& slice, const float* queries,
                float* absorbed) const;
    // Latents [tokens, num_heads, latent] -> values [tokens, num_heads, value].
    void expand(const Compute& compute, std::int64_t num_tokens, const float* latents,
                float* values) const;

    Spec spec_;
    MlaWeights weights_;
    std::shared_ptr<Rotary> rotary_;
};

}  // namespace headwater
