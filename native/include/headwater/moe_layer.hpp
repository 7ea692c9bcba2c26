// MoeLayer: the routed experts of one layer.
//
// Work is cut into tasks of one expert and a slice of output rows, first all of gate and up, then
// all of down; a task of down waits for its own expert only. Whoever finishes the last expert of a
// slice of the output adds the experts up for it, in each token's own order of choice.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "headwater/kernels.hpp"
#include "headwater/linear_layer.hpp"
#include "headwater/worker_pool.hpp"

namespace headwater {

// gate and up are [intermediate, hidden], down is [hidden, intermediate]; of a shard, intermediate
// is that shard's part.
struct ExpertWeights {
    Matrix gate;
    Matrix up;
    Matrix down;
};

// The tokens of one call.
struct MoeBatch {
    // FP32 [num_tokens, hidden], with x_stride floats from token to token.
    const float* x;
    std::int64_t x_stride;
    std::int64_t num_tokens;
    // [num_tokens, experts_per_token], contiguous; every expert is in range.
    const std::int32_t* experts;
    const float* weights;
    // FP32 [num_tokens, hidden], overwritten.
    float* output;
    std::int64_t output_stride;
    Mode mode;
    // Experts to begin with, in this order, if they are chosen: those whose weights are in caches.
    std::span<const std::int32_t> first = {};
};

class MoeLayer {
  public:
    struct Options {
        int experts_per_token = 1;
        Activation activation = Activation::kSilu;
        // For kClampedSwiglu.
        float limit = 0.0f;
    };

    // shards[s][e] is shard s of expert e. All experts have the same shapes and formats; partial
    // sums of the shards are added in the order of the shards. Throws Failure(kConfig) otherwise.
    MoeLayer(WorkerPool& pool, const Kernels& kernels,
             std::vector<std::vector<ExpertWeights>> shards, const Options& options);

    std::int64_t num_experts() const noexcept;
    std::int64_t hidden_size() const noexcept { return hidden_; }
    int experts_per_token() const noexcept { return options_.experts_per_token; }
    // Bytes of weights that one expert's products read.
    std::int64_t expert_bytes() const noexcept;
    const std::vector<std::vector<ExpertWeights>>& shards() const noexcept { return shards_; }
    // Whether an expert has a token or two where there are few tokens: 8 of 128 are chosen, say.
    bool is_sparse() const noexcept;
    // Rows of gate, and as many of up, in a task of a call that needs so many experts.
    std::int64_t gate_up_rows(std::int64_t num_active) const noexcept;

    // Allocates only when called with more tokens than ever before. Output and input must not lie
    // in the pool's own memory.
    void run(const MoeBatch& batch) const;

  private:
    friend class MoeRun;

    WorkerPool& pool_;
    const Kernels& kernels_;
    std::vector<std::vector<ExpertWeights>> shards_;
    Options options_;
    std::int64_t hidden_;
    // Of one shard.
    std::int64_t intermediate_;
};

// Member `index` of matrices that are stacked without gaps, weights, scales and zeros alike.
Matrix stacked_member(const Matrix& first, std::int64_t index);

// The experts of tensors that stack them: gate_up [experts, 2, I, H] with gate before up, given by
// its first member [I, H], and down [experts, H, I] by its first member [H, I]. The intermediate
// dimension is cut into `num_shards` equal parts; throws Failure(kConfig) where scales forbid it.
std::vector<std::vector<ExpertWeights>> stacked_experts(const Matrix& gate_up, const Matrix& down,
                                                        std::int64_t num_experts, int num_shards);

}  // namespace headwater
