// Gate: which experts each token of a routed layer goes to, and with which weights.
#pragma once

#include <cstdint>
#include <vector>

#include "headwater/float_product.hpp"
#include "headwater/model/compute.hpp"

namespace headwater {

struct GateSpec {
    // With a bias: sigmoid scores, chosen with the bias by groups, weighted without it. Otherwise
    // the most probable experts after a softmax.
    std::vector<float> bias;
    std::int64_t experts_per_token = 1;
    // The experts come in equal groups; only those of a token's best groups may be chosen. A group
    // counts by the sum of its two best experts.
    std::int64_t num_groups = 1;
    std::int64_t groups_per_token = 1;
    // Whether the chosen weights are divided by their sum, before they are multiplied by the scale.
    bool is_normalized = false;
    float scale = 1.0F;
};

class Gate {
  public:
    // `matrix` is [num_experts, hidden]. Throws Failure(kConfig) when the spec does not fit it.
    Gate(const FloatMatrix& matrix, GateSpec spec);

    std::int64_t experts_per_token() const noexcept { return spec_.experts_per_token; }
    std::int64_t num_experts() const noexcept { return matrix_.rows; }
    // x FP32 [num_tokens, hidden] -> each token's experts and their weights, best first; of equals,
    // the lower expert comes first. Those of the next token begin `stride` elements further on.
    // `logits` [num_tokens, num_experts] is working memory.
    void choose(const Compute& compute, const float* x, std::int64_t num_tokens, float* logits,
                std::int32_t* experts, float* weights, std::int64_t stride) const;

  private:
    void multiply(const Compute& compute, const float* x, std::int64_t num_tokens,
                  float* logits) const;
    void choose_token(const float* logits, std::int32_t* experts, float* weights) const;
    // Takes the experts of all groups but the best out of the ranking.
    void close_groups(float* ranking) const;

    FloatMatrix matrix_;
    GateSpec spec_;
};

}  // namespace headwater
