// The reference: one row after the other, one key after the other.
#include <algorithm>
#include <cmath>
#include <limits>

#include "headwater/float_kernels.hpp"
#include "headwater/half.hpp"

namespace headwater::scalar {

void attend(const AttentionTile& tile) {
    auto* scores = reinterpret_cast<float*>(tile.scratch);
    for (std::int64_t row = 0; row < tile.num_rows; ++row) {
        const std::int64_t begin = std::max(tile.key_begin, tile.visible_begin[row]);
        const std::int64_t end = std::min(tile.key_end, tile.visible_end[row]);
        float maximum = -std::numeric_limits<float>::infinity();
        for (std::int64_t key = begin; key < end; ++key) {
            const std::uint16_t* k = tile.cache->token(key) + tile.cache->key_offset;
            float score = 0.0F;
            for (std::int64_t i = 0; i < tile.key_dim; ++i) {
                score += tile.queries[row][i] * float_from_half(k[i]);
            }
            scores[key - begin] = score;
            maximum = std::max(maximum, score);
        }
        float sum = 0.0F;
        float* weighted = tile.weighted + row * tile.value_dim;
        std::fill_n(weighted, tile.value_dim, 0.0F);
        for (std::int64_t key = begin; key < end; ++key) {
            const float weight = std::exp(scores[key - begin] - maximum);
            const std::uint16_t* v = tile.cache->token(key) + tile.cache->value_offset;
            for (std::int64_t i = 0; i < tile.value_dim; ++i) {
                weighted[i] += weight * float_from_half(v[i]);
            }
            sum += weight;
        }
        tile.maxima[row] = maximum;
        tile.sums[row] = sum;
    }
}

}  // namespace headwater::scalar
