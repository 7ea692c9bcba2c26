// How each format's weights become BF16 vectors, a block of 128 columns at a time.
//
// A format is a class with
//   Tables                      constants that a kernel keeps in registers
//   kBlockBytes                 what 128 columns of a row take
//   Row(matrix, row, scratch)   where a row and its scales are; scratch: kRowScratch floats per 512
//   load(tables, p, w)          the 128 columns at p as four BF16 vectors
//   start(row, block, sums)     what the block's sum of products starts from
//   add(row, block, sum, total) total + scale * sum
// The order of the columns in the vectors is the format's own: prepare.hpp lays out activations
// in the same one.
#pragma once

#include <immintrin.h>

#include "headwater/matrix.hpp"

namespace headwater::avx512 {
namespace {

constexpr std::int64_t kBlock = 128;

inline std::int64_t blocks_of(std::int64_t columns) { return (columns + kBlock - 1) / kBlock; }

inline __m512bh as_bf16(__m512i bits) { return reinterpret_cast<__m512bh>(bits); }

// Stops the compiler from loading a line of weights once per use: Zen 4 loads one a cycle.
inline void keep_in_register(__m512i& vector) { asm("" : "+v"(vector)); }

// Two bytes per element, in order.
struct Bf16 {
    struct Tables {
        explicit Tables(const Matrix&) {}
    };
    struct Row {
        Row() = default;
        Row(const Matrix& m, std::int64_t row, float*) : data(m.data + row * m.row_bytes) {}
        const std::byte* data;
    };
    static constexpr std::int64_t kBlockBytes = 256;
    static constexpr std::int64_t kRowScratch = 0;

    static inline void load(const Tables&, const std::byte* p, __m512i* w) {
        for (int j = 0; j < 4; ++j) {
            w[j] = _mm512_loadu_si512(p + 64 * j);
        }
    }
    static inline __m512 start(const Row&, std::int64_t, const float*) {
        return _mm512_setzero_ps();
    }
    static inline __m512 add(const Row&, std::int64_t, __m512 sum, __m512 total) {
        return _mm512_add_ps(total, sum);
    }
};

// The two bytes of the BF16 value of each E4M3 code without its sign. The NaN code reads as 480.
struct alignas(64) E4m3Bytes {
    std::uint8_t low[128];
    std::uint8_t high[128];

    constexpr E4m3Bytes() : low(), high() {
        for (int code = 1; code < 128; ++code) {
            int exponent = code >> 3;
            int mantissa = code & 7;
            if (exponent == 0) {
                for (exponent = 1; mantissa < 8; --exponent) {
                    mantissa <<= 1;
                }
            }
            const int bits = (exponent + 120) << 7 | (mantissa & 7) << 4;
            low[code] = static_cast<std::uint8_t>(bits);
            high[code] = static_cast<std::uint8_t>(bits >> 8);
        }
    }
};
constexpr E4m3Bytes kE4m3;

// Two look-ups in 128 entries give the two bytes of each BF16 value; the index ignores bit 7, the
// sign, which is put in afterwards. E4M3 is exact in BF16, subnormals included.
struct Fp8 {
    struct Tables {
        explicit Tables(const Matrix&)
            : low0(_mm512_load_si512(kE4m3.low)),
              low1(_mm512_load_si512(kE4m3.low + 64)),
              high0(_mm512_load_si512(kE4m3.high)),
              high1(_mm512_load_si512(kE4m3.high + 64)),
              sign(_mm512_set1_epi8(static_cast<char>(0x80))) {}
        __m512i low0, low1, high0, high1, sign;
    };
    struct Row {
        Row() = default;
        Row(const Matrix& m, std::int64_t row, float*)
            : data(m.data + row * m.row_bytes),
              scales(
                  reinterpret_cast<const float*>(m.scales + row / kFp8Block * m.scale_row_bytes)) {}
        const std::byte* data;
        const float* scales;
    };
    static constexpr std::int64_t kBlockBytes = 128;
    static constexpr std::int64_t kRowScratch = 0;

