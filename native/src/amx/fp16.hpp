// Arithmetic on 32 FP16 numbers. Unlike FP32's, it knows no mode that takes subnormals for zero.
#pragma once

#include <immintrin.h>

namespace headwater::amx {
namespace {

// a * b + sum, rounded once.
inline __m512i add_product(__m512i a, __m512i b, __m512i sum) {
    return _mm512_castph_si512(
        _mm512_fmadd_ph(_mm512_castsi512_ph(a), _mm512_castsi512_ph(b), _mm512_castsi512_ph(sum)));
}

// Both halves of the vector added to 16 FP32 numbers.
inline __m512 add_halves(__m512i halves, __m512 total) {
    const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    const __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
    return _mm512_add_ps(total, _mm512_add_ps(low, high));
}

inline __m256i halves_of(__m512 floats) {
    return _mm512_cvtps_ph(floats, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

}  // namespace
}  // namespace headwater::amx
