// Weights to BF16 in tiles: one row of one block of 128 columns at a time.
#pragma once

#include <cstring>
#include <type_traits>

#include "../avx512/formats.hpp"
#include "../avx512/prepare.hpp"

namespace headwater::amx {
namespace {

using avx512::Bf16;
using avx512::Fp8;

constexpr std::int64_t kTileBytes = 1024;

template <class F>
constexpr bool kHasNibbles = F::kBlockBytes == 64;
template <class F>
constexpr bool kHasZeros = false;
template <bool kUniform>
constexpr bool kHasZeros<avx512::Int4<true, kUniform>> = true;

// What a sum of products is to be multiplied with, besides its scale.
template <class F>
constexpr float kUnit = std::is_same_v<F, Fp8> ? 256.0f : 1.0f;

// Four vectors of a block, so that vector i holds columns 32 i to 32 i + 31 in some order. Only
// nibbles need it: there each quarter of all vectors belongs to 32 columns.
template <class F>
inline void gather_steps(__m512i* w) {
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

// Bytes of a block that are there, where `columns` of the row are left.
template <class F>
inline std::int64_t bytes_left(std::int64_t columns) {
    return columns >= avx512::kBlock
               ? F::kBlockBytes
               : (columns * F::kBlockBytes + avx512::kBlock - 1) / avx512::kBlock;
}

// Writes 128 columns of a row, of whose bytes n are there, to `tile_row` in the tile of the first
// 32 columns, `tile_row` + kTileBytes in the next, and so on.
template <class F>
class Expander {
  public:
    explicit Expander(const Matrix& m) : tables_(m) {}

    void operator()(const std::byte* data, std::int64_t n, std::byte* tile_row) const {
        __m512i w[4];
        F::load(tables_, data, n, w);
        gather_steps<F>(w);
        for (int j = 0; j < 4; ++j) {
            _mm512_store_si512(tile_row + j * kTileBytes, w[j]);
        }
    }

  private:
    typename F::Tables tables_;
};

// An E4M3 code s eeee mmm is, with its bits moved apart, the BF16 number of exponent 112 + e: 2^-8
// times its value (kUnit makes up for that), unless e is 0. Such codes are rare in weights whose
// largest is 448, so they are looked for in whole vectors and mended one by one. Two look-ups
// in 128 entries take half as long again on Sapphire Rapids, at two cycles each.
// The even columns of 64 come first, then the odd ones, as sort_even_odd has it.
template <>
class Expander<Fp8> {
  public:
    explicit Expander(const Matrix&) {}

    void operator()(const std::byte* data, std::int64_t n, std::byte* tile_row) const {
        const __m512i low = avx512::load_line(data, n, 0);
        const __m512i high = avx512::load_line(data, n, 1);
        const std::uint64_t tiny_low = expand(low, tile_row);
        const std::uint64_t tiny_high = expand(high, tile_row + 2 * kTileBytes);
        if (__builtin_expect((tiny_low | tiny_high) != 0, 0)) {
            mend(low, tiny_low, tile_row);
            mend(high, tiny_high, tile_row + 2 * kTileBytes);
        }
    }

  private:
    // Returns which of the 64 codes have exponent 0.
    std::uint64_t expand(__m512i codes, std::byte* out) const {
        avx512::keep_in_register(codes);
        _mm512_store_si512(out, move_apart(_mm512_slli_epi16(codes, 8)));
        _mm512_store_si512(out + kTileBytes, move_apart(codes));
        return _cvtmask64_u64(_mm512_testn_epi8_mask(codes, code_exponent_));
    }
    // The upper byte of each word.
    __m512i move_apart(__m512i codes) const {
        // (codes >> 4) & kept | exponent
        return _mm512_ternarylogic_epi32(_mm512_srai_epi16(codes, 4), kept_, exponent_, 0xEA);
    }
    [[gnu::noinline, gnu::cold]] static void mend(__m512i codes, std::uint64_t which,
                                                  std::byte* out) {
        alignas(64) std::uint8_t all[64];
        _mm512_store_si512(all, codes);
        for (; which != 0; which &= which - 1) {
            const int i = __builtin_ctzll(which);
            const std::uint32_t code = all[i];
            const float value = static_cast<float>(code & 7) * 0x1p-17f;
            std::uint32_t bits;
            std::memcpy(&bits, &value, sizeof bits);
            const auto half = static_cast<std::uint16_t>(bits >> 16 | (code & 0x80) << 8);
            std::memcpy(out + i % 2 * kTileBytes + i / 2 * 2, &half, sizeof half);
        }
    }

    __m512i kept_ = _mm512_set1_epi16(static_cast<short>(0x87F0));
    __m512i exponent_ = _mm512_set1_epi16(0x3800);
    __m512i code_exponent_ = _mm512_set1_epi8(0x78);
};

// Of each 64 words the even ones, then the odd ones.
inline void sort_even_odd(std::byte* token, std::int64_t columns) {
    alignas(64) std::uint16_t index[64];
    for (int i = 0; i < 64; ++i) {
        index[i] = static_cast<std::uint16_t>(2 * i % 64 + i / 32);
    }
    const __m512i even = _mm512_load_si512(index);
    const __m512i odd = _mm512_load_si512(index + 32);
    for (std::int64_t i = 0; i < columns; i += 64) {
        const __m512i a = _mm512_load_si512(token + 2 * i);
        const __m512i b = _mm512_load_si512(token + 2 * i + 64);
        _mm512_store_si512(token + 2 * i, _mm512_permutex2var_epi16(a, even, b));
        _mm512_store_si512(token + 2 * i + 64, _mm512_permutex2var_epi16(a, odd, b));
    }
}

}  // namespace
}  // namespace headwater::amx
