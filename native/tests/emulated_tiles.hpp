// AMX tiles in software, for CPUs without: to be included before everything else.
//
// Semantics after Intel's manual: TDPBF16PS adds the products of pairs, the first of a pair first,
// and takes subnormal inputs and results for zero (which only tiny weights could show).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace headwater::emulated {

constexpr int kRows = 16;
constexpr int kRowBytes = 64;

struct Config {
    std::uint8_t palette;
    std::uint8_t start_row;
    std::uint8_t reserved[14];
    std::uint16_t row_bytes[16];
    std::uint8_t rows[16];
};

inline thread_local Config config;
inline thread_local std::uint8_t tiles[8][kRows][kRowBytes];

inline void load_config(const void* from) { std::memcpy(&config, from, sizeof config); }

inline void zero(int tile) { std::memset(tiles[tile], 0, sizeof tiles[tile]); }

inline void load(int tile, const void* from, std::int64_t stride) {
    zero(tile);
    for (int row = 0; row < config.rows[tile]; ++row) {
        std::memcpy(tiles[tile][row], static_cast<const char*>(from) + row * stride,
                    config.row_bytes[tile]);
    }
}

inline void store(int tile, void* to, std::int64_t stride) {
    for (int row = 0; row < config.rows[tile]; ++row) {
        std::memcpy(static_cast<char*>(to) + row * stride, tiles[tile][row],
                    config.row_bytes[tile]);
    }
}

inline float bf16_at(const std::uint8_t* row, int index) {
    std::uint32_t bits = 0;
    std::memcpy(reinterpret_cast<char*>(&bits) + 2, row + 2 * index, 2);
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline void multiply(int sums, int a, int b) {
    for (int m = 0; m < config.rows[sums]; ++m) {
        for (int n = 0; n < config.row_bytes[sums] / 4; ++n) {
            float sum;
            std::memcpy(&sum, tiles[sums][m] + 4 * n, sizeof sum);
            for (int k = 0; k < config.row_bytes[a] / 4; ++k) {
                sum += bf16_at(tiles[a][m], 2 * k) * bf16_at(tiles[b][k], 2 * n);
                sum += bf16_at(tiles[a][m], 2 * k + 1) * bf16_at(tiles[b][k], 2 * n + 1);
            }
            std::memcpy(tiles[sums][m] + 4 * n, &sum, sizeof sum);
        }
    }
}

}  // namespace headwater::emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig headwater::emulated::load_config
#define _tile_release() static_cast<void>(0)
#define _tile_zero(tile) headwater::emulated::zero(tile)
#define _tile_loadd(tile, from, stride) headwater::emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) headwater::emulated::store(tile, to, stride)
#define _tile_dpbf16ps(sums, a, b) headwater::emulated::multiply(sums, a, b)
