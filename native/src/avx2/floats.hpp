// Eight FP32 lanes, as the shared algorithms in simd/ use them; avx512/floats.hpp has the comments.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace headwater::avx2 {
namespace {

struct Floats {
    static constexpr int kLanes = 8;
    static constexpr int kRows = 2;

    __m256 v;

    static Floats zero() { return {_mm256_setzero_ps()}; }
    static Floats set(float x) { return {_mm256_set1_ps(x)}; }
    static Floats load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static Floats load(const float* p, std::int64_t n) {
        return {_mm256_maskload_ps(p, first_lanes(n))};
    }
    static Floats load_bf16(const std::uint16_t* p) { return from_bf16(words(p)); }
    static Floats load_bf16(const std::uint16_t* p, std::int64_t n) {
        return from_bf16(words(p, n));
    }
    static Floats load_half(const std::uint16_t* p) { return from_half(words(p)); }
    static Floats load_half(const std::uint16_t* p, std::int64_t n) {
        return from_half(words(p, n));
    }
    static Floats load_fp8(const std::uint8_t* p) {
        return from_fp8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }
    static Floats load_fp8(const std::uint8_t* p, std::int64_t n) {
        alignas(8) std::uint8_t copy[8] = {};
        for (std::int64_t i = 0; i < n; ++i) {
            copy[i] = p[i];
        }
        return load_fp8(copy);
    }
    static Floats load_nibbles(const std::uint8_t* p) { return from_int8(nibbles(p, 4)); }
    static Floats load_nibbles(const std::uint8_t* p, std::int64_t n) {
        return from_int8(nibbles(p, (n + 1) / 2));
    }
    static Floats load_e2m1(const std::uint8_t* p) { return from_e2m1(nibbles(p, 4)); }
    static Floats load_e2m1(const std::uint8_t* p, std::int64_t n) {
        return from_e2m1(nibbles(p, (n + 1) / 2));
    }
    void store(float* p) const { _mm256_storeu_ps(p, v); }
    void store(float* p, std::int64_t n) const { _mm256_maskstore_ps(p, first_lanes(n), v); }

    Floats operator+(Floats o) const { return {_mm256_add_ps(v, o.v)}; }
    Floats operator-(Floats o) const { return {_mm256_sub_ps(v, o.v)}; }
    Floats operator*(Floats o) const { return {_mm256_mul_ps(v, o.v)}; }
    Floats plus_product(Floats a, Floats b) const { return {_mm256_fmadd_ps(a.v, b.v, v)}; }
    Floats max(Floats o) const { return {_mm256_max_ps(v, o.v)}; }
    Floats keep(std::int64_t begin, std::int64_t end, Floats other) const {
        const __m256i kept = _mm256_andnot_si256(first_lanes(begin), first_lanes(end));
        return {_mm256_blendv_ps(other.v, v, _mm256_castsi256_ps(kept))};
    }
    float sum() const {
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }
    float maximum() const {
        const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
    }

