// Products with FP32 activations in AVX2.
#include "simd/float_product.hpp"

#include "avx2/floats.hpp"
#include "headwater/float_kernels.hpp"

namespace headwater::avx2 {

void multiply_floats(const FloatProduct& product) { multiply_any<Floats>(product); }

void multiply_floats_transposed(const FloatProduct& product) {
    multiply_any_transposed<Floats>(product);
}

}  // namespace headwater::avx2
