#include "headwater/model/rms_norm.hpp"

#include <cmath>
#include <utility>

namespace headwater {

RmsNorm::RmsNorm(std::vector<float> weight, float eps) : weight_(std::move(weight)), eps_(eps) {}

void RmsNorm::apply(const float* x, float* out) const {
    // Chains of additions that the compiler may put into vectors; the order is fixed.
    constexpr int kChains = 16;
    float sums[kChains] = {};
    std::int64_t i = 0;
    for (; i + kChains <= size(); i += kChains) {
        for (int j = 0; j < kChains; ++j) {
            sums[j] += x[i + j] * x[i + j];
        }
    }
    for (int j = 0; i < size(); ++i, ++j) {
        sums[j] += x[i] * x[i];
    }
    for (int half = kChains / 2; half > 0; half /= 2) {
        for (int j = 0; j < half; ++j) {
            sums[j] += sums[j + half];
        }
    }
    const float factor = 1.0F / std::sqrt(sums[0] / static_cast<float>(size()) + eps_);
    for (i = 0; i < size(); ++i) {
        out[i] = x[i] * factor * weight_[static_cast<std::size_t>(i)];
    }
}

}  // namespace headwater
