// How each format's weights become BF16 vectors, a block of 128 columns at a time.
//
// A format is a class with
//   Tables                      constants that a kernel keeps in registers
//   kBlockBytes                 what 128 columns of a row take
//   kPrefetchesScales           whether scales are so many that they are worth prefetching
//   Row(matrix, row, scratch)   where a row and its scales are; scratch: kRowScratch floats per 512
//   load(tables, p, n, w)       the 128 columns at p as four BF16 vectors; of the kBlockBytes there
//                               only the first n are read, and the others count as zero bytes
//   start(row, block, sums)     what the block's sum of products starts from
//   add(row, block, sum, total) total + scale * sum
//   scale(row, block, quarter)  the scale of 32 columns of a block
// The order of the columns in the vectors is the format's own: prepare.hpp lays out activations
// in the same one.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "headwater/matrix.hpp"

namespace headwater::avx512 {
namespace {

constexpr std::int64_t kBlock = 128;

inline std::int64_t blocks_of(std::int64_t columns) { return (columns + kBlock - 1) / kBlock; }

inline __m512bh as_bf16(__m512i bits) { return reinterpret_cast<__m512bh>(bits); }

// Stops the compiler from loading a line of weights once per use: Zen 4 loads one a cycle.
inline void keep_in_register(__m512i& vector) { asm("" : "+v"(vector)); }

// Line `line` of a block of which only the first n bytes are there.
inline __m512i load_line(const std::byte* p, std::int64_t n, int line) {
    const std::int64_t left = n - 64 * line;
    if (left >= 64) {
        return _mm512_loadu_si512(p + 64 * line);
    }
    const __mmask64 mask = left <= 0 ? 0 : ~std::uint64_t{0} >> (64 - left);
    return _mm512_maskz_loadu_epi8(mask, p + 64 * line);
}

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
    static constexpr bool kPrefetchesScales = false;

    static inline void load(const Tables&, const std::byte* p, std::int64_t n, __m512i* w) {
        for (int j = 0; j < 4; ++j) {
            w[j] = load_line(p, n, j);
        }
    }
    static inline __m512 start(const Row&, std::int64_t, const float*) {
        return _mm512_setzero_ps();
    }
    static inline __m512 add(const Row&, std::int64_t, __m512 sum, __m512 total) {
        return _mm512_add_ps(total, sum);
    }
    static inline float scale(const Row&, std::int64_t, std::int64_t) { return 1.0f; }
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
    static constexpr bool kPrefetchesScales = false;

