// The reference: each weight's value, times the activation, added up in order.
#include <algorithm>
#include <cmath>

#include "headwater/bf16.hpp"
#include "headwater/float_kernels.hpp"

namespace headwater::scalar {
namespace {

// The NaN codes read as 480.
float float_from_fp8(std::uint8_t code) {
    const int exponent = code >> 3 & 15;
    const int mantissa = code & 7;
    const float magnitude = exponent == 0
                                ? std::ldexp(static_cast<float>(mantissa), -9)
                                : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    return (code & 0x80) != 0 ? -magnitude : magnitude;
}

float float_from_e2m1(int code) {
    constexpr float kMagnitudes[] = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
    return (code & 8) != 0 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7];
}

float scale(const Matrix& m, std::int64_t row, std::int64_t column) {
    const std::int64_t scale_row = m.format == Format::kFp8 ? row / kFp8Block : row;
    const std::byte* scales = m.scales + scale_row * m.scale_row_bytes;
    const std::int64_t index = column / m.group;
    switch (m.scale_type) {
        case ScaleType::kNone:
            break;
        case ScaleType::kF32:
            return reinterpret_cast<const float*>(scales)[index];
        case ScaleType::kBf16:
            return float_from_bf16(reinterpret_cast<const std::uint16_t*>(scales)[index]);
        case ScaleType::kE8m0:
            return std::ldexp(1.0F, static_cast<int>(scales[index]) - 127);
    }
    return 1.0F;
}

float weight(const FloatMatrix& matrix, std::int64_t row, std::int64_t column) {
    if (matrix.floats != nullptr) {
        return matrix.floats[row * matrix.columns + column];
    }
    const Matrix& m = matrix.stored;
    const std::byte* data = m.data + row * m.row_bytes;
    if (m.format == Format::kBf16) {
        return float_from_bf16(reinterpret_cast<const std::uint16_t*>(data)[column]);
    }
    if (m.format == Format::kFp8) {
        return float_from_fp8(static_cast<std::uint8_t>(data[column])) * scale(m, row, column);
    }
    const int nibble = static_cast<int>(data[column / 2]) >> (column % 2 * 4) & 15;
    if (m.format == Format::kMxfp4) {
        return float_from_e2m1(nibble) * scale(m, row, column);
    }
    const int zero = m.zeros == nullptr ? 8 : m.zeros[row * m.zero_row_bytes + column / m.group];
    return static_cast<float>(nibble - zero) * scale(m, row, column);
}

}  // namespace

void multiply_floats(const FloatProduct& p) {
    for (std::int64_t t = 0; t < p.num_tokens; ++t) {
        for (std::int64_t row = p.row_begin; row < p.row_end; ++row) {
            float sum = 0.0F;
            for (std::int64_t column = 0; column < p.matrix->columns; ++column) {
                sum += p.inputs[t][column] * weight(*p.matrix, row, column);
            }
            p.outputs[t][row - p.row_begin] = sum;
        }
    }
}

void multiply_floats_transposed(const FloatProduct& p) {
    for (std::int64_t t = 0; t < p.num_tokens; ++t) {
        std::fill_n(p.outputs[t], p.matrix->columns, 0.0F);
        for (std::int64_t row = p.row_begin; row < p.row_end; ++row) {
            const float factor = p.inputs[t][row - p.row_begin];
            for (std::int64_t column = 0; column < p.matrix->columns; ++column) {
                p.outputs[t][column] += factor * weight(*p.matrix, row, column);
            }
        }
    }
}

}  // namespace headwater::scalar
