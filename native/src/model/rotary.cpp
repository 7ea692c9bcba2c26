#include "headwater/model/rotary.hpp"

#include <cmath>
#include <utility>

#include "headwater/failure.hpp"

namespace headwater {

namespace {

constexpr std::size_t kMaxPairs = 2048;

}  // namespace

Rotary::Rotary(std::vector<float> frequencies, float amplitude, bool is_interleaved)
    : frequencies_(std::move(frequencies)), amplitude_(amplitude), is_interleaved_(is_interleaved) {
    if (frequencies_.empty() || frequencies_.size() > kMaxPairs) {
        throw Failure(FailureKind::kConfig, "rotary dimension: expected 2 to " +
                                                std::to_string(2 * kMaxPairs) + ", got " +
                                                std::to_string(2 * frequencies_.size()));
    }
}

void Rotary::set_positions(const std::vector<std::int64_t>& positions) {
    if (positions == positions_) {
        return;
    }
    cosines_.resize(positions.size() * frequencies_.size());
    sines_.resize(cosines_.size());
    std::size_t i = 0;
    for (const std::int64_t position : positions) {
        for (const float frequency : frequencies_) {
            const float angle = static_cast<float>(position) * frequency;
            cosines_[i] = std::cos(angle) * amplitude_;
            sines_[i] = std::sin(angle) * amplitude_;
            ++i;
        }
    }
    positions_ = positions;
}

void Rotary::rotate(std::int64_t row, const float* x, float scale, float* out) const {
    const std::size_t half = frequencies_.size();
    const float* cosines = &cosines_[static_cast<std::size_t>(row) * half];
    const float* sines = &sines_[static_cast<std::size_t>(row) * half];
    float paired[2 * kMaxPairs];
    if (is_interleaved_) {
        for (std::size_t i = 0; i < half; ++i) {
            paired[i] = x[2 * i];
            paired[half + i] = x[2 * i + 1];
        }
        x = paired;
    }
    for (std::size_t i = 0; i < half; ++i) {
        const float first = x[i];
        const float second = x[half + i];
        out[i] = (first * cosines[i] - second * sines[i]) * scale;
        out[half + i] = (second * cosines[i] + first * sines[i]) * scale;
    }
}

}  // namespace headwater