    static inline void expand(const Tables& t, const std::byte* p, __m512i* w) {
        __m512i codes = _mm512_loadu_si512(p);
        keep_in_register(codes);
        const __m512i low = _mm512_permutex2var_epi8(t.low0, codes, t.low1);
        const __m512i magnitude = _mm512_permutex2var_epi8(t.high0, codes, t.high1);
        // magnitude | (codes & sign)
        const __m512i high = _mm512_ternarylogic_epi32(magnitude, codes, t.sign, 0xF8);
        w[0] = _mm512_unpacklo_epi8(low, high);
        w[1] = _mm512_unpackhi_epi8(low, high);
    }
    static inline void load(const Tables& t, const std::byte* p, __m512i* w) {
        expand(t, p, w);
        expand(t, p + 64, w + 2);
    }
    static inline __m512 start(const Row&, std::int64_t, const float*) {
        return _mm512_setzero_ps();
    }
    static inline __m512 add(const Row& row, std::int64_t block, __m512 sum, __m512 total) {
        return _mm512_fmadd_ps(_mm512_set1_ps(row.scales[block]), sum, total);
    }
};

// Value i of the four at `p`, in all lanes of quarter i.
inline __m512 spread_quarters(const float* p) {
    const __m512i quarter = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    return _mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_load_ps(p)), quarter);
}

// Bit i set for i < n.
inline __mmask16 first_lanes(std::int64_t n) {
    return static_cast<__mmask16>(n >= 16 ? 0xFFFF : n <= 0 ? 0 : (1u << n) - 1);
}

// Stores 16 / kRepeat of the lanes of `values`, from lane `first` on, kRepeat times each.
template <int kRepeat>
inline void store_repeated(__m512 values, int first, float* out) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i source = _mm512_add_epi32(_mm512_srli_epi32(lane, kRepeat == 4   ? 2
                                                                    : kRepeat == 2 ? 1
                                                                                   : 0),
                                            _mm512_set1_epi32(first));
    _mm512_store_ps(out, _mm512_permutexvar_ps(source, values));
}

// One value per group to one per 32 columns, then zeros; `out` has room for `padded` rounded up to
// 16. load(i, mask) gives the values of 16 groups from the i-th on, and zeros where masked out.
template <int kRepeat, class Load>
inline void widen(std::int64_t count, std::int64_t padded, float* out, Load load) {
    for (std::int64_t i = 0; i * kRepeat < padded; i += 16) {
        const __m512 values = load(i, first_lanes(count - i));
        if constexpr (kRepeat == 1) {
            _mm512_store_ps(out + i, values);
            continue;
        }
        for (int k = 0; k < kRepeat && (i * kRepeat) + 16 * k < padded; ++k) {
            store_repeated<kRepeat>(values, 16 / kRepeat * k, out + i * kRepeat + 16 * k);
        }
    }
}

template <class Load>
inline void widen(const Matrix& m, std::int64_t padded, float* out, Load load) {
    const std::int64_t count = (m.columns + m.group - 1) / m.group;
    if (m.group == 32) {
        widen<1>(count, padded, out, load);
    } else if (m.group == 64) {
        widen<2>(count, padded, out, load);
    } else {
        widen<4>(count, padded, out, load);
    }
}

inline void widen_scales(const Matrix& m, std::int64_t row, std::int64_t padded, float* out) {
    const std::byte* p = m.scales + row * m.scale_row_bytes;
    if (m.scale_type == ScaleType::kF32) {
        widen(m, padded, out, [p](std::int64_t i, __mmask16 mask) {
            return _mm512_maskz_loadu_ps(mask, p + 4 * i);
        });
    } else if (m.scale_type == ScaleType::kBf16) {
        widen(m, padded, out, [p](std::int64_t i, __mmask16 mask) {
            const __m256i bits = _mm256_maskz_loadu_epi16(mask, p + 2 * i);
            return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
        });
    } else {
        // 2^(code - 127); code 0 is the subnormal 2^-127.
        widen(m, padded, out, [p](std::int64_t i, __mmask16 mask) {
            const __m512i codes = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, p + i));
            return _mm512_castsi512_ps(_mm512_maskz_max_epu32(mask, _mm512_slli_epi32(codes, 23),
                                                              _mm512_set1_epi32(0x00400000)));
        });
    }
}

