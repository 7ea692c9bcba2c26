// The table for CPUs with AMX: as on AVX-512, but products with many tokens go through tiles.
//
// A tile product adds 16 rows x 32 columns of weights, expanded to BF16, times 32 columns x 16
// tokens. As on AVX-512 the columns of one scale are summed up on their own, scaled, and added to
// FP32 totals. Work is blocked so that each piece stays in L2: expanded weights [kRows, kColumns],
// totals [kRows, kTokens], and activations [kColumns, 32 tokens].
#include <cstring>
#include <type_traits>

#include "../avx512/formats.hpp"
#include "../avx512/functions.hpp"
#include "../avx512/prepare.hpp"
#include "headwater/float_kernels.hpp"

namespace headwater::amx {
namespace {

using avx512::Bf16;
using avx512::Fp8;
using avx512::Nibbles;

constexpr std::int64_t kTile = 16;
// Columns of weights in a tile.
constexpr std::int64_t kStep = 32;
constexpr std::int64_t kTileBytes = 1024;
constexpr std::int64_t kRows = 512;
constexpr std::int64_t kTokens = 256;
constexpr std::int64_t kColumns = 512;
constexpr std::int64_t kSteps = kColumns / kStep;
constexpr std::int64_t kBlockSteps = avx512::kBlock / kStep;

// Working memory of one call; every member is a multiple of a cache line.
struct Memory {
    // [row tile][step]: a tile of weights each.
    alignas(64) std::byte weights[kRows / kTile][kSteps][kTileBytes];
    // [token tile of two][step]: a tile of activations each, two columns side by side per token.
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

std::int64_t min_of(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

std::int64_t tiles_of(std::int64_t count) { return (count + kTile - 1) / kTile; }

template <class F>
constexpr bool kHasNibbles = std::is_same_v<F, Nibbles<false>> || std::is_same_v<F, Nibbles<true>>;
template <class F>
constexpr bool kHasZeros = std::is_same_v<F, Nibbles<true>>;

// Four vectors of a block, so that vector i holds columns 32 i to 32 i + 31 in some order. Only
// nibbles need it: there each quarter of all vectors belongs to 32 columns.
template <class F>
void gather_steps(__m512i* w) {
    if constexpr (kHasNibbles<F>) {
        const __m512i a = _mm512_shuffle_i64x2(w[0], w[1], 0x88);
        const __m512i b = _mm512_shuffle_i64x2(w[0], w[1], 0xDD);
        const __m512i c = _mm512_shuffle_i64x2(w[2], w[3], 0x88);
        const __m512i d = _mm512_shuffle_i64x2(w[2], w[3], 0xDD);
        w[0] = _mm512_shuffle_i64x2(a, c, 0x88);
        w[1] = _mm512_shuffle_i64x2(b, d, 0x88);
        w[2] = _mm512_shuffle_i64x2(a, c, 0xDD);
        w[3] = _mm512_shuffle_i64x2(b, d, 0xDD);
    }
}

// How many tile products are summed up before they are scaled; 0 where there is no scale.
template <class F>
std::int64_t steps_per_scale(const Matrix& m) {
    return m.format == Format::kBf16 ? 0 : m.group / kStep;
}

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

// Columns [block, block + num_blocks) x 128 of rows [first, first + num_rows), expanded to tiles.
template <class F>
void expand_weights(const Matrix& m, std::int64_t first, std::int64_t num_rows, std::int64_t block,
                    std::int64_t num_blocks, float* scratch, Memory& memory) {
    const typename F::Tables tables(m);
    for (std::int64_t i = 0; i < num_rows; ++i) {
        const typename F::Row row(m, first + i, scratch);
        for (std::int64_t b = 0; b < num_blocks; ++b) {
            const std::byte* data = row.data + (block + b) * F::kBlockBytes;
            const std::int64_t left = m.columns - (block + b) * avx512::kBlock;
            alignas(64) std::byte padded[F::kBlockBytes];
            if (left < avx512::kBlock) {
                std::memset(padded, 0, sizeof padded);
                std::memcpy(padded, data,
                            static_cast<std::size_t>((left * F::kBlockBytes + avx512::kBlock - 1) /
                                                     avx512::kBlock));
                data = padded;
            }
            __m512i w[4];
            F::load(tables, data, w);
            gather_steps<F>(w);
            for (std::int64_t j = 0; j < kBlockSteps; ++j) {
                const std::int64_t step = b * kBlockSteps + j;
                _mm512_store_si512(memory.weights[i / kTile][step] + i % kTile * 64, w[j]);
                if constexpr (std::is_same_v<F, Fp8>) {
                    memory.scales[i][step] = row.scales[block + b];
                } else if constexpr (!std::is_same_v<F, Bf16>) {
                    const std::int64_t at = (block + b) * kBlockSteps + j;
                    memory.scales[i][step] = row.scales[at];
                    if constexpr (kHasZeros<F>) {
                        memory.offsets[i][step] = row.zeros[at] * row.scales[at];
                    }
                }
            }
        }
    }
}

// The same columns of up to 16 tokens, two columns of each token side by side; absent tokens are 0.
template <class F>
void arrange_tokens(const Matrix& m, const std::byte* const* tokens, std::int64_t count,
                    std::int64_t block, std::int64_t num_blocks, std::int64_t half,
                    Memory& memory) {
    for (std::int64_t b = 0; b < num_blocks; ++b) {
        __m512i steps[kBlockSteps][kTile];
        for (std::int64_t t = 0; t < kTile; ++t) {
            __m512i w[kBlockSteps] = {_mm512_setzero_si512(), _mm512_setzero_si512(),
                                      _mm512_setzero_si512(), _mm512_setzero_si512()};
            if (t < count) {
                Bf16::load(Bf16::Tables(m), tokens[t] + (block + b) * Bf16::kBlockBytes, w);
                gather_steps<F>(w);
            }
            for (std::int64_t j = 0; j < kBlockSteps; ++j) {
                steps[j][t] = w[j];
            }
            if constexpr (kHasZeros<F>) {
                for (std::int64_t j = 0; j < kBlockSteps; ++j) {
                    const float* four =
                        t < count ? avx512::sums_of(m, tokens[t]) + 16 * (block + b) + 4 * j
                                  : nullptr;
                    memory.sums[half][b * kBlockSteps + j][t] =
                        four == nullptr ? 0.0f : (four[0] + four[1]) + (four[2] + four[3]);
                }
            }
        }
        for (std::int64_t j = 0; j < kBlockSteps; ++j) {
            transpose(steps[j]);
            for (std::int64_t pair = 0; pair < kTile; ++pair) {
                _mm512_store_si512(memory.tokens[half][b * kBlockSteps + j] + pair * 64,
                                   steps[j][pair]);
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
void add_step(const Memory& memory, std::int64_t row_tile, std::int64_t step) {
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
void store_products(Memory& memory) {
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
                    std::int64_t num_steps, Memory& memory) {
    const std::int64_t per_scale = steps_per_scale<F>(m);
    const std::int64_t run = per_scale == 0 ? num_steps : per_scale;
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
                    std::int64_t first_token, std::int64_t count, float* scratch, Memory& memory) {
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
            out[i] = memory.totals[t / kTile][i][t % kTile];
        }
    }
}

// Eight tiles of 16 rows of 64 bytes.
struct alignas(64) TileConfig {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Floats that a format's Row writes the scales and zeros of one row to.
std::int64_t row_floats(const Matrix& m) { return 8 * avx512::blocks_of(m.columns) + 32; }

template <class F>
void multiply_format(const Product& p) {
    auto& memory = *reinterpret_cast<Memory*>(p.scratch);
    auto* scratch = reinterpret_cast<float*>(p.scratch + sizeof(Memory));
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

std::int64_t scratch_bytes(const Matrix& m) {
    const std::int64_t many = static_cast<std::int64_t>(sizeof(Memory)) + 4 * row_floats(m);
    const std::int64_t few = avx512::scratch_bytes(m);
    return many > few ? many : few;
}

void multiply_many(const Product& p) {
    switch (p.matrix->format) {
        case Format::kBf16:
            return multiply_format<Bf16>(p);
        case Format::kFp8:
            return multiply_format<Fp8>(p);
        default:
            return p.matrix->zeros == nullptr ? multiply_format<Nibbles<false>>(p)
                                              : multiply_format<Nibbles<true>>(p);
    }
}

}  // namespace

const Kernels kKernels = {
    .isa = Isa::kAmx,
    .prepared_bytes = &avx512::prepared_bytes,
    .prepare = &avx512::prepare,
    .scratch_bytes = &scratch_bytes,
    .multiply = &avx512::multiply,
    .multiply_many = &multiply_many,
    .activate = &avx512::activate,
    .weighted_sum = &avx512::weighted_sum,
    .attend = &avx512::attend,
    .multiply_floats = &avx512::multiply_floats,
    .multiply_floats_transposed = &avx512::multiply_floats_transposed,
};

}  // namespace headwater::amx
