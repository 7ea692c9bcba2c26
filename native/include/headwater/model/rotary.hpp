// Rotary position embedding: the angles of a batch's positions, and the rotation.
#pragma once

#include <cstdint>
#include <vector>

namespace headwater {

class Rotary {
  public:
    // `frequencies`: the angle per position of each pair of elements, in radians. `amplitude`
    // multiplies cosine and sine. `is_interleaved` pairs elements (2i, 2i + 1) instead of
    // (i, i + dim / 2). Throws Failure(kConfig) when there are no frequencies or too many.
    Rotary(std::vector<float> frequencies, float amplitude, bool is_interleaved);

    std::int64_t dim() const noexcept { return 2 * static_cast<std::int64_t>(frequencies_.size()); }
    // Computes the angles of these positions, unless they are those of the last call.
    void set_positions(const std::vector<std::int64_t>& positions);
    // Rotates x [dim] by the angles of `row`, times `scale`; `out` may be `x`. Pairs come out as
    // (i, i + dim / 2): dot products do not change, as queries and keys are permuted alike.
    void rotate(std::int64_t row, const float* x, float scale, float* out) const;

  private:
    std::vector<float> frequencies_;
    float amplitude_;
    bool is_interleaved_;
    std::vector<std::int64_t> positions_;
    // [rows][dim / 2] cosines, and sines.
    std::vector<float> cosines_;
    std::vector<float> sines_;
};

}  // namespace headwater
