// Activations of the gated feed-forward network and weighted sums, on FP32 vectors of any length.
//
// The last, incomplete vector goes through the same operations as the others: an element's result
// does not depend on where it lies.
#pragma once

#include <immintrin.h>

#include "headwater/kernels.hpp"

namespace headwater::avx512 {
namespace {

inline __mmask16 lanes(std::int64_t left) {
    return static_cast<__mmask16>(left >= 16 ? 0xFFFF : (1u << left) - 1);
}

// e^x to about 2 units in the last place; 0 and infinity where FP32 ends.
inline __m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_min_ps(_mm512_set1_ps(100.0f), x), _mm512_set1_ps(-110.0f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0x08);
    // ln 2 in two parts, the first with trailing zeros so that n times it is exact.
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 sum = _mm512_set1_ps(1.0f / 5040);
    for (const float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
        sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(term));
    }
    return _mm512_scalef_ps(sum, n);
}

inline __m512 sigmoid(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(one,
                         _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

inline void activate_all(Activation activation, float limit, const float* gate, const float* up,
                         float* out, std::int64_t count) {
    const __m512 top = _mm512_set1_ps(limit);
    const __m512 bottom = _mm512_set1_ps(-limit);
    for (std::int64_t i = 0; i < count; i += 16) {
        const __mmask16 mask = lanes(count - i);
        __m512 g = _mm512_maskz_loadu_ps(mask, gate + i);
        __m512 u = _mm512_maskz_loadu_ps(mask, up + i);
        __m512 result;
        if (activation == Activation::kSilu) {
            result = _mm512_mul_ps(_mm512_mul_ps(g, sigmoid(g)), u);
        } else {
            // The operand that may be a NaN comes second: it is then what min and max return.
            g = _mm512_min_ps(top, g);
            u = _mm512_max_ps(bottom, _mm512_min_ps(top, u));
            const __m512 glu = _mm512_mul_ps(g, sigmoid(_mm512_mul_ps(g, _mm512_set1_ps(1.702f))));
            result = _mm512_mul_ps(_mm512_add_ps(u, _mm512_set1_ps(1.0f)), glu);
        }
        _mm512_mask_storeu_ps(out + i, mask, result);
    }
}

inline void sum_all(const float* const* terms, const float* factors, std::int64_t num_terms,
                    float* out, std::int64_t count) {
    for (std::int64_t i = 0; i < count; i += 16) {
        const __mmask16 mask = lanes(count - i);
        __m512 sum = _mm512_setzero_ps();
        for (std::int64_t j = 0; j < num_terms; ++j) {
            sum = _mm512_fmadd_ps(_mm512_set1_ps(factors[j]),
                                  _mm512_maskz_loadu_ps(mask, terms[j] + i), sum);
        }
        _mm512_mask_storeu_ps(out + i, mask, sum);
    }
}

}  // namespace
}  // namespace headwater::avx512