    static inline void expand(const Tables& t, __m512i codes, __m512i* w) {
        keep_in_register(codes);
        const __m512i low = _mm512_permutex2var_epi8(t.low0, codes, t.low1);
        const __m512i magnitude = _mm512_permutex2var_epi8(t.high0, codes, t.high1);
        // magnitude | (codes & sign)
        const __m512i high = _mm512_ternarylogic_epi32(magnitude, codes, t.sign, 0xF8);
        w[0] = _mm512_unpacklo_epi8(low, high);
        w[1] = _mm512_unpackhi_epi8(low, high);
    }
    static inline void load(const Tables& t, const std::byte* p, std::int64_t n, __m512i* w) {
        expand(t, load_line(p, n, 0), w);
        expand(t, load_line(p, n, 1), w + 2);
    }
    static inline __m512 start(const Row&, std::int64_t, const float*) {
        return _mm512_setzero_ps();
    }
    static inline __m512 add(const Row& row, std::int64_t block, __m512 sum, __m512 total) {
        return _mm512_fmadd_ps(_mm512_set1_ps(row.scales[block]), sum, total);
    }
    static inline float scale(const Row& row, std::int64_t block, std::int64_t) {
        return row.scales[block];
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

// Stores 8 of the lanes of `values`, from lane `first` on, twice each.
inline void store_twice(__m512 values, int first, float* out) {
    const __m512i pair = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    const __m512i source = _mm512_add_epi32(pair, _mm512_set1_epi32(first));
    _mm512_store_ps(out, _mm512_permutexvar_ps(source, values));
}

// The values of a row's groups, for each block of 128 columns: one where a group fills the block,
// four otherwise, with zeros after the last group. load(i, mask) gives the values of 16 groups
// from the i-th on, and zeros where masked out; `out` has room for rounding up to 16.
template <class Load>
inline void widen(const Matrix& m, float* out, Load load) {
    const std::int64_t count = (m.columns + m.group - 1) / m.group;
    const std::int64_t padded = blocks_of(m.columns) * kBlock / m.group;
    const auto store = [&](std::int64_t i, __m512 values) {
        if (m.group == 64) {
            store_twice(values, 0, out + 2 * i);
            if (i + 8 < padded) {
                store_twice(values, 8, out + 2 * i + 16);
            }
        } else {
            _mm512_store_ps(out + i, values);
        }
    };
    std::int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        store(i, load(i, __mmask16{0xFFFF}));
    }
    if (i < padded) {
        store(i, load(i, first_lanes(count - i)));
    }
}

inline void widen_scales(const Matrix& m, std::int64_t row, float* out) {
    const std::byte* p = m.scales + row * m.scale_row_bytes;
    if (m.scale_type == ScaleType::kF32) {
        widen(m, out, [p](std::int64_t i, __mmask16 mask) {
            return _mm512_maskz_loadu_ps(mask, p + 4 * i);
        });
    } else {
        widen(m, out, [p](std::int64_t i, __mmask16 mask) {
            const __m256i bits = _mm256_maskz_loadu_epi16(mask, p + 2 * i);
            return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
        });
    }
}

// 8 - zero.
inline void widen_zeros(const Matrix& m, std::int64_t row, float* out) {
    const std::uint8_t* p = m.zeros + row * m.zero_row_bytes;
    widen(m, out, [p](std::int64_t i, __mmask16 mask) {
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

// The four columns 4i to 4i + 3 of each 16-bit lane: shifted by 0, 4, 8 and 12 bits, its low bits
// select the value of one of them. So each quarter of a vector of sums belongs to 32 columns.
inline void look_up_nibbles(__m512i values, __m512i v, __m512i* w) {
    keep_in_register(v);
    w[0] = _mm512_permutexvar_epi16(v, values);
    w[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4), values);
    w[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 8), values);
    w[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 12), values);
}

// kUniform: groups are of 128, so that all quarters of a vector of sums have the same scale. (On
// Zen 4 to put a code into the low bits of BF16 128, and to take 136 times the activations off, is
// no faster than the look-up, and less exact.)
template <bool kHasZeros, bool kUniform>
struct Int4 {
    struct Tables {
        explicit Tables(const Matrix&) : values(_mm512_load_si512(kNibbleValues.int4)) {}
        __m512i values;
    };
    static constexpr std::int64_t kBlockBytes = 64;
    static constexpr std::int64_t kRowScratch = kHasZeros ? 32 : 16;
    static constexpr bool kPrefetchesScales = false;
    static constexpr std::int64_t kPerBlock = kUniform ? 1 : 4;

    struct Row {
        Row() = default;
        Row(const Matrix& m, std::int64_t row, float* scratch)
            : data(m.data + row * m.row_bytes), scales(scratch) {
            widen_scales(m, row, scratch);
            if constexpr (kHasZeros) {
                float* after = scratch + (kPerBlock * blocks_of(m.columns) + 15) / 16 * 16;
                widen_zeros(m, row, after);
                zeros = after;
            }
        }
        const std::byte* data;
        const float* scales;
        const float* zeros;
    };

    static inline __m512 of_block(const float* values, std::int64_t block) {
        if constexpr (kUniform) {
            return _mm512_set1_ps(values[block]);
        } else {
            return spread_quarters(values + 4 * block);
        }
    }
    static inline void load(const Tables& t, const std::byte* p, std::int64_t n, __m512i* w) {
        look_up_nibbles(t.values, load_line(p, n, 0), w);
    }
    static inline __m512 start(const Row& row, std::int64_t block, const float* sums) {
        if constexpr (kHasZeros) {
            return _mm512_mul_ps(of_block(row.zeros, block), _mm512_load_ps(sums + 16 * block));
        } else {
            return _mm512_setzero_ps();
        }
    }
    static inline __m512 add(const Row& row, std::int64_t block, __m512 sum, __m512 total) {
        return _mm512_fmadd_ps(of_block(row.scales, block), sum, total);
    }
    static inline float scale(const Row& row, std::int64_t block, std::int64_t quarter) {
        return row.scales[kUniform ? block : 4 * block + quarter];
    }
    // 8 - zero.
    static inline float zero(const Row& row, std::int64_t block, std::int64_t quarter) {
        return row.zeros[kUniform ? block : 4 * block + quarter];
    }
};

// The codes of a row's scales, 16 bits each, as Mxfp4::of_block wants them: a code 0, which means
// the subnormal 2^-127, sets the top bit of the word before (of the fourth, for the first of a
// block). It is rare, so that words are written without a thought of it and mended afterwards.
inline void spread_codes(const Matrix& m, std::int64_t row, std::uint16_t* out) {
    const std::byte* p = m.scales + row * m.scale_row_bytes;
    const std::int64_t count = (m.columns + kMxfp4Group - 1) / kMxfp4Group;
    __m512i least = _mm512_set1_epi16(1);
    std::int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_epi8(p + i));
        _mm512_store_si512(out + i, words);
        least = _mm512_min_epu16(least, words);
    }
    if (i < count) {
        const __mmask32 mask = (__mmask32{1} << (count - i)) - 1;
        const __m512i words = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, p + i));
        _mm512_store_si512(out + i, words);
        least = _mm512_mask_min_epu16(least, mask, least, words);
    }
    if (_mm512_testn_epi16_mask(least, least) != 0) [[unlikely]] {
        for (i = 0; i < count; i += 32) {
            const __m512i words = _mm512_load_si512(out + i);
            const __mmask32 zeros = _mm512_testn_epi16_mask(words, words);
            const __m512i marks = _mm512_maskz_set1_epi16(zeros, static_cast<short>(0x8000));
            _mm512_store_si512(out + i, _mm512_or_si512(words, _mm512_ror_epi64(marks, 16)));
        }
    }
}

