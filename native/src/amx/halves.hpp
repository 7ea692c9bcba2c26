// FP8 times very few tokens, in FP16 on AVX-512: half the cycles per weight that tiles take.
//
// On servers that others share, cores are slower than their clock says: the other hardware thread
// of a core may belong to somebody else. Tiles then no longer keep up with the memory (16 Emerald
// Rapids threads on caches: 9 to 15 GB/s each, this 19 to 29; the memory gives 9).
//
// A weight times 2^-8 is an FP16 number as it is, subnormals included. Activations, prepared as
// FP32, are multiplied by the scales of the weights' blocks first and rounded to FP16, so that a
// row is one sum. Eight products at a time are added up in FP16, and those sums in FP32: together
// within 5e-4 of exact sums (relative L2), where rounding activations to BF16 costs 1.6e-3.
//
// A token's result does not depend on the other tokens of a call, but differs from that of tiles.
#pragma once

#include <cmath>

#include "../avx512/multiply.hpp"
#include "fetch.hpp"
#include "fp16.hpp"
#include "headwater/kernels.hpp"
#include "tiles.hpp"

namespace headwater::amx {
namespace {

// Tokens that are scaled at once, and multiplied at once.
constexpr std::int64_t kHalvesPass = 8;
constexpr int kHalvesTokens = 4;
// Rows at a time: enough for two streams from memory.
constexpr int kHalvesRows = 2;
constexpr std::int64_t kLine = 64;
// Lines of a row whose products are added up in FP16: two for each lane and line.
constexpr std::int64_t kSumLines = 4;
// Bytes ahead of the loads, in each row, that are brought into the first-level cache; what
// avx512::ahead_of says goes to the second level first. Shares of plain reading, 16 threads on
// Emerald Rapids: both 0.97 to 0.99, the latter alone 0.93 to 0.96, the former alone 0.76 to 0.89.
constexpr std::int64_t kNear = 1024;

inline std::int64_t halves_token_bytes(const Matrix& m) {
    return avx512::blocks_of(m.columns) * 2 * avx512::kBlock;
}

inline std::int64_t halves_prepared_bytes(const Matrix& m) { return 2 * halves_token_bytes(m); }

// FP32 in the order in which weights are unpacked: of 16 columns, the first eight of each four.
inline void prepare_halves(const Matrix& m, const float* x, std::byte* out) {
    auto* to = reinterpret_cast<float*>(out);
    constexpr std::int64_t kColumns = 64;
    for (std::int64_t first = 0; first < avx512::blocks_of(m.columns) * avx512::kBlock;
         first += kColumns) {
        __m512 v[4];
        for (std::int64_t i = 0; i < 4; ++i) {
            const std::int64_t column = first + 16 * i;
            v[i] = avx512::load_up_to(x + column, m.columns - column);
        }
        _mm512_store_ps(to + first, _mm512_shuffle_f32x4(v[0], v[1], 0x44));
        _mm512_store_ps(to + first + 16, _mm512_shuffle_f32x4(v[2], v[3], 0x44));
        _mm512_store_ps(to + first + 32, _mm512_shuffle_f32x4(v[0], v[1], 0xEE));
        _mm512_store_ps(to + first + 48, _mm512_shuffle_f32x4(v[2], v[3], 0xEE));
    }
}

inline std::int64_t halves_bytes(const Matrix& m) { return kHalvesPass * halves_token_bytes(m); }

// The power of two above the largest of finite numbers.
inline int exponent_above(std::uint32_t float_bits) {
    return static_cast<int>(float_bits >> 23 & 0xFF) - 126;
}

// A prepared token's largest magnitude, as the bits of a float.
inline std::uint32_t largest_of(const std::byte* token, std::int64_t num_bytes) {
    __m512i largest = _mm512_setzero_si512();
    for (std::int64_t at = 0; at < num_bytes; at += kLine) {
        const __m512i magnitudes =
            _mm512_and_si512(_mm512_load_si512(token + at), _mm512_set1_epi32(0x7FFFFFFF));
        largest = _mm512_max_epu32(largest, magnitudes);
    }
    return _mm512_reduce_max_epu32(largest);
}

class HalvesProduct {
  public:
    explicit HalvesProduct(const Product& p)
        : p_(p),
          m_(*p.matrix),
          blocks_(avx512::blocks_of(m_.columns)),
          packed_bytes_(avx512::packed_bytes_of<Fp8>(m_)),
          token_bytes_(halves_token_bytes(m_)) {}