    // e^x for x <= 0, within 2 units in the last place; 0 below -87.
    Floats exp() const {
        const __m256 least = _mm256_set1_ps(-87.0F);
        const __m256 x = _mm256_max_ps(least, v);
        const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504F)),
                                         _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375F), x);
        r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4F), r);
        __m256 p = _mm256_set1_ps(1.0F / 720);
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0F / 120));
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0F / 24));
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0F / 6));
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5F));
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0F));
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0F));
        const __m256i power =
            _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
        p = _mm256_mul_ps(p, _mm256_castsi256_ps(power));
        const __m256 is_tiny = _mm256_cmp_ps(v, least, _CMP_LT_OQ);
        return {_mm256_andnot_ps(is_tiny, p)};
    }

    static Floats even_half(const std::uint32_t* pairs) {
        return from_upper_half(_mm256_slli_epi32(aligned(pairs), 16));
    }
    static Floats odd_half(const std::uint32_t* pairs) { return from_upper_half(aligned(pairs)); }

    static void transpose_pairs(const std::uint16_t* const* rows, std::int64_t first,
                                std::int64_t count, std::uint32_t* out, std::int64_t stride) {
        __m256i a[8];
        __m256i b[8];
        for (int r = 0; r < 8; ++r) {
            a[r] = row_of_pairs(rows[r], first, count);
        }
        for (int r = 0; r < 8; r += 2) {
            b[r] = _mm256_unpacklo_epi32(a[r], a[r + 1]);
            b[r + 1] = _mm256_unpackhi_epi32(a[r], a[r + 1]);
        }
        for (int r = 0; r < 8; r += 4) {
            a[r] = _mm256_unpacklo_epi64(b[r], b[r + 2]);
            a[r + 1] = _mm256_unpackhi_epi64(b[r], b[r + 2]);
            a[r + 2] = _mm256_unpacklo_epi64(b[r + 1], b[r + 3]);
            a[r + 3] = _mm256_unpackhi_epi64(b[r + 1], b[r + 3]);
        }
        const std::int64_t num_pairs = (count + 1) / 2;
        for (int j = 0; j < 4; ++j) {
            const __m256i halves[2] = {_mm256_permute2x128_si256(a[j], a[4 + j], 0x20),
                                       _mm256_permute2x128_si256(a[j], a[4 + j], 0x31)};
            for (int h = 0; h < 2; ++h) {
                if (4 * h + j < num_pairs) {
                    _mm256_store_si256(reinterpret_cast<__m256i*>(out + (4 * h + j) * stride),
                                       halves[h]);
                }
            }
        }
    }

  private:
    static __m128i words(const std::uint16_t* p) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    }
    static __m128i words(const std::uint16_t* p, std::int64_t n) {
        alignas(16) std::uint16_t copy[8] = {};
        for (std::int64_t i = 0; i < n; ++i) {
            copy[i] = p[i];
        }
        return words(copy);
    }
    static __m128i nibbles(const std::uint8_t* p, std::int64_t num_bytes) {
        std::uint32_t word = 0;
        __builtin_memcpy(&word, p, static_cast<std::size_t>(num_bytes));
        const __m128i bytes = _mm_cvtsi32_si128(static_cast<int>(word));
        const __m128i low_bits = _mm_set1_epi8(15);
        return _mm_unpacklo_epi8(_mm_and_si128(bytes, low_bits),
                                 _mm_and_si128(_mm_srli_epi16(bytes, 4), low_bits));
    }
    static Floats from_int8(__m128i values) {
        return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(values))};
    }
    static Floats from_e2m1(__m128i codes) {
        const __m128i doubled =
            _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
        return from_int8(_mm_shuffle_epi8(doubled, codes)) * set(0.5F);
    }
    static __m256i first_lanes(std::int64_t n) {
        const auto limit = static_cast<int>(n > 8 ? 8 : n < 0 ? 0 : n);
        const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        return _mm256_cmpgt_epi32(_mm256_set1_epi32(limit), lanes);
    }
    static __m256i aligned(const std::uint32_t* pairs) {
        return _mm256_load_si256(reinterpret_cast<const __m256i*>(pairs));
    }
    static __m256i row_of_pairs(const std::uint16_t* row, std::int64_t first, std::int64_t count) {
        if (row == nullptr) {
            return _mm256_setzero_si256();
        }
        if (count >= 16) {
            return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + first));
        }
        alignas(32) std::uint16_t copy[16] = {};
        for (std::int64_t i = 0; i < count; ++i) {
            copy[i] = row[first + i];
        }
        return _mm256_load_si256(reinterpret_cast<const __m256i*>(copy));
    }
    static Floats from_half(__m128i bits) { return {_mm256_cvtph_ps(bits)}; }
    static Floats from_upper_half(__m256i words) {
        const __m256i kept = _mm256_set1_epi32(static_cast<int>(0x8FFFE000U));
        return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_srai_epi32(words, 3), kept))};
    }
    static Floats from_bf16(__m128i bits) {
        return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
    }
    static Floats from_fp8(__m128i codes) {
        const __m256i bits = _mm256_slli_epi32(_mm256_cvtepi8_epi32(codes), 20);
        const __m256i fields = _mm256_and_si256(bits, _mm256_set1_epi32(~0x78000000));
        return {_mm256_mul_ps(_mm256_castsi256_ps(fields), _mm256_set1_ps(0x1p120F))};
    }
};

}  // namespace
}  // namespace headwater::avx2
