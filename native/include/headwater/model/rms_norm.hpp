// Root-mean-square normalisation in FP32: x / sqrt(mean(x^2) + eps) * weight.
#pragma once

#include <cstdint>
#include <vector>

namespace headwater {

class RmsNorm {
  public:
    RmsNorm(std::vector<float> weight, float eps);

    std::int64_t size() const noexcept { return static_cast<std::int64_t>(weight_.size()); }
    // `out` may be `x`.
    void apply(const float* x, float* out) const;

  private:
    std::vector<float> weight_;
    float eps_;
};

}  // namespace headwater
