// Products with FP32 activations as they are, not rounded to BF16: the gates of routed layers,
// where near ties must fall the right way, and the two halves of MLA's kv_b.
#pragma once

#include <cstddef>
#include <cstdint>

#include "headwater/matrix.hpp"

namespace headwater {

// A weight matrix in FP32, or in one of the stored formats. It owns nothing.
struct FloatMatrix {
    std::int64_t rows;
    std::int64_t columns;
    // [rows, columns]; null where `stored` holds the weights.
    const float* floats;
    Matrix stored;
};

// Rows [row_begin, row_end) and each of the tokens. A token's result does not depend on the others.
struct FloatProduct {
    const FloatMatrix* matrix;
    std::int64_t row_begin;
    std::int64_t row_end;
    const float* const* inputs;
    float* const* outputs;
    std::int64_t num_tokens;
};

}  // namespace headwater
