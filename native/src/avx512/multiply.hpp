// The product of a few rows with a few tokens, and how a whole Product is cut into such tiles.
//
// Per row and token, whatever the tile: each block of 128 columns is summed up on its own in one
// vector, scaled, and added to a running vector, whose 16 lanes are added up last. So the result
// does not depend on the tile. DRAM is read as one linear stream: prefetches run ahead_bytes()
// ahead of the loads, which then find their lines in L2 in whatever order rows are combined.
#pragma once

#include <cstring>
#include <type_traits>
#include <utility>

#include "headwater/kernels.hpp"
#include "prepare.hpp"

namespace headwater::avx512 {
namespace {

// Measured on Zen 4: with one token 8 to 64 KiB are alike, with more it takes 24 KiB and up.
inline std::int64_t ahead_bytes(std::int64_t num_tokens) {
    return num_tokens == 1 ? 12 << 10 : 32 << 10;
}

constexpr int kMaxTokens = 8;

// Weights that have been expanded before: 256 bytes per block, scales as in the format.
template <class F>
struct Expanded {
    using Tables = Bf16::Tables;
    using Row = typename F::Row;
    static constexpr std::int64_t kBlockBytes = 256;
    static inline void load(const Tables& t, const std::byte* p, __m512i* w) {
        Bf16::load(t, p, w);
    }
    static inline __m512 start(const Row& row, std::int64_t block, const float* sums) {
        return F::start(row, block, sums);
    }
    static inline __m512 add(const Row& row, std::int64_t block, __m512 sum, __m512 total) {
        return F::add(row, block, sum, total);
    }
};

// The last, incomplete block of a row, filled up with zero bytes: they meet zero activations.
template <class F>
inline void copy_tail(const Matrix& m, const std::byte* data, std::byte* padded) {
    const std::int64_t left = m.columns % kBlock;
    std::memset(padded, 0, static_cast<std::size_t>(F::kBlockBytes));
    std::memcpy(padded, data,
                static_cast<std::size_t>((left * F::kBlockBytes + kBlock - 1) / kBlock));
}

template <class F>
inline constexpr bool kIsExpanded = false;
template <class F>
inline constexpr bool kIsExpanded<Expanded<F>> = true;

// BF16 needs so few instructions per byte that with one token prefetching would slow it down.
template <class F, int kTokens>
inline constexpr bool wants_prefetch =
    !kIsExpanded<F> && !(std::is_same_v<F, Bf16> && kTokens == 1);

// Rows of nibbles are short: two at a time halve what a row costs besides its weights.
template <class F>
inline constexpr int kRowsOfOneToken = F::kBlockBytes == 64 ? 2 : 1;

template <class F, int kRows, int kTokens, bool kPrefetch>
inline void multiply_block(const typename F::Tables& tables, const typename F::Row* rows,
                           const std::byte* const* data, std::int64_t block,
                           const std::byte* const* tokens, const float* const* sums,
                           const std::byte* ahead, __m512 (*totals)[kTokens]) {
    __m512i w[kRows][4];
    if constexpr (kPrefetch) {
#pragma GCC unroll 16
        for (std::int64_t at = 0; at < kRows * F::kBlockBytes; at += 64) {
            _mm_prefetch(reinterpret_cast<const char*>(ahead + at), _MM_HINT_T1);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
        F::load(tables, data[r], w[r]);
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
        const std::byte* x = tokens[t] + block * (2 * kBlock);
        __m512 sum[kRows];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            sum[r] = F::start(rows[r], block, sums[t]);
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            __m512i activations = _mm512_load_si512(x + 64 * j);
            if constexpr (kRows > 1) {
                keep_in_register(activations);
            }
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                sum[r] = _mm512_dpbf16_ps(sum[r], as_bf16(w[r][j]), as_bf16(activations));
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            totals[r][t] = F::add(rows[r], block, sum[r], totals[r][t]);
        }
    }
}

// What to prefetch while the row at `data` is read: the stream of rows goes on with p.next; where
// that is unknown, or rows are parts of longer ones, there is nothing to be gained.
inline const std::byte* ahead_of(const Product& p, const std::byte* data,
                                 std::int64_t packed_bytes) {
    const Matrix& m = *p.matrix;
    if (m.row_bytes != packed_bytes) {
        return data;
    }
    const std::int64_t left = m.data + p.row_end * m.row_bytes - data;
    const std::int64_t ahead = ahead_bytes(p.num_tokens);
    if (ahead < left) {
        return data + ahead;
    }
    return p.next == nullptr ? data : p.next + (ahead - left);
}

template <class F>
inline std::int64_t packed_bytes_of(const Matrix& m) {
    return (m.columns * F::kBlockBytes + kBlock - 1) / kBlock;
}

// outputs[t][at + r] = row r times token t, for kRows rows and kTokens tokens.
template <class F, int kRows, int kTokens>
inline void multiply_tile(const typename F::Tables& tables, const Matrix& m,
                          const typename F::Row* rows, const std::byte* const* row_data,
                          const std::byte* ahead, const std::byte* const* tokens,
                          const float* const* sums, float* const* outputs, std::int64_t at) {
    const std::int64_t full = kIsExpanded<F> ? blocks_of(m.columns) : m.columns / kBlock;
    const std::byte* data[kRows];
    __m512 totals[kRows][kTokens];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
        data[r] = row_data[r];
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) {
            totals[r][t] = _mm512_setzero_ps();
        }
    }
    for (std::int64_t block = 0; block < full; ++block) {
        multiply_block<F, kRows, kTokens, wants_prefetch<F, kTokens>>(tables, rows, data, block,
                                                                      tokens, sums, ahead, totals);
        ahead += kRows * F::kBlockBytes;
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            data[r] += F::kBlockBytes;
        }
    }
    if (!kIsExpanded<F> && full * kBlock < m.columns) {
        alignas(64) std::byte padded[kRows][F::kBlockBytes];
        for (int r = 0; r < kRows; ++r) {
            copy_tail<F>(m, data[r], padded[r]);
            data[r] = padded[r];
        }
        multiply_block<F, kRows, kTokens, false>(tables, rows, data, full, tokens, sums, nullptr,
                                                 totals);
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            outputs[t][at + r] = _mm512_reduce_add_ps(totals[r][t]);
        }
    }
}

