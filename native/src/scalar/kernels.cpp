// The reference: what every other table must compute, in the plainest words. Sums are kept in
// double precision, so that it is also the better half of a comparison.
#include "headwater/kernels.hpp"

#include <bit>
#include <cmath>
#include <cstring>

#include "headwater/float_kernels.hpp"

namespace headwater::scalar {
namespace {

template <class T>
T read(const std::byte* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

float bf16_to_float(std::uint16_t bits) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

// Rounds to nearest, ties to even.
float round_to_bf16(float x) {
    if (std::isnan(x)) {
        return x;
    }
    const auto bits = std::bit_cast<std::uint32_t>(x);
    return std::bit_cast<float>((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000);
}

float e4m3_to_float(std::uint8_t code) {
    const int exponent = code >> 3 & 15;
    const int mantissa = code & 7;
    const float magnitude = exponent == 0
                                ? std::ldexp(static_cast<float>(mantissa), -9)
                                : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    return code & 0x80 ? -magnitude : magnitude;
}

float e2m1_to_float(int code) {
    static constexpr float kMagnitudes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return code & 8 ? -kMagnitudes[code & 7] : kMagnitudes[code];
}

int nibble(const std::byte* row, std::int64_t column) {
    const int pair = std::to_integer<int>(row[column / 2]);
    return column % 2 == 0 ? pair & 15 : pair >> 4;
}

float group_scale(const Matrix& m, std::int64_t row, std::int64_t group) {
    const std::byte* scales = m.scales + row * m.scale_row_bytes;
    switch (m.scale_type) {
        case ScaleType::kF32:
            return read<float>(scales + 4 * group);
        case ScaleType::kBf16:
            return bf16_to_float(read<std::uint16_t>(scales + 2 * group));
        default:
            return std::ldexp(1.0f, std::to_integer<int>(scales[group]) - 127);
    }
}

// The matrix's element, of which the scale is a part.
double element(const Matrix& m, std::int64_t row, std::int64_t column) {
    const std::byte* data = m.data + row * m.row_bytes;
    switch (m.format) {
        case Format::kBf16:
            return bf16_to_float(read<std::uint16_t>(data + 2 * column));
        case Format::kFp8: {
            const std::byte* scales = m.scales + row / kFp8Block * m.scale_row_bytes;
            return static_cast<double>(e4m3_to_float(read<std::uint8_t>(data + column))) *
                   read<float>(scales + 4 * (column / kFp8Block));
        }
        case Format::kInt4: {
            const std::int64_t group = column / m.group;
            const int zero = m.zeros == nullptr ? 8 : m.zeros[row * m.zero_row_bytes + group];
            return static_cast<double>(nibble(data, column) - zero) * group_scale(m, row, group);
        }
        case Format::kMxfp4:
            return static_cast<double>(e2m1_to_float(nibble(data, column))) *
                   group_scale(m, row, column / m.group);
    }
    return 0.0;
}

std::int64_t prepared_bytes(const Matrix& m) { return (4 * m.columns + 63) / 64 * 64; }

void prepare(const Matrix& m, const float* x, std::byte* out) {
    auto* rounded = reinterpret_cast<float*>(out);
    for (std::int64_t i = 0; i < m.columns; ++i) {
        rounded[i] = round_to_bf16(x[i]);
    }
}

std::int64_t scratch_bytes(const Matrix&) { return 0; }

void multiply(const Product& p) {
    for (std::int64_t row = p.row_begin; row < p.row_end; ++row) {
        for (std::int64_t t = 0; t < p.num_tokens; ++t) {
            const auto* x = reinterpret_cast<const float*>(p.tokens[t]);
            double sum = 0.0;
            for (std::int64_t i = 0; i < p.matrix->columns; ++i) {
                sum += element(*p.matrix, row, i) * x[i];
            }
            p.outputs[t][row - p.row_begin] = static_cast<float>(sum);
        }
    }
}

void activate(Activation activation, float limit, const float* gate, const float* up, float* out,
              std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
        double g = gate[i];
        double u = up[i];
        if (activation == Activation::kSilu) {
            out[i] = static_cast<float>(g / (1.0 + std::exp(-g)) * u);
        } else {
            g = g > limit ? limit : g;
            u = u > limit ? limit : u < -limit ? -limit : u;
            out[i] = static_cast<float>(g / (1.0 + std::exp(-1.702 * g)) * (u + 1.0));
        }
    }
}

void weighted_sum(const float* const* terms, const float* factors, std::int64_t num_terms,
                  float* out, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
        double sum = 0.0;
        for (std::int64_t j = 0; j < num_terms; ++j) {
            sum += static_cast<double>(factors[j]) * terms[j][i];
        }
        out[i] = static_cast<float>(sum);
    }
}

}  // namespace

const Kernels kKernels = {
    .isa = Isa::kScalar,
    .prepared_bytes = &prepared_bytes,
    .prepare = &prepare,
    .scratch_bytes = &scratch_bytes,
    .multiply = &multiply,
    .multiply_many = &multiply,
    .sparse = {&prepared_bytes, &prepare, &multiply},
    .activate = &activate,
    .weighted_sum = &weighted_sum,
    .attend = &attend,
    .multiply_floats = &multiply_floats,
    .multiply_floats_transposed = &multiply_floats_transposed,
};

}  // namespace headwater::scalar
