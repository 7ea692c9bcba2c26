// The kernels that compute in FP32 throughout, for each instruction set; they are reached through
// the table in kernels.hpp, whose comments hold for them. AMX has nothing better than AVX-512 here.
#pragma once

#include "headwater/attention.hpp"
#include "headwater/float_product.hpp"

namespace headwater::scalar {
void attend(const AttentionTile& tile);
void multiply_floats(const FloatProduct& product);
void multiply_floats_transposed(const FloatProduct& product);
}  // namespace headwater::scalar

namespace headwater::avx2 {
void attend(const AttentionTile& tile);
void multiply_floats(const FloatProduct& product);
void multiply_floats_transposed(const FloatProduct& product);
}  // namespace headwater::avx2

namespace headwater::avx512 {
void attend(const AttentionTile& tile);
void multiply_floats(const FloatProduct& product);
void multiply_floats_transposed(const FloatProduct& product);
}  // namespace headwater::avx512
