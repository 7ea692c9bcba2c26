// How each format's weights become BF16 vectors, 128 columns at a time.
//
// A format is a class with
//   Row(matrix, row, scratch)     where a row's bytes and scales are, made ready for reading
//   load(row, block, w)           columns [128 block, 128 block + 128) as four BF16 vectors
//   load_tail(row, block, n, w)   likewise the last n < 128 columns; the others are finite
//   start(row, block, sums)       what a block's sum of products starts from
//   add(row, block, sum, total)   total + scale * sum
// The vectors' order of columns is the format's own; prepare.hpp lays out activations likewise.
#pragma once

#include <immintrin.h>

#include "headwater/matrix.hpp"

namespace headwater::avx512 {
namespace {

constexpr std::int64_t kBlock = 128;

inline __m512bh as_bf16(__m512i bits) { return reinterpret_cast<__m512bh>(bits); }

inline std::int64_t round_up(std::int64_t value, std::int64_t unit) {
    return (value + unit - 1) / unit * unit;
}

// Stops the compiler from loading a line of weights once per use: Zen 4 loads one a cycle.
inline void keep_in_register(__m512i& vector) { asm("" : "+v"(vector)); }

// Bit i set for i < n; n is 0 to 64.
inline __mmask64 first_bytes(std::int64_t n) { return n >= 64 ? ~0ULL : (1ULL << n) - 1; }

inline std::int64_t bytes_in_vector(std::int64_t num_bytes, int vector) {
    const std::int64_t left = num_bytes - 64 * vector;
    return left < 0 ? 0 : left > 64 ? 64 : left;
}

// 2 bytes per element, in order.
struct Bf16 {
    struct Tables {};
    struct Row {
        Row() = default;
        Row(const Matrix& m, std::int64_t row, const Tables&, float*)
            : data(m.data + row * m.row_bytes) {}
        const std::byte* data;
    };
    static constexpr std::int64_t kBlockBytes = 256;

    static inline void load(const Tables&, const Row& row, std::int64_t block, __m512i* w) {
        const std::byte* p = row.data + block * kBlockBytes;
        for (int j = 0; j < 4; ++j) {
            w[j] = _mm512_loadu_si512(p + 64 * j);
        }
    }
    static inline void load_tail(const Tables&, const Row& row, std::int64_t block, std::int64_t n,
                                 __m512i* w) {
        const std::byte* p = row.data + block * kBlockBytes;
        for (int j = 0; j < 4; ++j) {
            w[j] = _mm512_maskz_loadu_epi8(first_bytes(bytes_in_vector(2 * n, j)), p + 64 * j);
        }
    }
    static inline __m512 start(const Row&, std::int64_t, const float*) {
        return _mm512_setzero_ps();
    }
    static inline __m512 add(const Row&, std::int64_t, __m512 sum, __m512 total) {
        return _mm512_add_ps(total, sum);
    }
};

// Two look-ups in 128 entries give the two bytes of each BF16 value; the index ignores bit 7, the
// sign, which is put in afterwards. E4M3 is exact in BF16, subnormals included.
struct Fp8 {
    struct Tables {
        Tables() {
            alignas(64) std::uint8_t low[128];
            alignas(64) std::uint8_t high[128];
            for (int code = 0; code < 128; ++code) {
                const std::uint16_t bits = magnitude(code);
                low[code] = static_cast<std::uint8_t>(bits);
                high[code] = static_cast<std::uint8_t>(bits >> 8);
            }
            low0 = _mm512_load_si512(low);
            low1 = _mm512_load_si512(low + 64);
            high0 = _mm512_load_si512(high);
            high1 = _mm512_load_si512(high + 64);
            sign = _mm512_set1_epi8(static_cast<char>(0x80));
        }
        // BF16 of an E4M3 code without sign. The NaN code reads as 480.
        static std::uint16_t magnitude(int code) {
            int exponent = code >> 3;
            int mantissa = code & 7;
            if (exponent == 0) {
                if (mantissa == 0) {
                    return 0;
                }
                exponent = 1;
                while (mantissa < 8) {
                    mantissa <<= 1;
                    --exponent;
                }
                mantissa &= 7;
            }
            return static_cast<std::uint16_t>((exponent + 120) << 7 | mantissa << 4);
        }
        __m512i low0, low1, high0, high1, sign;
    };
    struct Row {
        Row() = default;
        Row(const Matrix& m, std::int64_t row, const Tables&, float*)
            : data(m.data + row * m.row_bytes),
              scales(reinterpret_cast<const float*>(m.scales +
                                                    row / kFp8Block * m.scale_row_bytes)) {}
        const std::byte* data;
        const float* scales;
    };
    static constexpr std::int64_t kBlockBytes = 128;

    static inline void expand(const Tables& t, __m512i codes, __m512i* w) {
        keep_in_register(codes);
        const __m512i low = _mm512_permutex2var_epi8(t.low0, codes, t.low1);
        const __m512i magnitude = _mm512_permutex2var_epi8(t.high0, codes, t.high1);
        // magnitude | (codes & sign)
        const __m512i high = _mm512_ternarylogic_epi32(magnitude, codes, t.sign, 0xF8);
        w[0] = _mm512_unpacklo_epi8(low, high);
        w[1] = _mm512_unpackhi_epi8(low, high);
    }
    static inline void load(const Tables& t, const Row& row, std::int64_t block, __m512i* w) {
        const std::byte* p = row.data + block * kBlockBytes;
        expand(t, _mm512_loadu_si512(p), w);
        expand(t, _mm512_loadu_si512(p + 64), w + 2);
    }
    static inline void load_tail(const Tables& t, const Row& row, std::int64_t block,
                                 std::int64_t n, __m512i* w) {
        const std::byte* p = row.data + block * kBlockBytes;
        for (int j = 0; j < 2; ++j) {
            expand(t, _mm512_maskz_loadu_epi8(first_bytes(bytes_in_vector(n, j)), p + 64 * j),
                   w + 2 * j);
        }
    }
    static inline __m512 start(const Row&, std::int64_t, const float*) {
        return _mm512_setzero_ps();
    }
    static inline __m512 add(const Row& row, std::int64_t block, __m512 sum, __m512 total) {
        return _mm512_fmadd_ps(_mm512_set1_ps(row.scales[block]), sum, total);
    }
};

// Four nibbles per 16-bit lane. Shifted by 0, 4, 8 and 12 bits, a lane's low bits select the BF16
// value of its columns 4i, 4i + 1, 4i + 2 and 4i + 3 from a table of 16, which is there twice as
// the index has five bits. So each quarter of a vector of sums belongs to 32 columns, and thus to
// one scale.
struct Nibbles {
    struct Tables {
        explicit Tables(const std::uint16_t* values) {
            alignas(64) std::uint16_t twice[32];
            for (int i = 0; i < 32; ++i) {
                twice[i] = values[i % 16];
            }
            table = _mm512_load_si512(twice);
        }
        __m512i table;
    };
    static constexpr std::int64_t kBlockBytes = 64;

    static inline void expand(const Tables& t, __m512i v, __m512i* w) {
        w[0] = _mm512_permutexvar_epi16(v, t.table);
        w[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4), t.table);
        w[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 8), t.table);
        w[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 12), t.table);
    }
};

}  // namespace
}  // namespace headwater::avx512
