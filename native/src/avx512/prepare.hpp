// Activations: FP32 rounded to BF16 and laid out in the order that a format's weights expand to.
//
// A prepared token is BF16 [columns rounded up to 128], and for matrices with zeros FP32 sums
// [16 per 128 columns] of the columns that meet in each lane of a vector of products.
#pragma once

#include "formats.hpp"

namespace headwater::avx512 {
namespace {

inline bool has_sums(const Matrix& m) { return m.zeros != nullptr; }

inline std::int64_t token_bytes(const Matrix& m) {
    const std::int64_t blocks = blocks_of(m.columns);
    return blocks * (2 * kBlock) + (has_sums(m) ? blocks * 64 : 0);
}

inline const float* sums_of(const Matrix& m, const std::byte* token) {
    return reinterpret_cast<const float*>(token + blocks_of(m.columns) * (2 * kBlock));
}

inline __m512 load_up_to(const float* x, std::int64_t left) {
    if (left >= 16) {
        return _mm512_loadu_ps(x);
    }
    return left <= 0 ? _mm512_setzero_ps()
                     : _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << left) - 1), x);
}

// Word j of the result: word 4j + first of the 64 in (a, b), for j < 16.
inline __m256i every_fourth(__m512i a, __m512i b, int first) {
    alignas(64) std::uint16_t index[32];
    for (int j = 0; j < 32; ++j) {
        index[j] = static_cast<std::uint16_t>((4 * j + first) % 64);
    }
    return _mm512_castsi512_si256(_mm512_permutex2var_epi16(a, _mm512_load_si512(index), b));
}

inline void prepare_token(const Matrix& m, const float* x, std::byte* out) {
    const std::int64_t blocks = blocks_of(m.columns);
    float* sums = reinterpret_cast<float*>(out + blocks * (2 * kBlock));
    const __m512bh ones = as_bf16(_mm512_set1_epi16(0x3F80));
    for (std::int64_t block = 0; block < blocks; ++block) {
        __m512i v[4];
        for (int j = 0; j < 4; ++j) {
            const std::int64_t first = block * kBlock + 32 * j;
            const __m512 low = load_up_to(x + first, m.columns - first);
            const __m512 high = load_up_to(x + first + 16, m.columns - first - 16);
            v[j] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
        }
        __m512i ordered[4] = {v[0], v[1], v[2], v[3]};
        if (m.format == Format::kFp8) {
            // Unpacking interleaves within 16 bytes: the low halves first, then the high halves.
            for (int j = 0; j < 4; j += 2) {
                ordered[j] = _mm512_shuffle_i64x2(v[j], v[j + 1], 0x88);
                ordered[j + 1] = _mm512_shuffle_i64x2(v[j], v[j + 1], 0xDD);
            }
        } else if (m.format != Format::kBf16) {
            for (int j = 0; j < 4; ++j) {
                ordered[j] = _mm512_inserti64x4(_mm512_castsi256_si512(every_fourth(v[0], v[1], j)),
                                                every_fourth(v[2], v[3], j), 1);
            }
        }
        for (int j = 0; j < 4; ++j) {
            _mm512_store_si512(out + block * (2 * kBlock) + 64 * j, ordered[j]);
        }
        if (has_sums(m)) {
            __m512 sum = _mm512_setzero_ps();
            for (int j = 0; j < 4; ++j) {
                sum = _mm512_dpbf16_ps(sum, ones, as_bf16(ordered[j]));
            }
            _mm512_store_ps(sums + 16 * block, sum);
        }
    }
}

}  // namespace
}  // namespace headwater::avx512
