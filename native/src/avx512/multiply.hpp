// The product of a few rows with a few tokens, and how a whole Product is cut into such tiles.
//
// Per row and token, whatever the tile: each block of 128 columns is summed up on its own in one
// vector, scaled, and added to a running vector, whose 16 lanes are added up last. So the result
// does not depend on the tile. DRAM is read as one linear stream: prefetches run ahead_bytes()
// ahead of the loads, which then find their lines in L2 in whatever order rows are combined.
#pragma once

#include <type_traits>
#include <utility>

#include "fetch.hpp"
#include "headwater/kernels.hpp"
#include "prepare.hpp"

namespace headwater::avx512 {
namespace {

constexpr int kMaxTokens = 8;

// `num_bytes` of the block are there: all but at the end of a row.
template <class F, int kRows, int kTokens, bool kIsWhole>
inline void multiply_block(const typename F::Tables& tables, const typename F::Row* rows,
                           const std::byte* const* data, std::int64_t block, std::int64_t num_bytes,
                           const std::byte* const* tokens, const float* const* sums,
                           const std::byte* ahead, __m512 (*totals)[kTokens]) {
    __m512i w[kRows][4];
    if constexpr (kIsWhole) {
#pragma GCC unroll 16
        for (std::int64_t at = 0; at < kRows * F::kBlockBytes; at += 64) {
            fetch_far(ahead + at);
        }
    } else {
        for (std::int64_t at = 0; at < kRows * num_bytes; at += 64) {
            fetch_far(ahead + at);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
        F::load(tables, data[r], kIsWhole ? F::kBlockBytes : num_bytes, w[r]);
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

// Whether a row's end weighs as much as the rest of it.
inline bool is_short(const Matrix& m) { return m.columns <= 1024; }

// How far prefetches run ahead of the loads. Measured on Zen 4 with one token and single rows, as
// shares of the speed of the memory: BF16 0.93 at 3 KiB, 0.84 at 4 KiB, 0.73 at 8 KiB and beyond,
// 0.80 without, but short rows 0.96 at 5.5 KiB and 0.75 at 3 KiB; FP8 0.97 at 8.5 KiB, 0.95 at 8
// and 0.94 at 12 KiB, 0.91 at 24 KiB, 0.75 at 4 KiB: multiples of a page are worse than what lies
// between. Several rows at a time want the rest of the last, and nibbles some more.
template <class F>
inline std::int64_t ahead_bytes(const Matrix& m, std::int64_t num_tokens, int num_rows) {
    if (num_tokens > 1) {
        return 32 << 10;
    }
    if (std::is_same_v<F, Bf16> && num_rows == 1) {
        return is_short(m) ? 11 << 9 : 3 << 10;
    }
    if (num_rows < 4) {
        return m.row_bytes * (num_rows - 1) + (17 << 9);
    }
    return m.row_bytes * 9 / 2 + (std::is_same_v<F, Bf16> ? 3 << 10 : 8 << 10);
}

// The scales to prefetch with each block of kRows rows from `row` on: a row's own scales are a
// second stream from DRAM, which without this would be waited for at every tile (MXFP4 on Zen 4:
// 0.83 of the speed of the memory, and 0.90 with; 1.5 to 6 KiB ahead are alike).
struct ScalesAhead {
    ScalesAhead(const Matrix& m, std::int64_t row, int num_rows)
        : at(m.scales + row * m.scale_row_bytes + kAhead),
          step(num_rows * m.scale_row_bytes / blocks_of(m.columns)) {}
    static constexpr std::int64_t kAhead = 2560;
    const std::byte* at;
    std::int64_t step;
};

// What to prefetch while the row at `data` is read: the stream of rows goes on with p.next; where
// that is unknown, or rows are parts of longer ones, there is nothing to be gained.
template <class F>
inline const std::byte* ahead_of(const Product& p, const std::byte* data, std::int64_t packed_bytes,
                                 int num_rows) {
    const Matrix& m = *p.matrix;
    if (m.row_bytes != packed_bytes) {
        return data;
    }
    const std::int64_t left = m.data + p.row_end * m.row_bytes - data;
    const std::int64_t ahead = ahead_bytes<F>(m, p.num_tokens, num_rows);
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
                          const std::byte* ahead, ScalesAhead scales,
                          const std::byte* const* tokens, const float* const* sums,
                          float* const* outputs, std::int64_t at) {
    const std::int64_t full = m.columns / kBlock;
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
        multiply_block<F, kRows, kTokens, true>(tables, rows, data, block, F::kBlockBytes, tokens,
                                                sums, ahead, totals);
        ahead += kRows * F::kBlockBytes;
        if constexpr (F::kPrefetchesScales && kTokens == 1) {
            fetch_far(scales.at);
            scales.at += scales.step;
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            data[r] += F::kBlockBytes;
        }
    }
    const std::int64_t left = packed_bytes_of<F>(m) - full * F::kBlockBytes;
    if (left > 0) {
        multiply_block<F, kRows, kTokens, false>(tables, rows, data, full, left, tokens, sums,
                                                 ahead, totals);
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
        multiply_tile<F, kRows, kTokens>(
            tables, m, rows, data, ahead_of<F>(p, data[0], packed_bytes, kRows),
            ScalesAhead(m, row, kRows), tokens, sums, p.outputs, row - p.row_begin);
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

// How many rows share the loads of activations. For one token a single row is the best reader of
// DRAM on Zen 4, but nibbles share what a row costs besides its weights, and so do short rows of
// FP8 (576 columns: 1.1 times the speed of a single one or of four); and activations that crowd L1
// out are shared (16,384 columns: 0.87 of the speed of the memory against 0.43).
template <class F>
int rows_per_tile(const Matrix& m, std::int64_t num_tokens) {
    static const bool kWantsRows = wants_several_rows();
    constexpr std::int64_t kLong = 10240;
    if (num_tokens > 1) {
        return num_tokens == 2 ? 4 : 2;
    }
    if (kWantsRows || F::kBlockBytes == 64 || m.columns > kLong) {
        return 4;
    }
    return is_short(m) && !std::is_same_v<F, Bf16> ? 2 : 1;
}

// Rows [begin, end) times up to kMaxTokens tokens.
template <class F>
void multiply_few(const Product& p, std::int64_t begin, std::int64_t end) {
    const std::int64_t n = p.num_tokens;
    const int step = rows_per_tile<F>(*p.matrix, n);
    const std::int64_t even = begin + (end - begin) / step * step;
    constexpr std::make_integer_sequence<int, kMaxTokens> kAll;
    const auto run = step == 4   ? rows_function<F, 4>(n, std::make_integer_sequence<int, 2>())
                     : step == 2 ? rows_function<F, 2>(n, kAll)
                                 : rows_function<F, 1>(n, kAll);
    run(p, begin, even);
    rows_function<F, 1>(n, kAll)(p, even, end);
}

// Tokens whose activations stay in L2 while the rows of a task go by.
inline std::int64_t tokens_per_pass(const Matrix& m) {
    constexpr std::int64_t kBytes = 640 << 10;
    const std::int64_t fitting = kBytes / token_bytes(m) / kMaxTokens * kMaxTokens;
    return fitting < kMaxTokens ? kMaxTokens : fitting;
}

inline Product with_tokens(const Product& p, std::int64_t first, std::int64_t most) {
    Product part = p;
    part.tokens += first;
    part.outputs += first;
    part.num_tokens = p.num_tokens - first < most ? p.num_tokens - first : most;
    return part;
}

// With more tokens than a tile has, a few rows stay in L1 while the tiles go by. (Expanding them
// anew for each is faster than to write them out as BF16: measured 77 against 59 GMAC/s.)
template <class F>
void multiply_format(const Product& p) {
    if (p.num_tokens <= kMaxTokens) {
        return multiply_few<F>(p, p.row_begin, p.row_end);
    }
    constexpr std::int64_t kRows = 4;
    const std::int64_t pass = tokens_per_pass(*p.matrix);
    for (std::int64_t first = 0; first < p.num_tokens; first += pass) {
        const Product in_pass = with_tokens(p, first, pass);
        for (std::int64_t row = p.row_begin; row < p.row_end; row += kRows) {
            const std::int64_t end = row + kRows < p.row_end ? row + kRows : p.row_end;
            for (std::int64_t t = 0; t < in_pass.num_tokens; t += kMaxTokens) {
                multiply_few<F>(with_tokens(in_pass, t, kMaxTokens), row, end);
            }
        }
    }
}

template <class F>
std::int64_t scratch_bytes_of(const Matrix& m) {
    return kMaxRows * row_scratch<F>(m) * 4;
}

}  // namespace
}  // namespace headwater::avx512
