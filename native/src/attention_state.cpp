// Putting the results of splits together; the same code for every instruction set.
#include <algorithm>
#include <cmath>
#include <limits>

#include "headwater/attention.hpp"

namespace headwater {

void clear_attention(const AttentionState& state, std::int64_t value_dim) {
    *state.maximum = -std::numeric_limits<float>::infinity();
    *state.sum = 0.0F;
    std::fill_n(state.weighted, value_dim, 0.0F);
}

void merge_attention(const AttentionState& state, const AttentionState& next,
                     std::int64_t value_dim) {
    if (std::isinf(*next.maximum)) {
        return;
    }
    const float maximum = std::max(*state.maximum, *next.maximum);
    const float mine = std::exp(*state.maximum - maximum);
    const float theirs = std::exp(*next.maximum - maximum);
    *state.maximum = maximum;
    *state.sum = *state.sum * mine + *next.sum * theirs;
    for (std::int64_t i = 0; i < value_dim; ++i) {
        state.weighted[i] = state.weighted[i] * mine + next.weighted[i] * theirs;
    }
}

void finish_attention(const AttentionState& state, const float* sink, std::int64_t value_dim,
                      float* output) {
    float factor = 1.0F;
    float sum = *state.sum;
    if (sink != nullptr) {
        const float maximum = std::max(*state.maximum, *sink);
        factor = std::exp(*state.maximum - maximum);
        sum = sum * factor + std::exp(*sink - maximum);
    }
    factor /= sum;
    for (std::int64_t i = 0; i < value_dim; ++i) {
        output[i] = state.weighted[i] * factor;
    }
}

}  // namespace headwater