// 8 - zero.
inline void widen_zeros(const Matrix& m, std::int64_t row, std::int64_t padded, float* out) {
    const std::uint8_t* p = m.zeros + row * m.zero_row_bytes;
    widen(m, padded, out, [p](std::int64_t i, __mmask16 mask) {
        const __m512i zeros = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, p + i));
        return _mm512_maskz_sub_ps(mask, _mm512_set1_ps(8.0f), _mm512_cvtepi32_ps(zeros));
    });
}

// BF16 values of the sixteen codes, twice, as the index of the look-up has five bits.
struct alignas(64) NibbleValues {
    std::uint16_t int4[32];
    std::uint16_t e2m1[32];

    constexpr NibbleValues() : int4(), e2m1() {
        // -8 to 7; and 0, 0.5, 1, 1.5, 2, 3, 4, 6.
        constexpr std::uint16_t kInt4[16] = {0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040,
                                             0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000, 0x4040,
                                             0x4080, 0x40A0, 0x40C0, 0x40E0};
        constexpr std::uint16_t kE2m1[8] = {0x0000, 0x3F00, 0x3F80, 0x3FC0,
                                            0x4000, 0x4040, 0x4080, 0x40C0};
        for (int i = 0; i < 32; ++i) {
            int4[i] = kInt4[i % 16];
            e2m1[i] = static_cast<std::uint16_t>(kE2m1[i % 8] | (i % 16 / 8) << 15);
        }
    }
};
constexpr NibbleValues kNibbleValues;

// INT4 and MXFP4. Four nibbles per 16-bit lane: shifted by 0, 4, 8 and 12 bits, its low bits select
// the value of columns 4i, 4i + 1, 4i + 2 and 4i + 3. So each quarter of a vector of sums belongs
// to 32 columns, and thus to one scale. (On Zen 4 to put a code into the low bits of BF16 128, and
// to take 136 times the activations off, is no faster than the look-up, and less exact.)
template <bool kHasZeros>
struct Nibbles {
    struct Tables {
        explicit Tables(const Matrix& m)
            : values(_mm512_load_si512(m.format == Format::kInt4 ? kNibbleValues.int4
                                                                 : kNibbleValues.e2m1)) {}
        __m512i values;
    };
    struct Row {
        Row() = default;
        Row(const Matrix& m, std::int64_t row, float* scratch)
            : data(m.data + row * m.row_bytes), scales(scratch) {
            const std::int64_t count = 4 * blocks_of(m.columns);
            widen_scales(m, row, count, scratch);
            if constexpr (kHasZeros) {
                zeros = scratch + (count + 15) / 16 * 16;
                widen_zeros(m, row, count, scratch + (count + 15) / 16 * 16);
            }
        }
        const std::byte* data;
        const float* scales;
        const float* zeros;
    };
    static constexpr std::int64_t kBlockBytes = 64;
    static constexpr std::int64_t kRowScratch = kHasZeros ? 32 : 16;

    static inline void load(const Tables& t, const std::byte* p, __m512i* w) {
        __m512i v = _mm512_loadu_si512(p);
        keep_in_register(v);
        w[0] = _mm512_permutexvar_epi16(v, t.values);
        w[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4), t.values);
        w[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 8), t.values);
        w[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 12), t.values);
    }
    static inline __m512 start(const Row& row, std::int64_t block, const float* sums) {
        if constexpr (kHasZeros) {
            return _mm512_mul_ps(spread_quarters(row.zeros + 4 * block),
                                 _mm512_load_ps(sums + 16 * block));
        } else {
            return _mm512_setzero_ps();
        }
    }
    static inline __m512 add(const Row& row, std::int64_t block, __m512 sum, __m512 total) {
        return _mm512_fmadd_ps(spread_quarters(row.scales + 4 * block), sum, total);
    }
};

}  // namespace
}  // namespace headwater::avx512
