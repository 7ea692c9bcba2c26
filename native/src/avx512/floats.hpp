// Sixteen FP32 lanes, as the shared algorithms in simd/ use them.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace headwater::avx512 {
namespace {

inline __mmask16 first_lanes(std::int64_t n) {
    return n >= 16 ? 0xFFFF : n <= 0 ? 0 : static_cast<__mmask16>((1U << n) - 1);
}

struct Floats {
    static constexpr int kLanes = 16;
    // Rows of a product whose sums, four vectors each, fit in the registers.
    static constexpr int kRows = 6;

    __m512 v;

    static Floats zero() { return {_mm512_setzero_ps()}; }
    static Floats set(float x) { return {_mm512_set1_ps(x)}; }
    static Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
    // Lanes from n on are zero and their memory is not read; likewise below.
    static Floats load(const float* p, std::int64_t n) {
        return {_mm512_maskz_loadu_ps(first_lanes(n), p)};
    }
    static Floats load_bf16(const std::uint16_t* p) {
        return from_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static Floats load_bf16(const std::uint16_t* p, std::int64_t n) {
        return from_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
    }
    static Floats load_half(const std::uint16_t* p) {
        return from_half(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static Floats load_half(const std::uint16_t* p, std::int64_t n) {
        return from_half(_mm256_maskz_loadu_epi16(first_lanes(n), p));
    }
    // E4M3; the NaN codes read as 480.
    static Floats load_fp8(const std::uint8_t* p) {
        return from_fp8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static Floats load_fp8(const std::uint8_t* p, std::int64_t n) {
        return from_fp8(_mm_maskz_loadu_epi8(first_lanes(n), p));
    }
    // Four-bit codes, two a byte, the low one first: as numbers from 0 to 15, and as E2M1.
    static Floats load_nibbles(const std::uint8_t* p) { return from_int8(nibbles(p, 8)); }
    static Floats load_nibbles(const std::uint8_t* p, std::int64_t n) {
        return from_int8(nibbles(p, (n + 1) / 2));
    }
    static Floats load_e2m1(const std::uint8_t* p) { return from_e2m1(nibbles(p, 8)); }
    static Floats load_e2m1(const std::uint8_t* p, std::int64_t n) {
        return from_e2m1(nibbles(p, (n + 1) / 2));
    }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
    void store(float* p, std::int64_t n) const { _mm512_mask_storeu_ps(p, first_lanes(n), v); }

    Floats operator+(Floats o) const { return {_mm512_add_ps(v, o.v)}; }
    Floats operator-(Floats o) const { return {_mm512_sub_ps(v, o.v)}; }
    Floats operator*(Floats o) const { return {_mm512_mul_ps(v, o.v)}; }
    // a * b + *this
    Floats plus_product(Floats a, Floats b) const { return {_mm512_fmadd_ps(a.v, b.v, v)}; }
    Floats max(Floats o) const { return {_mm512_max_ps(v, o.v)}; }
    // Lanes [begin, end) of *this, the others of `other`.
    Floats keep(std::int64_t begin, std::int64_t end, Floats other) const {
        const __mmask16 kept = first_lanes(end) & static_cast<__mmask16>(~first_lanes(begin));
        return {_mm512_mask_blend_ps(kept, other.v, v)};
    }
    float sum() const { return _mm512_reduce_add_ps(v); }
    float maximum() const { return _mm512_reduce_max_ps(v); }

    // e^x for x <= 0, within 2 units in the last place; 0 below -104.
    Floats exp() const {
        // In this order a NaN passes through.
        const __m512 x = _mm512_max_ps(_mm512_set1_ps(-110.0F), v);
        const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504F)),
                                              _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        // ln 2 in two parts, the first of which has few enough bits for n times it to be exact.
        __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375F), x);
        r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4F), r);
        __m512 p = _mm512_set1_ps(1.0F / 720);
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0F / 120));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0F / 24));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0F / 6));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5F));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0F));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0F));
        return {_mm512_scalef_ps(p, n)};
    }

    // Of 16 pairs of finite FP16, those at even and at odd places, times 2^-112.
    static Floats even_half(const std::uint32_t* pairs) {
        return from_upper_half(_mm512_slli_epi32(_mm512_load_si512(pairs), 16));
    }
    static Floats odd_half(const std::uint32_t* pairs) {
        return from_upper_half(_mm512_load_si512(pairs));
    }

    // Transposes up to 16 pairs of 16 bits (`count` elements of each of 16 rows, null for zeros):
    // pair i of row r goes to out[i * stride + r], and 16 whole lines of `out` are written.
    static void transpose_pairs(const std::uint16_t* const* rows, std::int64_t first,
                                std::int64_t count, std::uint32_t* out, std::int64_t stride) {
        const __mmask32 mask = count >= 32 ? 0xFFFFFFFFU : (1U << count) - 1;
        __m512i a[16];
        __m512i b[16];
        for (int r = 0; r < 16; ++r) {
            a[r] = rows[r] == nullptr ? _mm512_setzero_si512()
                                      : _mm512_maskz_loadu_epi16(mask, rows[r] + first);
        }
        for (int r = 0; r < 16; r += 2) {
            b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
            b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
        }
        // a[4g + j]: pair 4q + j of rows 4g to 4g + 3, in the q-th quarter.
        for (int r = 0; r < 16; r += 4) {
            a[r] = _mm512_unpacklo_epi64(b[r], b[r + 2]);
            a[r + 1] = _mm512_unpackhi_epi64(b[r], b[r + 2]);
            a[r + 2] = _mm512_unpacklo_epi64(b[r + 1], b[r + 3]);
            a[r + 3] = _mm512_unpackhi_epi64(b[r + 1], b[r + 3]);
        }
        const std::int64_t num_pairs = (count + 1) / 2;
        for (int j = 0; j < 4; ++j) {
            const __m512i even_low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
            const __m512i odd_low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xDD);
            const __m512i even_high = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
            const __m512i odd_high = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xDD);
            const __m512i quarters[4] = {_mm512_shuffle_i32x4(even_low, even_high, 0x88),
                                         _mm512_shuffle_i32x4(odd_low, odd_high, 0x88),
                                         _mm512_shuffle_i32x4(even_low, even_high, 0xDD),
                                         _mm512_shuffle_i32x4(odd_low, odd_high, 0xDD)};
            for (int q = 0; q < 4; ++q) {
                if (4 * q + j < num_pairs) {
                    _mm512_store_si512(out + (4 * q + j) * stride, quarters[q]);
                }
            }
        }
    }

  private:
    static __m128i nibbles(const std::uint8_t* p, std::int64_t num_bytes) {
        const __m128i bytes = _mm_maskz_loadu_epi8(first_lanes(num_bytes), p);
        const __m128i low_bits = _mm_set1_epi8(15);
        return _mm_unpacklo_epi8(_mm_and_si128(bytes, low_bits),
                                 _mm_and_si128(_mm_srli_epi16(bytes, 4), low_bits));
    }
    static Floats from_int8(__m128i values) {
        return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(values))};
    }
    static Floats from_e2m1(__m128i codes) {
        const __m128i doubled =
            _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
        return from_int8(_mm_shuffle_epi8(doubled, codes)) * set(0.5F);
    }
    static Floats from_half(__m256i bits) { return {_mm512_cvtph_ps(bits)}; }
    // Sign to bit 31, exponent to bit 23 on; what was below is another number's.
    static Floats from_upper_half(__m512i words) {
        const __m512i kept = _mm512_set1_epi32(static_cast<int>(0x8FFFE000U));
        return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_srai_epi32(words, 3), kept))};
    }
    static Floats from_bf16(__m256i bits) {
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
    }
    // seee emmm, sign-extended: sign to bit 31, exponent to bit 23 on, then the bias put right.
    static Floats from_fp8(__m128i codes) {
        const __m512i bits = _mm512_slli_epi32(_mm512_cvtepi8_epi32(codes), 20);
        const __m512i fields = _mm512_and_si512(bits, _mm512_set1_epi32(~0x78000000));
        return {_mm512_mul_ps(_mm512_castsi512_ps(fields), _mm512_set1_ps(0x1p120F))};
    }
};

}  // namespace
}  // namespace headwater::avx512
