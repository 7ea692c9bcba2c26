// Attention with vectors of any width: the algorithm of every instruction set but scalar.
//
// `Floats` is the including instruction set's vector; avx512/floats.hpp says what it offers. All is
// in an unnamed namespace, so that each translation unit has its own, compiled for its own
// instructions; for the same reason nothing of the standard library is called.
//
// Scores: a group of keys is transposed to one key per lane, so that a row's scores are sums over
// the elements of a key, and never across lanes. Values: one element of a value per lane, summed
// over the keys. Either way each result is one chain of additions, in an order that does not
// depend on the other rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "fetch.hpp"
#include "headwater/attention.hpp"
#include "simd/pieces.hpp"

namespace headwater {
namespace {

// Sums are kept in up to Floats::kRows x kVectors registers.
constexpr int kVectors = 4;
// Of pairs of FP16, Floats::even_half and odd_half make 2^-112 times their value: bits that only
// have to be moved to where FP32 has them. No key is so small that this loses anything, and no
// query (which has been scaled) so large, 2^16, that its product with the unit is infinite.
constexpr float kHalfUnit = 0x1p112F;

template <typename Floats>
constexpr std::int64_t kGroupKeys = kVectors * Floats::kLanes;

// Asks for the keys or values of some tokens, a line at a time, to be in L2 when they are used.
// Pages are spread over memory and a head's part of a token is short, so that the hardware foresees
// little; asking for all at once would make the computation wait.
class Prefetch {
  public:
    Prefetch() = default;
    Prefetch(const std::uint16_t* const* tokens, std::int64_t num_tokens, std::int64_t offset,
             std::int64_t dim)
        : token_(tokens), end_(tokens + num_tokens), offset_(offset), dim_(dim) {}

    bool is_done() const { return token_ == end_; }
    void next_line() {
        constexpr std::int64_t kLine = 64 / sizeof(std::uint16_t);
        if (is_done()) {
            return;
        }
        if (*token_ != nullptr) {
            fetch_far(*token_ + offset_ + element_);
        }
        element_ += kLine;
        if (element_ >= dim_) {
            element_ = 0;
            ++token_;
        }
    }

