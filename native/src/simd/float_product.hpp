// Products with FP32 activations, with vectors of any width; simd/attention.hpp says how it is
// used.
#pragma once

#include <cstdint>

#include "fetch.hpp"
#include "headwater/float_product.hpp"
#include "simd/pieces.hpp"

namespace headwater {
namespace {

// Tokens that share a row's expansion.
constexpr int kTokens = 4;

// A row of each format: `load` gives lanes [column, column + lanes) or the first n of them, `at`
// says where a column lies.
template <typename Floats>
struct F32Row {
    F32Row(const FloatMatrix& m, std::int64_t row) : data(m.floats + row * m.columns) {}
    const void* at(std::int64_t column) const { return data + column; }
    Floats load(std::int64_t column) const { return Floats::load(data + column); }
    Floats load(std::int64_t column, std::int64_t n) const {
        return Floats::load(data + column, n);
    }
    const float* data;
};

template <typename Floats>
struct Bf16Row {
    Bf16Row(const FloatMatrix& m, std::int64_t row)
        : data(reinterpret_cast<const std::uint16_t*>(m.stored.data + row * m.stored.row_bytes)) {}
    const void* at(std::int64_t column) const { return data + column; }
    Floats load(std::int64_t column) const { return Floats::load_bf16(data + column); }
    Floats load(std::int64_t column, std::int64_t n) const {
        return Floats::load_bf16(data + column, n);
    }
    const std::uint16_t* data;
};

template <typename Floats>
struct Fp8Row {
    Fp8Row(const FloatMatrix& m, std::int64_t row)
        : data(reinterpret_cast<const std::uint8_t*>(m.stored.data + row * m.stored.row_bytes)),
          scales(reinterpret_cast<const float*>(m.stored.scales +
                                                row / kFp8Block * m.stored.scale_row_bytes)) {}
    const void* at(std::int64_t column) const { return data + column; }
    Floats load(std::int64_t column) const {
        return Floats::load_fp8(data + column) * scale(column);
    }
    Floats load(std::int64_t column, std::int64_t n) const {
        return Floats::load_fp8(data + column, n) * scale(column);
    }
    Floats scale(std::int64_t column) const { return Floats::set(scales[column / kFp8Block]); }
    const std::uint8_t* data;
    const float* scales;
};

inline float widen_bf16(std::uint16_t bits) {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
}

template <typename Floats>
struct Int4Row {
    Int4Row(const FloatMatrix& m, std::int64_t row)
        : data(reinterpret_cast<const std::uint8_t*>(m.stored.data + row * m.stored.row_bytes)),
          scales(m.stored.scales + row * m.stored.scale_row_bytes),
          has_bf16_scales(m.stored.scale_type == ScaleType::kBf16),
          zeros(m.stored.zeros == nullptr ? nullptr
                                          : m.stored.zeros + row * m.stored.zero_row_bytes),
          group_shift(__builtin_ctzll(static_cast<unsigned long long>(m.stored.group))) {}
    const void* at(std::int64_t column) const { return data + column / 2; }
    Floats load(std::int64_t column) const {
        return value(Floats::load_nibbles(data + column / 2), column);
    }
    Floats load(std::int64_t column, std::int64_t n) const {
        return value(Floats::load_nibbles(data + column / 2, n), column);
    }
    Floats value(Floats nibbles, std::int64_t column) const {
        const std::int64_t group = column >> group_shift;
        const float scale = has_bf16_scales
                                ? widen_bf16(reinterpret_cast<const std::uint16_t*>(scales)[group])
                                : reinterpret_cast<const float*>(scales)[group];
        const auto zero = static_cast<float>(zeros == nullptr ? 8 : zeros[group]);
        return (nibbles - Floats::set(zero)) * Floats::set(scale);
    }
    const std::uint8_t* data;
    const std::byte* scales;
    bool has_bf16_scales;
    const std::uint8_t* zeros;
    int group_shift;
};

template <typename Floats>
struct Mxfp4Row {
    Mxfp4Row(const FloatMatrix& m, std::int64_t row)
        : data(reinterpret_cast<const std::uint8_t*>(m.stored.data + row * m.stored.row_bytes)),
          scales(reinterpret_cast<const std::uint8_t*>(m.stored.scales +
                                                       row * m.stored.scale_row_bytes)) {}
    const void* at(std::int64_t column) const { return data + column / 2; }
    Floats load(std::int64_t column) const {
        return Floats::load_e2m1(data + column / 2) * scale(column);
    }
    Floats load(std::int64_t column, std::int64_t n) const {
        return Floats::load_e2m1(data + column / 2, n) * scale(column);
    }
    // 2^(code - 127); the least one is below FP32's normal numbers.
    Floats scale(std::int64_t column) const {
        const std::uint32_t code = scales[column / kMxfp4Group];
        return Floats::set(__builtin_bit_cast(float, code == 0 ? 1U << 22 : code << 23));
    }
    const std::uint8_t* data;
    const std::uint8_t* scales;
};

template <typename Floats, typename Visit>
inline void with_row_type(const FloatMatrix& matrix, const Visit& visit) {
    if (matrix.floats != nullptr) {
        return visit.template operator()<F32Row<Floats>>();
    }
    switch (matrix.stored.format) {
        case Format::kBf16:
            return visit.template operator()<Bf16Row<Floats>>();
        case Format::kFp8:
            return visit.template operator()<Fp8Row<Floats>>();
        case Format::kInt4:
            return visit.template operator()<Int4Row<Floats>>();
        case Format::kMxfp4:
            return visit.template operator()<Mxfp4Row<Floats>>();
    }
}

// Four chains of additions per token hide the latency of one.
template <typename Floats, typename Row, int Tokens>
void multiply_row(const Row& row, std::int64_t columns, const float* const* inputs, float* sums) {
    constexpr int kChains = 4;
    Floats partial[Tokens][kChains];
#pragma GCC unroll 8
    for (auto& token : partial) {
#pragma GCC unroll 8
        for (auto& chain : token) {
            chain = Floats::zero();
        }
    }
    const std::int64_t whole = columns / Floats::kLanes;
    std::int64_t vector = 0;
    for (; vector + kChains <= whole; vector += kChains) {
#pragma GCC unroll 8
        for (int j = 0; j < kChains; ++j) {
            const std::int64_t column = (vector + j) * Floats::kLanes;
            const Floats weights = row.load(column);
#pragma GCC unroll 8
            for (int t = 0; t < Tokens; ++t) {
                partial[t][j] =
                    partial[t][j].plus_product(weights, Floats::load(inputs[t] + column));
            }
        }
    }
    for (; vector * Floats::kLanes < columns; ++vector) {
        const std::int64_t column = vector * Floats::kLanes;
        const std::int64_t n = columns - column;
        const Floats weights = n < Floats::kLanes ? row.load(column, n) : row.load(column);
#pragma GCC unroll 8
        for (int t = 0; t < Tokens; ++t) {
            partial[t][0] =
                partial[t][0].plus_product(weights, Floats::load(inputs[t] + column, n));
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < Tokens; ++t) {
        sums[t] = ((partial[t][0] + partial[t][1]) + (partial[t][2] + partial[t][3])).sum();
    }
}

template <typename Floats>
void multiply_any(const FloatProduct& p) {
    with_row_type<Floats>(*p.matrix, [&]<typename Row>() {
        for (std::int64_t r = p.row_begin; r < p.row_end; ++r) {
            const Row row(*p.matrix, r);
            for_pieces(p.num_tokens, kTokens, [&](std::int64_t first, std::int64_t count) {
                float sums[kTokens];
                with_constant<kTokens>(count, [&]<int Tokens>() {
                    multiply_row<Floats, Row, Tokens>(row, p.matrix->columns, p.inputs + first,
                                                      sums);
                });
                for (std::int64_t t = 0; t < count; ++t) {
                    p.outputs[first + t][r - p.row_begin] = sums[t];
                }
            });
        }
    });
}

// Asks for the row that lies kAheadBytes behind this one, to be in L2 when it is used: reading some
// columns of each row, the hardware does not foresee the rest.
template <typename Row>
inline void prefetch_behind(const Row& row, std::int64_t columns) {
    constexpr std::int64_t kLine = 64;
    constexpr std::int64_t kAheadBytes = 8 << 10;
    const auto* end = static_cast<const char*>(row.at(columns)) + kAheadBytes;
    for (const auto* p = static_cast<const char*>(row.at(0)) + kAheadBytes; p < end; p += kLine) {
        fetch_far(p);
    }
}

// Columns [column, column + width) of the outputs, `Vectors` vectors, the last of which may be cut.
template <typename Floats, typename Row, int Tokens, int Vectors>
void add_rows(const FloatProduct& p, std::int64_t first_token, std::int64_t column,
              std::int64_t width) {
    Floats sums[Tokens][Vectors];
#pragma GCC unroll 8
    for (auto& token : sums) {
#pragma GCC unroll 8
        for (auto& vector : token) {
            vector = Floats::zero();
        }
    }
    constexpr int kLast = (Vectors - 1) * Floats::kLanes;
    const std::int64_t tail = width - kLast;
    for (std::int64_t r = p.row_begin; r < p.row_end; ++r) {
        const Row row(*p.matrix, r);
        if (column == 0 && first_token == 0) {
            prefetch_behind(row, p.matrix->columns);
        }
        Floats weights[Vectors];
#pragma GCC unroll 8
        for (int j = 0; j + 1 < Vectors; ++j) {
            weights[j] = row.load(column + j * Floats::kLanes);
        }
        weights[Vectors - 1] =
            tail == Floats::kLanes ? row.load(column + kLast) : row.load(column + kLast, tail);
#pragma GCC unroll 8
        for (int t = 0; t < Tokens; ++t) {
            const Floats factor = Floats::set(p.inputs[first_token + t][r - p.row_begin]);
#pragma GCC unroll 8
            for (int j = 0; j < Vectors; ++j) {
                sums[t][j] = sums[t][j].plus_product(factor, weights[j]);
            }
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < Tokens; ++t) {
        float* out = p.outputs[first_token + t] + column;
#pragma GCC unroll 8
        for (int j = 0; j + 1 < Vectors; ++j) {
            sums[t][j].store(out + j * Floats::kLanes);
        }
        sums[t][Vectors - 1].store(out + kLast, tail);
    }
}

// All columns for pieces of at most `MaxTokens` tokens, `MaxVectors` vectors of columns at a time.
template <typename Floats, typename Row, int MaxTokens, int MaxVectors>
void add_rows_in_pieces(const FloatProduct& p) {
    constexpr std::int64_t kWidth = MaxVectors * Floats::kLanes;
    for (std::int64_t column = 0; column < p.matrix->columns; column += kWidth) {
        const std::int64_t width = smaller(p.matrix->columns - column, kWidth);
        for_pieces(p.num_tokens, MaxTokens, [&](std::int64_t first, std::int64_t count) {
            with_constant<MaxTokens>(count, [&]<int Tokens>() {
                with_constant<MaxVectors>(
                    (width + Floats::kLanes - 1) / Floats::kLanes, [&]<int Vectors>() {
                        add_rows<Floats, Row, Tokens, Vectors>(p, first, column, width);
                    });
            });
        });
    }
}

template <typename Floats>
void multiply_any_transposed(const FloatProduct& p) {
    with_row_type<Floats>(*p.matrix, [&]<typename Row>() {
        // Few tokens leave registers for longer runs of memory.
        if (p.num_tokens <= 2) {
            add_rows_in_pieces<Floats, Row, 2, Floats::kLanes / 2>(p);
        } else {
            add_rows_in_pieces<Floats, Row, kTokens, 4>(p);
        }
    });
}

}  // namespace
}  // namespace headwater
