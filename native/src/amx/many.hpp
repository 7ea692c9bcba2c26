// Products with many tokens, blocked so that each piece stays in L2: expanded weights
// [kRows, kColumns], totals [kRows, kTokens], and activations [kColumns, 32 tokens].
#pragma once

#include <cstring>
#include <type_traits>

#include "expand.hpp"
#include "headwater/kernels.hpp"
#include "tiles.hpp"

namespace headwater::amx {
namespace {

constexpr std::int64_t kRows = 512;
constexpr std::int64_t kTokens = 256;
constexpr std::int64_t kColumns = 512;
constexpr std::int64_t kSteps = kColumns / kStep;

// Working memory of one call; every member is a multiple of a cache line.
struct ManyMemory {
    // [row tile][step]: a tile of weights each.
    alignas(64) std::byte weights[kRows / kTile][kSteps][kTileBytes];
    // [token tile of two][step]: a tile of activations each.
    alignas(64) std::byte tokens[2][kSteps][kTileBytes];
    // Sums of 32 columns of activations, [token tile of two][step][token].
    alignas(64) float sums[2][kSteps][kTile];
    // [token tile][row][token].
    alignas(64) float totals[kTokens / kTile][kRows][kTile];
    // What a product of tiles has come to, [row tile of two][token tile of two].
    alignas(64) float products[2][2][kTile][kTile];
    // [row][step]; the second is (8 - zero) * scale.
    alignas(64) float scales[kRows][kSteps];
    alignas(64) float offsets[kRows][kSteps];
};

// How many tile products are summed up before they are scaled.
inline std::int64_t steps_per_scale(const Matrix& m) {
    return m.format == Format::kBf16 ? kBf16Steps : m.group / kStep;
}

// Columns [block, block + num_blocks) x 128 of rows [first, first + num_rows), expanded to tiles.
template <class F>
void expand_weights(const Matrix& m, std::int64_t first, std::int64_t num_rows, std::int64_t block,
                    std::int64_t num_blocks, float* scratch, ManyMemory& memory) {
    const Expander<F> expand(m);
    for (std::int64_t i = 0; i < num_rows; ++i) {
        const typename F::Row row(m, first + i, scratch);
        for (std::int64_t b = 0; b < num_blocks; ++b) {
            const std::byte* data = row.data + (block + b) * F::kBlockBytes;
            const std::int64_t left = m.columns - (block + b) * avx512::kBlock;
            expand(data, bytes_left<F>(left),
                   memory.weights[i / kTile][b * kBlockSteps] + i % kTile * 64);
            for (std::int64_t j = 0; j < kBlockSteps; ++j) {
                const std::int64_t step = b * kBlockSteps + j;
                memory.scales[i][step] = F::scale(row, block + b, j);
                if constexpr (kHasZeros<F>) {
                    memory.offsets[i][step] = F::zero(row, block + b, j) * memory.scales[i][step];
                }
            }
        }
    }
}

// The same columns of up to 16 tokens, as the tile `half` of two.
template <class F>
void arrange_tokens(const Matrix& m, const std::byte* const* tokens, std::int64_t count,
                    std::int64_t block, std::int64_t num_blocks, std::int64_t half,
                    ManyMemory& memory) {
    for (std::int64_t b = 0; b < num_blocks; ++b) {
        arrange_block<F>(m, tokens, count, block + b, memory.tokens[half][b * kBlockSteps]);
        if constexpr (kHasZeros<F>) {
            for (std::int64_t i = 0; i < kBlockSteps * kTile; ++i) {
                const std::int64_t t = i % kTile;
                const std::int64_t j = i / kTile;
                const float* four =
                    t < count ? avx512::sums_of(m, tokens[t]) + 16 * (block + b) + 4 * j : nullptr;
                memory.sums[half][b * kBlockSteps + j][t] =
                    four == nullptr ? 0.0f : (four[0] + four[1]) + (four[2] + four[3]);
            }
        }
    }
}

// Tiles 0 to 3 are products [row tile][token tile], 4 and 5 weights, 6 and 7 tokens.
template <int kTokenTiles>
void zero_products() {
    _tile_zero(0);
    _tile_zero(2);
    if constexpr (kTokenTiles == 2) {
        _tile_zero(1);
        _tile_zero(3);
    }
}

template <int kTokenTiles>
void add_step(const ManyMemory& memory, std::int64_t row_tile, std::int64_t step) {
    _tile_loadd(4, memory.weights[row_tile][step], 64);
    _tile_loadd(5, memory.weights[row_tile + 1][step], 64);
    _tile_loadd(6, memory.tokens[0][step], 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (kTokenTiles == 2) {
        _tile_loadd(7, memory.tokens[1][step], 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
}

template <int kTokenTiles>
void store_products(ManyMemory& memory) {
    _tile_stored(0, memory.products[0][0], 64);
    _tile_stored(2, memory.products[1][0], 64);
    if constexpr (kTokenTiles == 2) {
        _tile_stored(1, memory.products[0][1], 64);
        _tile_stored(3, memory.products[1][1], 64);
    }
}

// Adds the products of 32 rows with one or two token tiles to the totals, over `num_steps`.
template <class F, int kTokenTiles>
void multiply_tiles(const Matrix& m, std::int64_t row_tile, std::int64_t token_tile,
                    std::int64_t num_steps, ManyMemory& memory) {
    const std::int64_t run = steps_per_scale(m);
    for (std::int64_t first = 0; first < num_steps; first += run) {
        zero_products<kTokenTiles>();
        for (std::int64_t step = first; step < min_of(first + run, num_steps); ++step) {
            add_step<kTokenTiles>(memory, row_tile, step);
        }
        store_products<kTokenTiles>(memory);
        for (int half = 0; half < kTokenTiles; ++half) {
            __m512 x_sums = _mm512_setzero_ps();
            if constexpr (kHasZeros<F>) {
                for (std::int64_t step = first; step < min_of(first + run, num_steps); ++step) {
                    x_sums = _mm512_add_ps(x_sums, _mm512_load_ps(memory.sums[half][step]));
                }
            }
            for (std::int64_t i = 0; i < 2 * kTile; ++i) {
                const std::int64_t row = row_tile * kTile + i;
                float* total = memory.totals[token_tile + half][row];
                const __m512 product = _mm512_load_ps(memory.products[i / kTile][half][i % kTile]);
                __m512 sum = _mm512_load_ps(total);
                if constexpr (std::is_same_v<F, Bf16>) {
                    sum = _mm512_add_ps(sum, product);
                } else {
                    sum = _mm512_fmadd_ps(_mm512_set1_ps(memory.scales[row][first]), product, sum);
                }
                if constexpr (kHasZeros<F>) {
                    sum = _mm512_fmadd_ps(_mm512_set1_ps(memory.offsets[row][first]), x_sums, sum);
                }
                _mm512_store_ps(total, sum);
            }
        }
    }
}

// Rows [row, row + num_rows) with `count` tokens, all in one set of totals.
template <class F>
void multiply_block(const Product& p, std::int64_t row, std::int64_t num_rows,
                    std::int64_t first_token, std::int64_t count, float* scratch,
                    ManyMemory& memory) {
    const Matrix& m = *p.matrix;
    const std::int64_t row_tiles = (tiles_of(num_rows) + 1) / 2 * 2;
    for (std::int64_t tile = 0; tile < tiles_of(count); ++tile) {
        std::memset(memory.totals[tile], 0,
                    static_cast<std::size_t>(row_tiles * kTile) * sizeof memory.totals[0][0]);
    }
    const std::int64_t all_blocks = avx512::blocks_of(m.columns);
    constexpr std::int64_t kBlocks = kColumns / avx512::kBlock;
    for (std::int64_t block = 0; block < all_blocks; block += kBlocks) {
        const std::int64_t num_blocks = min_of(kBlocks, all_blocks - block);
        const std::int64_t num_steps = num_blocks * kBlockSteps;
        expand_weights<F>(m, row, num_rows, block, num_blocks, scratch, memory);
        for (std::int64_t t = 0; t < count; t += 2 * kTile) {
            const std::int64_t left = count - t;
            const std::byte* const* tokens = p.tokens + first_token + t;
            arrange_tokens<F>(m, tokens, min_of(left, kTile), block, num_blocks, 0, memory);
            if (left > kTile) {
                arrange_tokens<F>(m, tokens + kTile, min_of(left - kTile, kTile), block, num_blocks,
                                  1, memory);
            }
            for (std::int64_t tile = 0; tile < row_tiles; tile += 2) {
                if (left > kTile) {
                    multiply_tiles<F, 2>(m, tile, t / kTile, num_steps, memory);
                } else {
                    multiply_tiles<F, 1>(m, tile, t / kTile, num_steps, memory);
                }
            }
        }
    }
    for (std::int64_t t = 0; t < count; ++t) {
        float* out = p.outputs[first_token + t] + (row - p.row_begin);
        for (std::int64_t i = 0; i < num_rows; ++i) {
            out[i] = kUnit<F> * memory.totals[t / kTile][i][t % kTile];
        }
    }
}

template <class F>
void multiply_many(const Product& p) {
    auto& memory = *reinterpret_cast<ManyMemory*>(p.scratch);
    auto* scratch = reinterpret_cast<float*>(p.scratch + sizeof(ManyMemory));
    const TileConfig config;
    _tile_loadconfig(&config);
    for (std::int64_t row = p.row_begin; row < p.row_end; row += kRows) {
        for (std::int64_t t = 0; t < p.num_tokens; t += kTokens) {
            multiply_block<F>(p, row, min_of(kRows, p.row_end - row), t,
                              min_of(kTokens, p.num_tokens - t), scratch, memory);
        }
    }
    _tile_release();
}

// Besides the memory there is room for what a format's Row writes the scales of a row to.
inline std::int64_t many_bytes(const Matrix& m) {
    return static_cast<std::int64_t>(sizeof(ManyMemory)) +
           4 * (8 * avx512::blocks_of(m.columns) + 32);
}

}  // namespace
}  // namespace headwater::amx
