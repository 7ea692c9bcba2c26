#include "headwater/model/gate.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "headwater/failure.hpp"
#include "headwater/parallel.hpp"

namespace headwater {

namespace {

constexpr float kClosed = -std::numeric_limits<float>::infinity();
// Below so many multiplications the gate is computed where it is: sharing it out costs more.
constexpr std::int64_t kWorthSharing = 1 << 16;
// Bounds the scores that are kept on the stack.
constexpr std::int64_t kMaxExperts = 4096;
constexpr std::int64_t kRowsPerTask = 16;
constexpr std::int64_t kTokensPerTask = 32;

// Index of the greatest value, the first of equals; it is closed.
std::int64_t take_greatest(float* values, std::int64_t count) {
    float* greatest = std::max_element(values, values + count);
    *greatest = kClosed;
    return greatest - values;
}

void softmax(const float* logits, std::int64_t count, float* out) {
    const float greatest = *std::max_element(logits, logits + count);
    float sum = 0.0F;
    for (std::int64_t i = 0; i < count; ++i) {
        out[i] = std::exp(logits[i] - greatest);
        sum += out[i];
    }
    for (std::int64_t i = 0; i < count; ++i) {
        out[i] /= sum;
    }
}

void require(bool condition, const std::string& problem) {
    if (!condition) {
        throw Failure(FailureKind::kConfig, "gate: " + problem);
    }
}

}  // namespace

Gate::Gate(const FloatMatrix& matrix, GateSpec spec) : matrix_(matrix), spec_(std::move(spec)) {
    const std::int64_t num_experts = matrix_.rows;
    require(num_experts >= 1 && num_experts <= kMaxExperts,
            "expected 1 to " + std::to_string(kMaxExperts) + " experts, got " +
                std::to_string(num_experts));
    require(spec_.num_groups >= 1 && num_experts % spec_.num_groups == 0,
            "the groups must be of equal size");
    require(spec_.groups_per_token >= 1 && spec_.groups_per_token <= spec_.num_groups,
            "more groups per token than groups");
    require(spec_.experts_per_token >= 1 &&
                spec_.experts_per_token <= num_experts / spec_.num_groups * spec_.groups_per_token,
            "more experts per token than can be chosen");
    require(spec_.bias.empty() || static_cast<std::int64_t>(spec_.bias.size()) == num_experts,
            "the bias must have an element per expert");
}

void Gate::choose(const Compute& compute, const float* x, std::int64_t num_tokens, float* logits,
                  std::int32_t* experts, float* weights, std::int64_t stride) const {
    multiply(compute, x, num_tokens, logits);
    const std::int64_t num_tasks = (num_tokens + kTokensPerTask - 1) / kTokensPerTask;
    parallel_for(*compute.pool, num_tasks, [&](std::int64_t task, int) {
        const std::int64_t stop = std::min((task + 1) * kTokensPerTask, num_tokens);
        for (std::int64_t t = task * kTokensPerTask; t < stop; ++t) {
            choose_token(logits + t * num_experts(), experts + t * stride, weights + t * stride);
        }
    });
}

void Gate::multiply(const Compute& compute, const float* x, std::int64_t num_tokens,
                    float* logits) const {
    const auto multiply_part = [&](std::int64_t first_token, std::int64_t stop_token,
                                   std::int64_t first_row, std::int64_t stop_row) {
        const float* inputs[kTokensPerTask];
        float* outputs[kTokensPerTask];
        for (std::int64_t t = first_token; t < stop_token; ++t) {
            inputs[t - first_token] = x + t * matrix_.columns;
            outputs[t - first_token] = logits + t * num_experts() + first_row;
        }
        compute.kernels->multiply_floats(
            {&matrix_, first_row, stop_row, inputs, outputs, stop_token - first_token});
    };
    const bool is_small = num_tokens * matrix_.rows * matrix_.columns < kWorthSharing;
    const std::int64_t rows_per_task = is_small ? matrix_.rows : kRowsPerTask;
    const std::int64_t num_slices = (matrix_.rows + rows_per_task - 1) / rows_per_task;
    const std::int64_t num_chunks = (num_tokens + kTokensPerTask - 1) / kTokensPerTask;
    parallel_for(*compute.pool, num_slices * num_chunks, [&](std::int64_t task, int) {
        const std::int64_t first_token = task / num_slices * kTokensPerTask;
        const std::int64_t first_row = task % num_slices * rows_per_task;
        multiply_part(first_token, std::min(first_token + kTokensPerTask, num_tokens), first_row,
                      std::min(first_row + rows_per_task, matrix_.rows));
    });
}

void Gate::choose_token(const float* logits, std::int32_t* experts, float* weights) const {
    const std::int64_t count = num_experts();
    float scores[kMaxExperts];
    float ranking[kMaxExperts];
    if (spec_.bias.empty()) {
        softmax(logits, count, scores);
        std::copy_n(scores, count, ranking);
    } else {
        for (std::int64_t e = 0; e < count; ++e) {
            scores[e] = 1.0F / (1.0F + std::exp(-logits[e]));
            ranking[e] = scores[e] + spec_.bias[static_cast<std::size_t>(e)];
        }
        close_groups(ranking);
    }
    float sum = 0.0F;
    for (std::int64_t i = 0; i < spec_.experts_per_token; ++i) {
        const std::int64_t best = take_greatest(ranking, count);
        experts[i] = static_cast<std::int32_t>(best);
        weights[i] = scores[best];
        sum += weights[i];
    }
    // The addend, DeepSeek's own, only matters when all chosen sigmoid scores vanish.
    const float divisor = spec_.is_normalized ? sum + 1e-20F : 1.0F;
    for (std::int64_t i = 0; i < spec_.experts_per_token; ++i) {
        weights[i] = weights[i] / divisor * spec_.scale;
    }
}

void Gate::close_groups(float* ranking) const {
    if (spec_.groups_per_token == spec_.num_groups) {
        return;
    }
    const std::int64_t size = num_experts() / spec_.num_groups;
    float group_scores[kMaxExperts];
    bool is_open[kMaxExperts] = {};
    for (std::int64_t g = 0; g < spec_.num_groups; ++g) {
        float best = kClosed;
        float second = kClosed;
        for (const float* s = ranking + g * size; s != ranking + (g + 1) * size; ++s) {
            second = std::max(second, std::min(best, *s));
            best = std::max(best, *s);
        }
        group_scores[g] = best + second;
    }
    for (std::int64_t i = 0; i < spec_.groups_per_token; ++i) {
        is_open[take_greatest(group_scores, spec_.num_groups)] = true;
    }
    for (std::int64_t e = 0; e < num_experts(); ++e) {
        if (!is_open[e / size]) {
            ranking[e] = kClosed;
        }
    }
}

}  // namespace headwater