// Floats of scratch for one row's scales.
template <class F>
inline std::int64_t row_scratch(const Matrix& m) {
    return F::kRowScratch * ((blocks_of(m.columns) + 3) / 4);
}

constexpr int kMaxRows = 4;

// Rows [begin, end), a multiple of kRows, times kTokens tokens.
template <class F, int kRows, int kTokens>
void multiply_rows(const Product& p, std::int64_t begin, std::int64_t end) {
    const Matrix& m = *p.matrix;
    const typename F::Tables tables(m);
    const std::int64_t packed_bytes = packed_bytes_of<F>(m);
    auto* scratch = reinterpret_cast<float*>(p.scratch);
    const std::byte* tokens[kTokens];
    const float* sums[kTokens];
    for (int t = 0; t < kTokens; ++t) {
        tokens[t] = p.tokens[t];
        sums[t] = sums_of(m, tokens[t]);
    }
    for (std::int64_t row = begin; row < end; row += kRows) {
        typename F::Row rows[kRows];
        const std::byte* data[kRows];
        for (int r = 0; r < kRows; ++r) {
            rows[r] = typename F::Row(m, row + r, scratch + r * row_scratch<F>(m));
            data[r] = rows[r].data;
        }
        multiply_tile<F, kRows, kTokens>(tables, m, rows, data, ahead_of(p, data[0], packed_bytes),
                                         tokens, sums, p.outputs, row - p.row_begin);
    }
}

template <class F>
using RowsFunction = void (*)(const Product&, std::int64_t, std::int64_t);

template <class F, int kRows, int... kTokens>
constexpr RowsFunction<F> rows_function(std::int64_t num_tokens,
                                        std::integer_sequence<int, kTokens...>) {
    constexpr RowsFunction<F> functions[] = {&multiply_rows<F, kRows, kTokens + 1>...};
    return functions[num_tokens - 1];
}

// Up to kMaxTokens tokens. How many rows share the loads of activations: one row at a time is the
// best reader of DRAM on Zen 4 for one token, while more activations do not fit L1.
template <class F>
void multiply_few(const Product& p) {
    static const bool kPrefersRows = wants_software_prefetch();
    const std::int64_t n = p.num_tokens;
    const int step = n == 1 ? (kPrefersRows ? 4 : kRowsOfOneToken<F>) : n == 2 ? 4 : 2;
    const std::int64_t even = p.row_begin + (p.row_end - p.row_begin) / step * step;
    constexpr std::make_integer_sequence<int, kMaxTokens> kAll;
    const auto run = step == 4   ? rows_function<F, 4>(n, std::make_integer_sequence<int, 2>())
                     : step == 2 ? rows_function<F, 2>(n, kAll)
                                 : rows_function<F, 1>(n, kAll);
    run(p, p.row_begin, even);
    rows_function<F, 1>(n, kAll)(p, even, p.row_end);
}

