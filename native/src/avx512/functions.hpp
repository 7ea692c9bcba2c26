// The AVX-512 kernels by name, for the tables that share them.
#pragma once

#include "headwater/kernels.hpp"

namespace headwater::avx512 {

std::int64_t prepared_bytes(const Matrix& matrix);
void prepare(const Matrix& matrix, const float* x, std::byte* out);
std::int64_t scratch_bytes(const Matrix& matrix);
void multiply(const Product& product);
void activate(Activation activation, float limit, const float* gate, const float* up, float* out,
              std::int64_t count);
void weighted_sum(const float* const* terms, const float* factors, std::int64_t num_terms,
                  float* out, std::int64_t count);

}  // namespace headwater::avx512