  private:
    const std::uint16_t* const* token_ = nullptr;
    const std::uint16_t* const* end_ = nullptr;
    std::int64_t offset_ = 0;
    std::int64_t dim_ = 0;
    std::int64_t element_ = 0;
};

// scores[r * kSplitTokens + key] for the keys of a group, [pairs of elements][kGroupKeys].
template <typename Floats, int Rows>
void score_rows(const float* const* queries, std::int64_t key_dim, const std::uint32_t* group,
                float* scores, Prefetch& values) {
    Floats sums[Rows][kVectors];
#pragma GCC unroll 8
    for (auto& row : sums) {
#pragma GCC unroll 8
        for (auto& vector : row) {
            vector = Floats::zero();
        }
    }
    for (std::int64_t element = 0; element < key_dim; ++element) {
        values.next_line();
        values.next_line();
        Floats q[Rows];
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            q[r] = Floats::set(queries[r][element] * kHalfUnit);
        }
        const std::uint32_t* pairs = group + element / 2 * kGroupKeys<Floats>;
#pragma GCC unroll 8
        for (int j = 0; j < kVectors; ++j) {
            const Floats keys = element % 2 == 0 ? Floats::even_half(pairs + j * Floats::kLanes)
                                                 : Floats::odd_half(pairs + j * Floats::kLanes);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                sums[r][j] = sums[r][j].plus_product(q[r], keys);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
        for (int j = 0; j < kVectors; ++j) {
            sums[r][j].store(scores + r * kSplitTokens + j * Floats::kLanes);
        }
    }
}

// Turns a row's scores of keys [begin, end) into weights and the others, up to num_keys, into
// zeros. `num_keys` is a multiple of the lanes.
template <typename Floats>
void softmax_row(float* scores, std::int64_t num_keys, std::int64_t begin, std::int64_t end,
                 float* maximum, float* sum) {
    const Floats nothing = Floats::set(-std::numeric_limits<float>::infinity());
    Floats maxima = nothing;
    for (std::int64_t i = 0; i < num_keys; i += Floats::kLanes) {
        maxima = maxima.max(Floats::load(scores + i).keep(begin - i, end - i, nothing));
    }
    *maximum = maxima.maximum();
    const Floats greatest = Floats::set(*maximum);
    Floats sums = Floats::zero();
    for (std::int64_t i = 0; i < num_keys; i += Floats::kLanes) {
        const Floats weights = (Floats::load(scores + i) - greatest).exp();
        const Floats kept = weights.keep(begin - i, end - i, Floats::zero());
        kept.store(scores + i);
        sums = sums + kept;
    }
    *sum = sums.sum();
}

// weighted[r * stride, `width` columns] = sum over keys of weights[r * kSplitTokens + key] * value.
template <typename Floats, int Rows, int Vectors>
void weigh_rows(const float* weights, const std::uint16_t* const* values, std::int64_t offset,
                std::int64_t num_keys, std::int64_t width, float* weighted, std::int64_t stride) {
    Floats sums[Rows][Vectors];
#pragma GCC unroll 8
    for (auto& row : sums) {
#pragma GCC unroll 8
        for (auto& vector : row) {
            vector = Floats::zero();
        }
    }
    constexpr int kLast = (Vectors - 1) * Floats::kLanes;
    const std::int64_t tail = width - kLast;
    for (std::int64_t key = 0; key < num_keys; ++key) {
        const std::uint16_t* value = values[key] + offset;
        Floats v[Vectors];
#pragma GCC unroll 8
        for (int j = 0; j + 1 < Vectors; ++j) {
            v[j] = Floats::load_half(value + j * Floats::kLanes);
        }
        v[Vectors - 1] = tail == Floats::kLanes ? Floats::load_half(value + kLast)
                                                : Floats::load_half(value + kLast, tail);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            const Floats weight = Floats::set(weights[r * kSplitTokens + key]);
#pragma GCC unroll 8
            for (int j = 0; j < Vectors; ++j) {
                sums[r][j] = sums[r][j].plus_product(weight, v[j]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
        for (int j = 0; j + 1 < Vectors; ++j) {
            sums[r][j].store(weighted + r * stride + j * Floats::kLanes);
        }
        sums[r][Vectors - 1].store(weighted + r * stride + kLast, tail);
    }
}

// Lays out the keys of a group; null ones are taken for zeros.
template <typename Floats>
void transpose_group(const std::uint16_t* const* keys, std::int64_t key_dim, std::uint32_t* group,
                     Prefetch& next_keys) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
        for (std::int64_t element = 0; element < key_dim; element += 2 * Floats::kLanes) {
            for (int i = 0; i < Floats::kLanes; ++i) {
                next_keys.next_line();
            }
            Floats::transpose_pairs(
                keys + j * Floats::kLanes, element, smaller(key_dim - element, 2 * Floats::kLanes),
                group + element / 2 * kGroupKeys<Floats> + j * Floats::kLanes, kGroupKeys<Floats>);
        }
    }
}

template <typename Floats>
void attend_tile(const AttentionTile& tile) {
    static_assert(kSplitTokens % kGroupKeys<Floats> == 0);
    auto* group = reinterpret_cast<std::uint32_t*>(tile.scratch);
    auto* scores = reinterpret_cast<float*>(group + (tile.key_dim + 1) / 2 * kGroupKeys<Floats>);
    auto** tokens = reinterpret_cast<const std::uint16_t**>(scores + kMaxTileRows * kSplitTokens);

    // Positions count from here, so that lanes hold the same keys wherever the tile begins.
    const std::int64_t base = tile.key_begin / kGroupKeys<Floats> * kGroupKeys<Floats>;
    const std::int64_t num_groups =
        (tile.key_end - base + kGroupKeys<Floats> - 1) / kGroupKeys<Floats>;
    const std::int64_t num_keys = num_groups * kGroupKeys<Floats>;
    for (std::int64_t key = 0; key < num_keys; ++key) {
        const std::int64_t position = base + key;
        tokens[key] = position < tile.key_begin || position >= tile.key_end
                          ? nullptr
                          : tile.cache->token(position) + tile.cache->key_offset;
    }
    const std::int64_t offset = tile.cache->value_offset - tile.cache->key_offset;
    Prefetch first_keys(tokens, kGroupKeys<Floats>, 0, tile.key_dim);
    while (!first_keys.is_done()) {
        first_keys.next_line();
    }
    for (std::int64_t key = 0; key < num_keys; key += kGroupKeys<Floats>) {
        Prefetch next_keys;
        if (key + kGroupKeys<Floats> < num_keys) {
            next_keys = {tokens + key + kGroupKeys<Floats>, kGroupKeys<Floats>, 0, tile.key_dim};
        }
        Prefetch values;
        if (offset != 0) {
            values = {tokens + key, kGroupKeys<Floats>, offset, tile.value_dim};
        }
        transpose_group<Floats>(tokens + key, tile.key_dim, group, next_keys);
        for_pieces(tile.num_rows, Floats::kRows, [&](std::int64_t row, std::int64_t count) {
            with_constant<Floats::kRows>(count, [&]<int Rows>() {
                score_rows<Floats, Rows>(tile.queries + row, tile.key_dim, group,
                                         scores + row * kSplitTokens + key, values);
            });
        });
    }
    for (std::int64_t row = 0; row < tile.num_rows; ++row) {
        const std::int64_t begin = larger(tile.visible_begin[row], tile.key_begin);
        const std::int64_t end = smaller(tile.visible_end[row], tile.key_end);
        softmax_row<Floats>(scores + row * kSplitTokens, num_keys, begin - base, end - base,
                            &tile.maxima[row], &tile.sums[row]);
    }
    const std::int64_t first = tile.key_begin - base;
    for (std::int64_t column = 0; column < tile.value_dim; column += kGroupKeys<Floats>) {
        const std::int64_t width = smaller(tile.value_dim - column, kGroupKeys<Floats>);
        for_pieces(tile.num_rows, Floats::kRows, [&](std::int64_t row, std::int64_t count) {
            with_constant<Floats::kRows>(count, [&]<int Rows>() {
                with_constant<kVectors>(
                    (width + Floats::kLanes - 1) / Floats::kLanes, [&]<int Vectors>() {
                        weigh_rows<Floats, Rows, Vectors>(
                            scores + row * kSplitTokens + first, tokens + first, offset + column,
                            tile.key_end - tile.key_begin, width,
                            tile.weighted + row * tile.value_dim + column, tile.value_dim);
                    });
            });
        });
    }
}

}  // namespace
}  // namespace headwater
