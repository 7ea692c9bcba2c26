// Products with FP32 activations in AVX-512.
#include "simd/float_product.hpp"

#include "avx512/floats.hpp"
#include "headwater/float_kernels.hpp"

namespace headwater::avx512 {

void multiply_floats(const FloatProduct& product) { multiply_any<Floats>(product); }

void multiply_floats_transposed(const FloatProduct& product) {
    multiply_any_transposed<Floats>(product);
}

}  // namespace headwater::avx512
