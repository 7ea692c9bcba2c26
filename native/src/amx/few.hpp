// Products with up to 16 tokens, at the speed of the memory: weights are expanded as they come, 16
// rows x 256 columns at a time, while the tiles work on the 256 columns before.
//
// The result is, bit for bit, what many.hpp gives: the same sums in the same order.
#pragma once

#include "expand.hpp"
#include "fetch.hpp"
#include "headwater/kernels.hpp"
#include "tiles.hpp"

namespace headwater::amx {
namespace {

constexpr std::int64_t kFewTokens = kTile;
// How far prefetches run ahead of the loads, in each of 16 rows. Shares of the speed of the memory
// on Sapphire Rapids, FP8 rows of 7,168 columns: 0.94 at 3, 4 or 6 blocks, 0.77 without; one linear
// stream 16 rows ahead 0.81, as a core has few requests of its own under way at once.
constexpr std::int64_t kAhead = 4;

// Working memory of one call; behind it lie the tiles of activations, where there are several.
struct FewMemory {
    // [pair, even or odd][block of two][step]: a tile of weights each.
    alignas(64) std::byte weights[2][2][kBlockSteps][kTileBytes];
    // [pair, even or odd][block of two][row][token]; of a single token [row].
    alignas(64) float products[2][2][kTile][kTile];
    // Likewise.
    alignas(64) float totals[kTile][kTile];
};

inline std::int64_t few_bytes(const Matrix& m) {
    return static_cast<std::int64_t>(sizeof(FewMemory)) +
           avx512::blocks_of(m.columns) * kBlockSteps * kTileBytes;
}

// The compiler wants numbers of tiles as literals. Tile 0 is the product of the first block of a
// pair, 1 of the second; 4 and 5 are their weights, 6 and 7 their activations.
template <int kSide>
void zero_product() {
    if constexpr (kSide == 0) {
        _tile_zero(0);
    } else {
        _tile_zero(1);
    }
}

template <int kSide>
void store_product(float* product, std::int64_t stride) {
    if constexpr (kSide == 0) {
        _tile_stored(0, product, stride);
    } else {
        _tile_stored(1, product, stride);
    }
}

template <int kSide>
void add_step(const std::byte* weights, const std::byte* tokens, std::int64_t stride) {
    if constexpr (kSide == 0) {
        _tile_loadd(4, weights, 64);
        _tile_loadd(6, tokens, stride);
        _tile_dpbf16ps(0, 4, 6);
    } else {
        _tile_loadd(5, weights, 64);
        _tile_loadd(7, tokens, stride);
        _tile_dpbf16ps(1, 5, 7);
    }
}

// How many rows a page holds, as a power of two; no more than make tiles of one FP8 scale.
inline std::int64_t rows_per_page(const Matrix& m) {
    constexpr std::int64_t kPage = 4096;
    constexpr std::int64_t kMost = kFp8Block / kTile;
    std::int64_t rows = 1;
    while (rows < kMost && 2 * rows * m.row_bytes <= kPage) {
        rows *= 2;
    }
    return rows;
}

// The 16 rows of a tile.
struct TileRows {
    std::int64_t first;
    std::int64_t step;
    std::int64_t operator[](std::int64_t i) const { return first + i * step; }
};

template <class F>
class FewProduct {
  public:
    explicit FewProduct(const Product& p)
        : p_(p),
          m_(*p.matrix),
          expand_(m_),
          memory_(*reinterpret_cast<FewMemory*>(p.scratch)),
          blocks_(avx512::blocks_of(m_.columns)),
          is_single_(p.num_tokens == 1),
          stride_(is_single_ ? 4 : 64),
          rows_per_page_(rows_per_page(m_)) {}

