#include "headwater/model/feed_forward.hpp"

#include <algorithm>
#include <utility>

namespace headwater {

namespace {

bool is_alike(const Matrix& a, const Matrix& b) {
    return a.format == b.format && a.scale_type == b.scale_type && a.group == b.group &&
           a.rows == b.rows && a.columns == b.columns &&
           (a.zeros == nullptr) == (b.zeros == nullptr);
}

bool is_alike(const ExpertWeights& a, const ExpertWeights& b) {
    return is_alike(a.gate, b.gate) && is_alike(a.up, b.up) && is_alike(a.down, b.down);
}

std::unique_ptr<MoeLayer> make_layer(const Compute& compute,
                                     std::vector<std::vector<ExpertWeights>> shards,
                                     std::int64_t experts_per_token) {
    MoeLayer::Options options;
    options.experts_per_token = static_cast<int>(experts_per_token);
    return std::make_unique<MoeLayer>(*compute.pool, *compute.kernels, std::move(shards), options);
}

}  // namespace

FeedForward::FeedForward(const Compute& compute, const ExpertWeights& dense)
    : hidden_size_(dense.down.rows), common_(make_layer(compute, {{dense}}, 1)) {}

FeedForward::FeedForward(const Compute& compute, Gate gate,
                         std::vector<std::vector<ExpertWeights>> shards,
                         const std::optional<ExpertWeights>& shared)
    : hidden_size_(shards.at(0).at(0).down.rows), gate_(std::move(gate)) {
    if (shared && shards.size() == 1 && is_alike(*shared, shards[0][0])) {
        shards[0].push_back(*shared);
        is_common_routed_ = true;
    } else if (shared) {
        common_ = make_layer(compute, {{*shared}}, 1);
    }
    routed_ = make_layer(compute, std::move(shards),
                         gate_->experts_per_token() + (is_common_routed_ ? 1 : 0));
}

void FeedForward::run(const Compute& compute, Workspace& workspace, const float* x,
                      std::int64_t num_tokens, float* out) {
    if (!gate_) {
        run_common(compute, workspace, x, num_tokens, out);
        return;
    }
    run_routed(compute, workspace, x, num_tokens, out);
    if (common_) {
        const std::int64_t size = num_tokens * hidden_size_;
        const auto [addend] = carve<1>(workspace.common, {size});
        run_common(compute, workspace, x, num_tokens, addend);
        for (std::int64_t i = 0; i < size; ++i) {
            out[i] += addend[i];
        }
    }
}

void FeedForward::run_routed(const Compute& compute, Workspace& workspace, const float* x,
                             std::int64_t num_tokens, float* out) {
    const std::int64_t k = routed_->experts_per_token();
    const auto [words, weights, logits] = carve<3>(
        workspace.choices, {num_tokens * k, num_tokens * k, num_tokens * gate_->num_experts()});
    auto* experts = reinterpret_cast<std::int32_t*>(words);
    gate_->choose(compute, x, num_tokens, logits, experts, weights, k);
    if (is_common_routed_) {
        for (std::int64_t last = k - 1; last < num_tokens * k; last += k) {
            experts[last] = static_cast<std::int32_t>(gate_->num_experts());
            weights[last] = 1.0F;
        }
    }
    routed_->run({x, hidden_size_, num_tokens, experts, weights, out, hidden_size_, compute.mode});
}

void FeedForward::run_common(const Compute& compute, Workspace& workspace, const float* x,
                             std::int64_t num_tokens, float* out) {
    const auto [words, weights] = carve<2>(workspace.choices, {num_tokens, num_tokens});
    auto* experts = reinterpret_cast<std::int32_t*>(words);
    std::fill_n(experts, num_tokens, 0);
    std::fill_n(weights, num_tokens, 1.0F);
    common_->run({x, hidden_size_, num_tokens, experts, weights, out, hidden_size_, compute.mode});
}

std::vector<std::vector<ExpertWeights>> stored_shards(const Matrix& gate_up, const Matrix& down,
                                                      std::int64_t num_experts, int num_shards) {
    std::vector<std::vector<ExpertWeights>> shards(static_cast<std::size_t>(num_shards));
    for (std::int64_t expert = 0; expert < num_experts; ++expert) {
        for (int shard = 0; shard < num_shards; ++shard) {
            const std::int64_t index = expert * num_shards + shard;
            shards[static_cast<std::size_t>(shard)].push_back(
                {stacked_member(gate_up, 2 * index), stacked_member(gate_up, 2 * index + 1),
                 stacked_member(down, index)});
        }
    }
    return shards;
}

}  // namespace headwater