// A scale is an exponent, which one instruction puts in its place. (What shifts and permutes costs
// most here: Zen 4 starts one such instruction a cycle, and the nibbles alone take seven a line.)
struct Mxfp4 {
    struct Tables {
        explicit Tables(const Matrix&) : values(_mm512_load_si512(kNibbleValues.e2m1)) {}
        __m512i values;
    };
    static constexpr std::int64_t kBlockBytes = 64;
    static constexpr std::int64_t kRowScratch = 16;
    static constexpr bool kPrefetchesScales = true;

    struct Row {
        Row() = default;
        Row(const Matrix& m, std::int64_t row, float* scratch)
            : data(m.data + row * m.row_bytes), codes(reinterpret_cast<std::uint16_t*>(scratch)) {
            spread_codes(m, row, reinterpret_cast<std::uint16_t*>(scratch));
        }
        const std::byte* data;
        const std::uint16_t* codes;
    };

    // 2^(code - 127) of the block's four codes, each in all lanes of a quarter.
    static inline __m512 of_block(const std::uint16_t* codes) {
        // A lane's upper bytes are the bits of the four words from here on: 7 below the code, so
        // that its lowest bit is the top of one, and 1 above that, which is the other.
        constexpr auto lane = [](int i) {
            return static_cast<std::int64_t>((16 * i + 1) << 24 | ((16 * i + 57) & 63) << 16);
        };
        constexpr auto twice = [lane](int i) { return lane(i) << 32 | lane(i); };
        const __m512i starts = _mm512_set_epi64(twice(3), twice(3), twice(2), twice(2), twice(1),
                                                twice(1), twice(0), twice(0));
        constexpr __mmask64 kUpperBytes = 0xCCCCCCCCCCCCCCCC;
        std::int64_t four;
        std::memcpy(&four, codes, sizeof four);
        return _mm512_castsi512_ps(
            _mm512_maskz_multishift_epi64_epi8(kUpperBytes, starts, _mm512_set1_epi64(four)));
    }
    static inline void load(const Tables& t, const std::byte* p, std::int64_t n, __m512i* w) {
        look_up_nibbles(t.values, load_line(p, n, 0), w);
    }
    static inline __m512 start(const Row&, std::int64_t, const float*) {
        return _mm512_setzero_ps();
    }
    static inline __m512 add(const Row& row, std::int64_t block, __m512 sum, __m512 total) {
        return _mm512_fmadd_ps(of_block(row.codes + 4 * block), sum, total);
    }
    static inline float scale(const Row& row, std::int64_t block, std::int64_t quarter) {
        alignas(64) float all[16];
        _mm512_store_ps(all, of_block(row.codes + 4 * block));
        return all[4 * quarter];
    }
};

// Calls run<F>() for the kind of INT4 that the matrix is.
template <class Run>
inline void with_int4(const Matrix& m, const Run& run) {
    const bool is_uniform = m.group == kBlock;
    if (m.zeros == nullptr) {
        is_uniform ? run.template operator()<Int4<false, true>>()
                   : run.template operator()<Int4<false, false>>();
    } else {
        is_uniform ? run.template operator()<Int4<true, true>>()
                   : run.template operator()<Int4<true, false>>();
    }
}

}  // namespace
}  // namespace headwater::avx512