    void operator()() {
        TileConfig config;
        if (is_single_) {
            for (const int tile : {0, 1, 6, 7}) {
                config.row_bytes[tile] = 4;
            }
        }
        _tile_loadconfig(&config);
        arrange();
        const std::int64_t first = p_.row_begin / kTile * kTile;
        find_rows(first);
        for (std::int64_t part = 0; part < kParts; ++part) {
            expand_part({first, 0}, 0, part);
        }
        std::int64_t turn = 0;
        for (std::int64_t row = first; row < p_.row_end; row += kTile) {
            find_rows(row + kTile);
            std::memset(memory_.totals, 0, sizeof memory_.totals);
            for (std::int64_t block = 0; block < blocks_; block += 2, ++turn) {
                if (block + 1 < blocks_) {
                    multiply_pair<true>({row, block}, turn % 2);
                } else {
                    multiply_pair<false>({row, block}, turn % 2);
                }
            }
            add_products({row, (blocks_ - 1) / 2 * 2}, (turn + 1) % 2);
            write_outputs(row);
        }
        _tile_release();
    }

  private:
    // A pair of blocks of the 16 rows from `row` on.
    struct Pair {
        std::int64_t row;
        std::int64_t block;
    };

    // A single token is a tile of one column as it is.
    void arrange() {
        if (is_single_) {
            tokens_ = p_.tokens[0];
            return;
        }
        std::byte* tiles = p_.scratch + sizeof(FewMemory);
        tokens_ = tiles;
        for (std::int64_t b = 0; b < blocks_; ++b) {
            arrange_block<F>(m_, p_.tokens, p_.num_tokens, b, tiles + b * kBlockSteps * kTileBytes);
        }
    }

    // Where a page holds several rows, a tile takes one of each page and the next tile the next
    // ones, so that the core sees one stream in a page and reads ahead in it (rows of 2,048 bytes:
    // 0.96 of the speed of the memory, neighbouring rows 0.93).
    TileRows rows_of(std::int64_t first) const {
        const std::int64_t tile = first / kTile % rows_per_page_;
        const std::int64_t base = first - tile * kTile;
        const bool is_whole = base >= p_.row_begin && base + kTile * rows_per_page_ <= p_.row_end;
        return is_whole ? TileRows{base + tile, rows_per_page_} : TileRows{first, 1};
    }

    // Where the rows of a tile are. Beyond the ends stands the nearest one, whose products are
    // dropped; behind the last tile what the thread is likely to read next.
    void find_rows(std::int64_t first) {
        auto& pointers = rows_[first / kTile % 2];
        if (first >= p_.row_end && p_.next != nullptr) {
            for (std::int64_t i = 0; i < kTile; ++i) {
                pointers[i] = p_.next + i * rows_per_page_ * m_.row_bytes;
            }
            return;
        }
        const TileRows rows = rows_of(first);
        for (std::int64_t i = 0; i < kTile; ++i) {
            const std::int64_t row = rows[i] < p_.row_begin ? p_.row_begin : rows[i];
            pointers[i] = m_.data + min_of(row, p_.row_end - 1) * m_.row_bytes;
        }
    }

    // Expands an eighth of a pair: 4 rows of one block.
    void expand_part(const Pair& pair, std::int64_t parity, std::int64_t part) {
        const std::int64_t side = part / 4;
        const std::int64_t block = pair.block + side;
        if (block >= blocks_ || pair.row >= p_.row_end) {
            return;
        }
        const std::int64_t left = m_.columns - block * avx512::kBlock;
        const std::int64_t first = part % 4 * 4;
        std::byte* tile = memory_.weights[parity][side][0] + first * 64;
        if (left >= avx512::kBlock) {
            expand_rows(pair, block, first, F::kBlockBytes, tile);
        } else {
            expand_rows(pair, block, first, bytes_left<F>(left), tile);
        }
    }

    // Four rows, and fetches what comes kAhead blocks later, at the end of a row the start of the
    // one 16 rows on.
    [[gnu::always_inline]] void expand_rows(const Pair& pair, std::int64_t block,
                                            std::int64_t first, std::int64_t num_bytes,
                                            std::byte* tile) {
        const std::int64_t later = block + kAhead;
        const bool is_same_tile = later < blocks_;
        const std::int64_t there = is_same_tile ? later : min_of(later - blocks_, blocks_ - 1);
        const std::int64_t tile_of_two = pair.row / kTile % 2;
        const std::byte* const* rows = rows_[tile_of_two] + first;
        const std::byte* const* rows_ahead =
            rows_[is_same_tile ? tile_of_two : 1 - tile_of_two] + first;
        const std::int64_t at = block * F::kBlockBytes;
        const std::int64_t at_ahead = there * F::kBlockBytes;
        for (std::int64_t i = 0; i < 4; ++i) {
            for (std::int64_t line = 0; line < F::kBlockBytes; line += 64) {
                fetch_near(rows_ahead[i] + at_ahead + line);
            }
            expand_(rows[i] + at, num_bytes, tile + i * 64);
        }
    }

