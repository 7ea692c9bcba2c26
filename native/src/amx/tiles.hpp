// Tiles: 16 rows x 32 columns of weights as BF16, and 32 columns x 16 tokens, two columns of each
// token side by side.
#pragma once

#include <immintrin.h>

#include "expand.hpp"

namespace headwater::amx {
namespace {

constexpr std::int64_t kTile = 16;
// Columns of weights in a tile.
constexpr std::int64_t kStep = 32;
constexpr std::int64_t kBlockSteps = avx512::kBlock / kStep;
// Tile products of BF16 that are summed up before they join the total.
constexpr std::int64_t kBf16Steps = 4;

inline std::int64_t min_of(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

inline std::int64_t tiles_of(std::int64_t count) { return (count + kTile - 1) / kTile; }

// Eight tiles of 16 rows of 64 bytes.
struct alignas(64) TileConfig {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// 16 rows of 16 dwords, transposed in place.
void transpose(__m512i* r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    // r[4 q + c] holds in lane l the dwords of rows 4 q to 4 q + 3, column 4 l + c.
    for (int c = 0; c < 4; ++c) {
        const __m512i low = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
        const __m512i low_odd = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xDD);
        const __m512i high = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
        const __m512i high_odd = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xDD);
        t[c] = _mm512_shuffle_i32x4(low, high, 0x88);
        t[8 + c] = _mm512_shuffle_i32x4(low, high, 0xDD);
        t[4 + c] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
        t[12 + c] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xDD);
    }
    for (int i = 0; i < 16; ++i) {
        r[i] = t[i];
    }
}

// The four steps of a block of columns of up to 16 tokens, each to a tile at out + step *
// kTileBytes; absent tokens are 0.
template <class F>
void arrange_block(const Matrix& m, const std::byte* const* tokens, std::int64_t count,
                   std::int64_t block, std::byte* out) {
    __m512i steps[kBlockSteps][kTile];
    for (std::int64_t t = 0; t < kTile; ++t) {
        __m512i w[kBlockSteps] = {_mm512_setzero_si512(), _mm512_setzero_si512(),
                                  _mm512_setzero_si512(), _mm512_setzero_si512()};
        if (t < count) {
            avx512::Bf16::load(avx512::Bf16::Tables(m),
                               tokens[t] + block * avx512::Bf16::kBlockBytes,
                               avx512::Bf16::kBlockBytes, w);
            gather_steps<F>(w);
        }
        for (std::int64_t j = 0; j < kBlockSteps; ++j) {
            steps[j][t] = w[j];
        }
    }
    for (std::int64_t j = 0; j < kBlockSteps; ++j) {
        transpose(steps[j]);
        for (std::int64_t pair = 0; pair < kTile; ++pair) {
            _mm512_store_si512(out + j * kTileBytes + pair * 64, steps[j][pair]);
        }
    }
}

}  // namespace
}  // namespace headwater::amx
