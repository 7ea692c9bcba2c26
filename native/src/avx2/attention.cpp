// Attention in AVX2.
#include "simd/attention.hpp"

#include "avx2/floats.hpp"
#include "headwater/float_kernels.hpp"

namespace headwater::avx2 {

void attend(const AttentionTile& tile) { attend_tile<Floats>(tile); }

}  // namespace headwater::avx2
