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
// in 128 entries would take two cycles each on Sapphire Rapids, and shifts crowd one of its ports.
template <>
class Expander<Fp8> {
  public:
    explicit Expander(const Matrix&) {}

    void operator()(const std::byte* data, std::int64_t n, std::byte* tile_row) const {
        const __m512i low = avx512::load_line(data, n, 0);
        const __m512i high = avx512::load_line(data, n, 1);
        move_apart(low, tile_row);
        move_apart(high, tile_row + 2 * kTileBytes);
        const __mmask64 tiny_low = _mm512_testn_epi8_mask(low, code_exponent_);
        const __mmask64 tiny_high = _mm512_testn_epi8_mask(high, code_exponent_);
        if (!_kortestz_mask64_u8(tiny_low, tiny_high)) [[unlikely]] {
            mend(low, tiny_low, tile_row);
            mend(high, tiny_high, tile_row + 2 * kTileBytes);
        }
    }

  private:
    // The two bytes of each of 64 numbers, put together as avx512::Fp8 does.
    void move_apart(__m512i codes, std::byte* out) const {
        avx512::keep_in_register(codes);
        const __m512i lower = _mm512_gf2p8affine_epi64_epi8(codes, to_lower_, 0);
        const __m512i upper = _mm512_gf2p8affine_epi64_epi8(codes, to_upper_, kUpperExponent);
        _mm512_store_si512(out, _mm512_unpacklo_epi8(lower, upper));
        _mm512_store_si512(out + kTileBytes, _mm512_unpackhi_epi8(lower, upper));
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
            // Of 16 codes, eight each.
            const int word = i / 16 * 8 + i % 8;
            std::memcpy(out + i / 8 % 2 * kTileBytes + word * 2, &half, sizeof half);
        }
    }

    // Bit matrices over GF(2), the row of bit 7 in the lowest byte: e0 mmm 0000 from a code's lower
    // half, and s 000 0 eee from its upper one, to which the exponent 112 is added.
    static constexpr int kUpperExponent = 112 >> 1;
    __m512i to_lower_ = _mm512_set1_epi64(0x0000000001020408);
    __m512i to_upper_ = _mm512_set1_epi64(0x1020400000000080);
    __m512i code_exponent_ = _mm512_set1_epi8(0x78);
};

}  // namespace
}  // namespace headwater::amx
