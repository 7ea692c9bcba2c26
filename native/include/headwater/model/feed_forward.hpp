// The feed-forward network of one layer: routed experts, a network that serves every token, or
// both.
//
// Where that network has the experts' shape, it is one more of them, chosen last by every token, so
// that all of a layer's weights are one job.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "headwater/model/compute.hpp"
#include "headwater/model/gate.hpp"
#include "headwater/moe_layer.hpp"

namespace headwater {

class FeedForward {
  public:
    // Dense.
    FeedForward(const Compute& compute, const ExpertWeights& dense);
    // Routed: shards[s][e] is shard s of expert e.
    FeedForward(const Compute& compute, Gate gate, std::vector<std::vector<ExpertWeights>> shards,
                const std::optional<ExpertWeights>& shared);

    // x FP32 [num_tokens, hidden], normalised -> out, likewise.
    void run(const Compute& compute, Workspace& workspace, const float* x, std::int64_t num_tokens,
             float* out);

  private:
    void run_routed(const Compute& compute, Workspace& workspace, const float* x,
                    std::int64_t num_tokens, float* out);
    void run_common(const Compute& compute, Workspace& workspace, const float* x,
                    std::int64_t num_tokens, float* out);

    std::int64_t hidden_size_;
    std::optional<Gate> gate_;
    // The gate's experts, and with `is_common_routed_` the common network behind them.
    std::unique_ptr<MoeLayer> routed_;
    bool is_common_routed_ = false;
    // The network of every token, where it is on its own.
    std::unique_ptr<MoeLayer> common_;
};

// The experts of tensors that stack them shard by shard: gate_up [experts, shards, 2, I, H] with
// gate before up, given by its first member [I, H], and down [experts, shards, H, I] likewise.
std::vector<std::vector<ExpertWeights>> stored_shards(const Matrix& gate_up, const Matrix& down,
                                                      std::int64_t num_experts, int num_shards);

}  // namespace headwater
