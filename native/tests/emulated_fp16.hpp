// Arithmetic on FP16 vectors in software, for CPUs without: to be included before everything else.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace headwater::emulated {

constexpr int kHalves = 32;

inline float half_at(__m512i halves, int index) {
    std::uint16_t all[kHalves];
    std::memcpy(all, &halves, sizeof all);
    return _cvtsh_ss(all[index]);
}

// The nearest FP16 number, of two the even one, in one rounding.
inline std::uint16_t to_half(double value) {
    constexpr int kLeastExponent = -14;
    constexpr int kFraction = 10;
    if (value == 0 || !std::isfinite(value)) {
        return _cvtss_sh(static_cast<float>(value), _MM_FROUND_TO_NEAREST_INT);
    }
    const int exponent = std::max(std::ilogb(value), kLeastExponent);
    const double unit = std::ldexp(1.0, exponent - kFraction);
    return _cvtss_sh(static_cast<float>(std::nearbyint(value / unit) * unit),
                     _MM_FROUND_TO_NEAREST_INT);
}

inline __m512i fused_product(__m512i a, __m512i b, __m512i sum) {
    std::uint16_t results[kHalves];
    for (int i = 0; i < kHalves; ++i) {
        results[i] = to_half(double{half_at(a, i)} * half_at(b, i) + half_at(sum, i));
    }
    __m512i packed;
    std::memcpy(&packed, results, sizeof packed);
    return packed;
}

}  // namespace headwater::emulated

#define _mm512_castsi512_ph(vector) (vector)
#define _mm512_castph_si512(vector) (vector)
#define _mm512_fmadd_ph(a, b, sum) headwater::emulated::fused_product(a, b, sum)
