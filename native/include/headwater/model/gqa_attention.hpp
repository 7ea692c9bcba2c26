// Grouped-query attention of one layer, over the paged KV store.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "headwater/matrix.hpp"
#include "headwater/model/compute.hpp"
#include "headwater/model/paged_attention.hpp"
#include "headwater/model/rms_norm.hpp"
#include "headwater/model/rotary.hpp"
#include "headwater/model/token_batch.hpp"

namespace headwater {

struct GqaWeights {
    Matrix q;
    Matrix k;
    Matrix v;
    Matrix o;
    // Over each head.
    std::optional<RmsNorm> q_norm;
    std::optional<RmsNorm> k_norm;
};

// Pages are [blocks, 2 (key, value), block_tokens, num_kv_heads, head_dim].
class GqaAttention {
  public:
    struct Spec {
        std::int64_t num_heads;
        std::int64_t num_kv_heads;
        std::int64_t head_dim;
        float softmax_scale;
    };

    // Throws Failure(kConfig) when the weights do not fit the spec.
    GqaAttention(const Spec& spec, GqaWeights weights, std::shared_ptr<Rotary> rotary);

    std::int64_t page_elements() const noexcept { return 2 * spec_.num_kv_heads * spec_.head_dim; }
    // x FP32 [num_tokens, hidden], normalised -> out; the new keys and values go to the pages.
    void run(const Compute& compute, Workspace& workspace, const TokenBatch& batch, const float* x,
             std::uint16_t* pages, float* out) const;

  private:
    void place(const TokenBatch& batch, std::int64_t row, float* queries, float* keys,
               const float* values, std::uint16_t* pages) const;

    Spec spec_;
    GqaWeights weights_;
    std::shared_ptr<Rotary> rotary_;
};

}  // namespace headwater