    void operator()() {
        for (std::int64_t begin = p_.row_begin; begin < p_.row_end;) {
            const std::int64_t end = min_of((begin / kFp8Block + 1) * kFp8Block, p_.row_end);
            for (first_ = 0; first_ < p_.num_tokens; first_ += kHalvesPass) {
                count_ = min_of(p_.num_tokens - first_, kHalvesPass);
                scale_tokens(begin / kFp8Block);
                multiply_rows(begin, end);
            }
            begin = end;
        }
    }

  private:
    std::byte* scaled(std::int64_t t) const { return p_.scratch + t * token_bytes_; }

    // The tokens for 128 rows: activation times scale, times a power of two that brings the largest
    // of a token near 2^10. Eight products with weights below 2 are then below 2^15.
    void scale_tokens(std::int64_t row_of_blocks) {
        constexpr int kWanted = 11;
        // Beyond this, factors would not be finite; what is lost so is below 2^-110.
        constexpr int kMost = 120;
        const auto* scales =
            reinterpret_cast<const float*>(m_.scales + row_of_blocks * m_.scale_row_bytes);
        float largest_scale = 0;
        for (std::int64_t b = 0; b < blocks_; ++b) {
            const float magnitude = std::fabs(scales[b]);
            largest_scale = magnitude > largest_scale ? magnitude : largest_scale;
        }
        std::uint32_t scale_bits;
        std::memcpy(&scale_bits, &largest_scale, sizeof scale_bits);
        for (std::int64_t t = 0; t < count_; ++t) {
            const std::byte* token = p_.tokens[first_ + t];
            const int wanted = kWanted - exponent_above(largest_of(token, 2 * token_bytes_));
            const int exponent = (wanted < kMost ? wanted : kMost) - exponent_above(scale_bits);
            constexpr int kWeightExponent = 8;
            unit_exponents_[t] = static_cast<float>(kWeightExponent - exponent);
            const __m512 factor = _mm512_set1_ps(static_cast<float>(exponent));
            for (std::int64_t b = 0; b < blocks_; ++b) {
                const __m512 scale = _mm512_scalef_ps(_mm512_set1_ps(scales[b]), factor);
                const std::byte* from = token + b * 4 * avx512::kBlock;
                std::byte* to = scaled(t) + b * 2 * avx512::kBlock;
                for (int j = 0; j < 4; ++j) {
                    scale_line(reinterpret_cast<const float*>(from) + 32 * j, scale,
                               to + j * kLine);
                }
            }
        }
    }

    static void scale_line(const float* from, __m512 scale, std::byte* to) {
        const __m256i low = halves_of(_mm512_mul_ps(_mm512_load_ps(from), scale));
        const __m256i high = halves_of(_mm512_mul_ps(_mm512_load_ps(from + 16), scale));
        _mm512_store_si512(to, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
    }

    void multiply_rows(std::int64_t row, std::int64_t end) const {
        for (; row + kHalvesRows <= end; row += kHalvesRows) {
            multiply_tokens<kHalvesRows>(row);
        }
        for (; row < end; ++row) {
            multiply_tokens<1>(row);
        }
    }

    // Weights come from memory for the first tokens, and for the others from the caches.
    template <int kRows>
    void multiply_tokens(std::int64_t row) const {
        static_assert(kHalvesTokens == 4);
        for (std::int64_t t = 0; t < count_; t += kHalvesTokens) {
            switch (count_ - t) {
                case 1:
                    multiply_tile<kRows, 1>(row, t);
                    break;
                case 2:
                    multiply_tile<kRows, 2>(row, t);
                    break;
                case 3:
                    multiply_tile<kRows, 3>(row, t);
                    break;
                default:
                    multiply_tile<kRows, 4>(row, t);
            }
        }
    }

    template <int kRows, int kTokens>
    void multiply_tile(std::int64_t row, std::int64_t first) const {
        const std::byte* data = m_.data + row * m_.row_bytes;
        const std::byte* tokens[kTokens];
        __m512 totals[kRows][kTokens];
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) {
            tokens[t] = scaled(first + t);
#pragma GCC unroll 2
            for (int r = 0; r < kRows; ++r) {
                totals[r][t] = _mm512_setzero_ps();
            }
        }
        const std::byte* ahead = avx512::ahead_of<Fp8>(p_, data, packed_bytes_, kRows);
        std::int64_t at = 0;
        for (; at + kSumLines * kLine <= packed_bytes_; at += kSumLines * kLine) {
            add_lines<kRows, kTokens, true>(data, ahead, tokens, at, totals);
        }
        if (at < packed_bytes_) {
            add_lines<kRows, kTokens, false>(data, ahead, tokens, at, totals);
        }
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) {
            const __m128 exponent = _mm_set_ss(unit_exponents_[first + t]);
            float* output = p_.outputs[first_ + first + t] + (row - p_.row_begin);
#pragma GCC unroll 2
            for (int r = 0; r < kRows; ++r) {
                const __m128 sum = _mm_set_ss(_mm512_reduce_add_ps(totals[r][t]));
                output[r] = _mm_cvtss_f32(_mm_scalef_ss(sum, exponent));
            }
        }
    }

