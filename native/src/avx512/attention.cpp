// Attention in AVX-512.
#include "simd/attention.hpp"

#include "avx512/floats.hpp"
#include "headwater/float_kernels.hpp"

namespace headwater::avx512 {

void attend(const AttentionTile& tile) { attend_tile<Floats>(tile); }

}  // namespace headwater::avx512