// Expands one row to BF16, padded to whole blocks.
template <class F>
void expand_row(const Matrix& m, const std::byte* data, const std::byte* ahead, std::byte* out) {
    const typename F::Tables tables(m);
    const std::int64_t full = m.columns / kBlock;
    __m512i w[4];
    const auto store = [&] {
        for (int j = 0; j < 4; ++j) {
            _mm512_store_si512(out + 64 * j, w[j]);
        }
        out += 2 * kBlock;
    };
    for (std::int64_t block = 0; block < full; ++block) {
        for (std::int64_t at = 0; at < F::kBlockBytes; at += 64) {
            _mm_prefetch(reinterpret_cast<const char*>(ahead + at), _MM_HINT_T1);
        }
        ahead += F::kBlockBytes;
        F::load(tables, data, w);
        store();
        data += F::kBlockBytes;
    }
    if (full * kBlock < m.columns) {
        alignas(64) std::byte padded[F::kBlockBytes];
        copy_tail<F>(m, data, padded);
        F::load(tables, padded, w);
        store();
    }
}

template <class F, int kRows, int kTokens>
void multiply_expanded(const Product& p, std::int64_t first_token, const typename F::Row* rows,
                       const std::byte* const* data, std::int64_t row) {
    const Matrix& m = *p.matrix;
    const float* sums[kTokens];
    for (int t = 0; t < kTokens; ++t) {
        sums[t] = sums_of(m, p.tokens[first_token + t]);
    }
    multiply_tile<Expanded<F>, kRows, kTokens>(typename Expanded<F>::Tables(m), m, rows, data,
                                               nullptr, p.tokens + first_token, sums,
                                               p.outputs + first_token, row - p.row_begin);
}

template <class F>
using ExpandedFunction = void (*)(const Product&, std::int64_t, const typename F::Row*,
                                  const std::byte* const*, std::int64_t);

template <class F, int kRows, int... kTokens>
constexpr ExpandedFunction<F> expanded_function(std::int64_t num_tokens,
                                                std::integer_sequence<int, kTokens...>) {
    constexpr ExpandedFunction<F> functions[] = {&multiply_expanded<F, kRows, kTokens + 1>...};
    return functions[num_tokens - 1];
}

// More tokens than a tile has: rows are expanded once, two at a time, and stay in L1.
template <class F>
void multiply_several(const Product& p) {
    const Matrix& m = *p.matrix;
    const std::int64_t slab_bytes = blocks_of(m.columns) * (2 * kBlock);
    auto* scratch = reinterpret_cast<float*>(p.scratch + 2 * slab_bytes);
    constexpr std::make_integer_sequence<int, kMaxTokens> kAll;
    for (std::int64_t row = p.row_begin; row < p.row_end; row += 2) {
        const int num_rows = row + 1 < p.row_end ? 2 : 1;
        typename F::Row rows[2];
        const std::byte* data[2];
        for (int r = 0; r < num_rows; ++r) {
            rows[r] = typename F::Row(m, row + r, scratch + r * row_scratch<F>(m));
            std::byte* slab = p.scratch + r * slab_bytes;
            expand_row<F>(m, rows[r].data, ahead_of(p, rows[r].data, packed_bytes_of<F>(m)), slab);
            data[r] = slab;
        }
        for (std::int64_t t = 0; t < p.num_tokens; t += kMaxTokens) {
            const std::int64_t n = p.num_tokens - t < kMaxTokens ? p.num_tokens - t : kMaxTokens;
            const auto run =
                num_rows == 2 ? expanded_function<F, 2>(n, kAll) : expanded_function<F, 1>(n, kAll);
            run(p, t, rows, data, row);
        }
    }
}

template <class F>
std::int64_t scratch_bytes_of(const Matrix& m) {
    return kMaxRows * row_scratch<F>(m) * 4 + 2 * blocks_of(m.columns) * (2 * kBlock);
}

// Tokens whose activations stay in L2 while the rows of a task go by.
inline std::int64_t tokens_per_pass(const Matrix& m) {
    constexpr std::int64_t kBytes = 640 << 10;
    const std::int64_t fitting = kBytes / token_bytes(m) / kMaxTokens * kMaxTokens;
    return fitting < kMaxTokens ? kMaxTokens : fitting;
}

template <class F>
void multiply_format(const Product& p) {
    if (p.num_tokens <= kMaxTokens) {
        return multiply_few<F>(p);
    }
    const std::int64_t pass = tokens_per_pass(*p.matrix);
    for (std::int64_t t = 0; t < p.num_tokens; t += pass) {
        Product part = p;
        part.tokens += t;
        part.outputs += t;
        part.num_tokens = p.num_tokens - t < pass ? p.num_tokens - t : pass;
        multiply_several<F>(part);
    }
}

}  // namespace
}  // namespace headwater::avx512