    // The kSumLines lines at `at`, of which at a row's end some are not there.
    template <int kRows, int kTokens, bool kIsWhole>
    void add_lines(const std::byte* data, const std::byte* ahead, const std::byte* const* tokens,
                   std::int64_t at, __m512 (*totals)[kTokens]) const {
        const std::int64_t left = packed_bytes_ - at;
        __m512i sums[kRows][kTokens];
#pragma GCC unroll 2
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (int t = 0; t < kTokens; ++t) {
                sums[r][t] = _mm512_setzero_si512();
            }
        }
#pragma GCC unroll 4
        for (std::int64_t line = 0; line < kSumLines; ++line) {
            if (!kIsWhole && line * kLine >= left) {
                break;
            }
            const std::int64_t here = at + line * kLine;
#pragma GCC unroll 2
            for (int r = 0; r < kRows; ++r) {
                fetch_far(ahead + kRows * here + r * kLine);
                fetch_near(data + r * m_.row_bytes + here + kNear);
                __m512i weights[2];
                expand(avx512::load_line(data + r * m_.row_bytes + here,
                                         kIsWhole ? kLine : left - line * kLine, 0),
                       weights);
#pragma GCC unroll 4
                for (int t = 0; t < kTokens; ++t) {
                    const auto* x = reinterpret_cast<const __m512i*>(tokens[t] + 2 * here);
                    sums[r][t] = add_product(weights[0], x[0], sums[r][t]);
                    sums[r][t] = add_product(weights[1], x[1], sums[r][t]);
                }
            }
        }
#pragma GCC unroll 2
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (int t = 0; t < kTokens; ++t) {
                totals[r][t] = add_halves(sums[r][t], totals[r][t]);
            }
        }
    }

    // Bit matrices over GF(2), the row of bit 7 in the lowest byte: of a code s eeee mmm the lower
    // half's byte is m 0000000, the upper one's s 0 eeee mm. In the order of avx512::Fp8.
    static void expand(__m512i codes, __m512i* weights) {
        avx512::keep_in_register(codes);
        const __m512i lower =
            _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(0x0000000000000001), 0);
        const __m512i upper =
            _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(0x0204081020400080), 0);
        weights[0] = _mm512_unpacklo_epi8(lower, upper);
        weights[1] = _mm512_unpackhi_epi8(lower, upper);
    }

    const Product& p_;
    const Matrix& m_;
    const std::int64_t blocks_;
    const std::int64_t packed_bytes_;
    const std::int64_t token_bytes_;
    // The tokens of a pass.
    std::int64_t first_ = 0;
    std::int64_t count_ = 0;
    // Sums times two to this are results.
    float unit_exponents_[kHalvesPass] = {};
};

void multiply_halves(const Product& p) {
    HalvesProduct multiply(p);
    multiply();
}

}  // namespace
}  // namespace headwater::amx