    // The next pair is expanded between the tile products, which takes as long as they do.
    template <bool kHasSecond>
    void multiply_pair(const Pair& pair, std::int64_t parity) {
        const Pair next =
            pair.block + 2 < blocks_ ? Pair{pair.row, pair.block + 2} : Pair{pair.row + kTile, 0};
        const auto& weights = memory_.weights[parity];
        const std::byte* tokens = tokens_ + pair.block * kBlockSteps * 16 * stride_;
        zero_product<0>();
        zero_product<1>();
        for (std::int64_t step = 0; step < kBlockSteps; ++step) {
            add_step<0>(weights[0][step], tokens + step * 16 * stride_, stride_);
            expand_part(next, 1 - parity, 2 * step);
            if constexpr (kHasSecond) {
                add_step<1>(weights[1][step], tokens + (kBlockSteps + step) * 16 * stride_,
                            stride_);
            }
            expand_part(next, 1 - parity, 2 * step + 1);
            if (step == 1 && pair.block > 0) {
                add_products({pair.row, pair.block - 2}, 1 - parity);
            }
        }
        store_product<0>(memory_.products[parity][0][0], stride_);
        store_product<1>(memory_.products[parity][1][0], stride_);
    }

    // totals += scale * product, for both blocks. All rows of a tile share a scale, as it starts at
    // a multiple of 16.
    void add_products(const Pair& pair, std::int64_t parity) {
        const std::int64_t row = min_of(pair.row, p_.row_end - 1) / kFp8Block;
        const auto* scales = reinterpret_cast<const float*>(m_.scales + row * m_.scale_row_bytes);
        const std::int64_t count = is_single_ ? kTile : kTile * kTile;
        for (std::int64_t side = 0; side < 2 && pair.block + side < blocks_; ++side) {
            const float* products = memory_.products[parity][side][0];
            float* totals = memory_.totals[0];
            for (std::int64_t i = 0; i < count; i += kTile) {
                const __m512 product = _mm512_load_ps(products + i);
                const __m512 total = _mm512_load_ps(totals + i);
                if constexpr (std::is_same_v<F, Bf16>) {
                    _mm512_store_ps(totals + i, _mm512_add_ps(total, product));
                } else {
                    const __m512 scale = _mm512_set1_ps(scales[pair.block + side]);
                    _mm512_store_ps(totals + i, _mm512_fmadd_ps(scale, product, total));
                }
            }
        }
    }

    void write_outputs(std::int64_t first) {
        const TileRows rows = rows_of(first);
        const float* totals = memory_.totals[0];
        for (std::int64_t t = 0; t < p_.num_tokens; ++t) {
            for (std::int64_t i = 0; i < kTile; ++i) {
                if (rows[i] >= p_.row_begin && rows[i] < p_.row_end) {
                    p_.outputs[t][rows[i] - p_.row_begin] =
                        kUnit<F> * totals[is_single_ ? i : i * kTile + t];
                }
            }
        }
    }

    static constexpr std::int64_t kParts = 8;

    const Product& p_;
    const Matrix& m_;
    const Expander<F> expand_;
    FewMemory& memory_;
    const std::int64_t blocks_;
    const bool is_single_;
    const std::int64_t stride_;
    const std::int64_t rows_per_page_;
    const std::byte* tokens_ = nullptr;
    // [tile of rows, even or odd][row].
    const std::byte* rows_[2][kTile] = {};
};

template <class F>
void multiply_few(const Product& p) {
    FewProduct<F> multiply(p);
    multiply();
}

}  // namespace
}  // namespace headwater::amx
