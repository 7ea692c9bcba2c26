// The table for CPUs with AVX2, FMA and F16C: weights are widened to FP32 in registers.
//
// Per row and token, whatever the tile: 32 columns at a time are widened and multiplied into one
// vector of partial sums; at the end of each scale's columns that vector is scaled and added to a
// running one, whose 8 lanes are added up last.
#include "headwater/kernels.hpp"

#include <immintrin.h>

#include <cstring>
#include <utility>

#include "headwater/float_kernels.hpp"

namespace headwater::avx2 {
namespace {

constexpr std::int64_t kBlock = 32;
constexpr int kMaxTokens = 4;

std::int64_t blocks_of(std::int64_t columns) { return (columns + kBlock - 1) / kBlock; }

bool has_nibbles(const Matrix& m) {
    return m.format == Format::kInt4 || m.format == Format::kMxfp4;
}

// A prepared token: FP32 [columns rounded up to 32], rounded to BF16; for nibbles, of each 32 the
// even columns first. Then, for matrices with zeros, sums [8 per 32 columns] of the columns that
// meet in each lane.
std::int64_t prepared_bytes(const Matrix& m) {
    const std::int64_t blocks = blocks_of(m.columns);
    return (blocks * kBlock * 4 + (m.zeros != nullptr ? blocks * 32 : 0) + 63) / 64 * 64;
}

const float* sums_of(const Matrix& m, const float* x) { return x + blocks_of(m.columns) * kBlock; }

__m256 round_to_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_and_si256(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))),
                         _mm256_set1_epi32(static_cast<int>(0xFFFF0000)));
    const __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    return _mm256_blendv_ps(_mm256_castsi256_ps(rounded), x, is_nan);
}

void prepare(const Matrix& m, const float* x, std::byte* out) {
    auto* ordered = reinterpret_cast<float*>(out);
    float* sums = ordered + blocks_of(m.columns) * kBlock;
    for (std::int64_t block = 0; block < blocks_of(m.columns); ++block) {
        alignas(32) float rounded[kBlock] = {};
        const std::int64_t left = m.columns - block * kBlock;
        std::memcpy(rounded, x + block * kBlock,
                    static_cast<std::size_t>(4 * (left < kBlock ? left : kBlock)));
        for (int j = 0; j < kBlock; j += 8) {
            _mm256_store_ps(rounded + j, round_to_bf16(_mm256_load_ps(rounded + j)));
        }
        float* to = ordered + block * kBlock;
        for (int j = 0; j < kBlock; ++j) {
            to[j] = has_nibbles(m) ? rounded[j < 16 ? 2 * j : 2 * (j - 16) + 1] : rounded[j];
        }
        if (m.zeros != nullptr) {
            __m256 sum = _mm256_load_ps(to);
            for (int j = 8; j < kBlock; j += 8) {
                sum = _mm256_add_ps(sum, _mm256_load_ps(to + j));
            }
            _mm256_store_ps(sums + 8 * block, sum);
        }
    }
}

std::int64_t scratch_bytes(const Matrix&) { return 0; }

// 32 columns as four vectors, in the order of prepared tokens; kFactor times their value.
struct Bf16 {
    static constexpr std::int64_t kBlockBytes = 64;
    static constexpr float kFactor = 1.0f;
    static void load(const Matrix&, const std::byte* p, __m256* w) {
        for (int j = 0; j < 4; ++j) {
            const auto* at = reinterpret_cast<const __m128i*>(p + 16 * j);
            const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(at));
            w[j] = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
        }
    }
};

struct Fp8 {
    // An E4M3 code's fields, moved to their places in FP16, have its value times 2^-8; FP16 keeps
    // the subnormals.
    static constexpr std::int64_t kBlockBytes = 32;
    static constexpr float kFactor = 1.0f / 256;
    static void load(const Matrix&, const std::byte* p, __m256* w) {
        for (int j = 0; j < 4; ++j) {
            const auto* at = reinterpret_cast<const __m128i*>(p + 8 * j);
            const __m128i words = _mm_cvtepi8_epi16(_mm_loadl_epi64(at));
            const __m128i half =
                _mm_and_si128(_mm_slli_epi16(words, 7), _mm_set1_epi16(static_cast<short>(0xBFFF)));
            w[j] = _mm256_cvtph_ps(half);
        }
    }
};

struct Nibbles {
    static constexpr std::int64_t kBlockBytes = 16;
    static constexpr float kFactor = 2.0f;
    static void load(const Matrix& m, const std::byte* p, __m256* w) {
        // Twice the value, which is an integer for both formats.
        const __m128i values =
            m.format == Format::kInt4
                ? _mm_setr_epi8(-16, -14, -12, -10, -8, -6, -4, -2, 0, 2, 4, 6, 8, 10, 12, 14)
                : _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
        const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        const __m128i low_bits = _mm_set1_epi8(15);
        const __m128i even = _mm_shuffle_epi8(values, _mm_and_si128(codes, low_bits));
        const __m128i odd =
            _mm_shuffle_epi8(values, _mm_and_si128(_mm_srli_epi16(codes, 4), low_bits));
        w[0] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(even));
        w[1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(even, 8)));
        w[2] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(odd));
        w[3] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(odd, 8)));
    }
};

float scale_of(const Matrix& m, std::int64_t row, std::int64_t block) {
    if (m.format == Format::kFp8) {
        const auto* scales =
            reinterpret_cast<const float*>(m.scales + row / kFp8Block * m.scale_row_bytes);
        return scales[block * kBlock / kFp8Block];
    }
    const std::byte* scales = m.scales + row * m.scale_row_bytes;
    const std::int64_t group = block * kBlock / m.group;
    std::uint32_t bits;
    if (m.scale_type == ScaleType::kF32) {
        std::memcpy(&bits, scales + 4 * group, 4);
    } else if (m.scale_type == ScaleType::kBf16) {
        std::uint16_t high;
        std::memcpy(&high, scales + 2 * group, 2);
        bits = static_cast<std::uint32_t>(high) << 16;
    } else {
        const auto code = static_cast<std::uint32_t>(scales[group]);
        bits = code == 0 ? 0x00400000 : code << 23;
    }
    float scale;
    std::memcpy(&scale, &bits, 4);
    return scale;
}

float add_lanes(__m256 v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

template <class F, int kTokens>
void multiply_row(const Matrix& m, std::int64_t row, const std::byte* const* tokens,
                  float* const* outputs, std::int64_t at) {
    const std::int64_t blocks = blocks_of(m.columns);
    const std::int64_t blocks_per_scale = m.format == Format::kBf16  ? 4
                                          : m.format == Format::kFp8 ? 4
                                                                     : m.group / kBlock;
    const std::byte* data = m.data + row * m.row_bytes;
    const float* x[kTokens];
    __m256 sums[kTokens];
    __m256 totals[kTokens];
    for (int t = 0; t < kTokens; ++t) {
        x[t] = reinterpret_cast<const float*>(tokens[t]);
        totals[t] = sums[t] = _mm256_setzero_ps();
    }
    for (std::int64_t block = 0; block < blocks; ++block) {
        __m256 w[4];
        if ((block + 1) * kBlock <= m.columns) {
            F::load(m, data + block * F::kBlockBytes, w);
        } else {
            std::byte padded[F::kBlockBytes] = {};
            const std::int64_t bits = (m.columns - block * kBlock) * F::kBlockBytes;
            std::memcpy(padded, data + block * F::kBlockBytes,
                        static_cast<std::size_t>((bits + kBlock - 1) / kBlock));
            F::load(m, padded, w);
        }
        for (int j = 0; j < 4; ++j) {
            for (int t = 0; t < kTokens; ++t) {
                const __m256 activations = _mm256_load_ps(x[t] + block * kBlock + 8 * j);
                sums[t] = _mm256_fmadd_ps(w[j], activations, sums[t]);
            }
        }
        if (m.zeros != nullptr) {
            const std::uint8_t zero = m.zeros[row * m.zero_row_bytes + block * kBlock / m.group];
            const __m256 offset = _mm256_set1_ps(F::kFactor * (8.0f - static_cast<float>(zero)));
            for (int t = 0; t < kTokens; ++t) {
                sums[t] =
                    _mm256_fmadd_ps(offset, _mm256_load_ps(sums_of(m, x[t]) + 8 * block), sums[t]);
            }
        }
        if ((block + 1) % blocks_per_scale == 0 || block + 1 == blocks) {
            const float scale = m.format == Format::kBf16 ? 1.0f : scale_of(m, row, block);
            for (int t = 0; t < kTokens; ++t) {
                const __m256 exact = _mm256_mul_ps(sums[t], _mm256_set1_ps(1.0f / F::kFactor));
                totals[t] = _mm256_fmadd_ps(_mm256_set1_ps(scale), exact, totals[t]);
                sums[t] = _mm256_setzero_ps();
            }
        }
    }
    for (int t = 0; t < kTokens; ++t) {
        outputs[t][at] = add_lanes(totals[t]);
    }
}

using RowFunction = void (*)(const Matrix&, std::int64_t, const std::byte* const*, float* const*,
                             std::int64_t);

template <class F>
void multiply_format(const Product& p) {
    static constexpr RowFunction kByTokens[kMaxTokens] = {&multiply_row<F, 1>, &multiply_row<F, 2>,
                                                          &multiply_row<F, 3>, &multiply_row<F, 4>};
    for (std::int64_t row = p.row_begin; row < p.row_end; ++row) {
        for (std::int64_t t = 0; t < p.num_tokens; t += kMaxTokens) {
            const std::int64_t n = p.num_tokens - t < kMaxTokens ? p.num_tokens - t : kMaxTokens;
            kByTokens[n - 1](*p.matrix, row, p.tokens + t, p.outputs + t, row - p.row_begin);
        }
    }
}

void multiply(const Product& p) {
    switch (p.matrix->format) {
        case Format::kBf16:
            return multiply_format<Bf16>(p);
        case Format::kFp8:
            return multiply_format<Fp8>(p);
        default:
            return multiply_format<Nibbles>(p);
    }
}

// e^x to about 2 units in the last place; 0 and infinity where FP32 ends.
__m256 exponential(__m256 x) {
    x = _mm256_max_ps(_mm256_min_ps(_mm256_set1_ps(100.0f), x), _mm256_set1_ps(-110.0f));
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    // ln 2 in two parts, the first with trailing zeros so that n times it is exact.
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 sum = _mm256_set1_ps(1.0f / 5040);
    for (const float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
        sum = _mm256_fmadd_ps(sum, r, _mm256_set1_ps(term));
    }
    // 2^n in two factors, as n reaches beyond the exponents of FP32.
    const __m256i whole = _mm256_cvtps_epi32(n);
    const __m256i half = _mm256_srai_epi32(whole, 1);
    const auto power = [](__m256i exponent) {
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
    };
    return _mm256_mul_ps(_mm256_mul_ps(sum, power(half)), power(_mm256_sub_epi32(whole, half)));
}

__m256 sigmoid(__m256 x) {
    const __m256 one = _mm256_set1_ps(1.0f);
    const __m256 e = exponential(_mm256_sub_ps(_mm256_setzero_ps(), x));
    return _mm256_div_ps(one, _mm256_add_ps(one, e));
}

__m256 activated(Activation activation, float limit, __m256 g, __m256 u) {
    if (activation == Activation::kSilu) {
        return _mm256_mul_ps(_mm256_mul_ps(g, sigmoid(g)), u);
    }
    // The operand that may be a NaN comes second: it is then what min and max return.
    const __m256 top = _mm256_set1_ps(limit);
    g = _mm256_min_ps(top, g);
    u = _mm256_max_ps(_mm256_set1_ps(-limit), _mm256_min_ps(top, u));
    const __m256 glu = _mm256_mul_ps(g, sigmoid(_mm256_mul_ps(g, _mm256_set1_ps(1.702f))));
    return _mm256_mul_ps(_mm256_add_ps(u, _mm256_set1_ps(1.0f)), glu);
}

// Lanes below `left`.
__m256i lanes(std::int64_t left) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(left < 8 ? static_cast<int>(left) : 8),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

void activate(Activation activation, float limit, const float* gate, const float* up, float* out,
              std::int64_t count) {
    for (std::int64_t i = 0; i < count; i += 8) {
        const __m256i mask = lanes(count - i);
        const __m256 g = _mm256_maskload_ps(gate + i, mask);
        const __m256 u = _mm256_maskload_ps(up + i, mask);
        _mm256_maskstore_ps(out + i, mask, activated(activation, limit, g, u));
    }
}

void weighted_sum(const float* const* terms, const float* factors, std::int64_t num_terms,
                  float* out, std::int64_t count) {
    for (std::int64_t i = 0; i < count; i += 8) {
        const __m256i mask = lanes(count - i);
        __m256 sum = _mm256_setzero_ps();
        for (std::int64_t j = 0; j < num_terms; ++j) {
            sum = _mm256_fmadd_ps(_mm256_set1_ps(factors[j]),
                                  _mm256_maskload_ps(terms[j] + i, mask), sum);
        }
        _mm256_maskstore_ps(out + i, mask, sum);
    }
}

}  // namespace

const Kernels kKernels = {
    .isa = Isa::kAvx2,
    .prepared_bytes = &prepared_bytes,
    .prepare = &prepare,
    .scratch_bytes = &scratch_bytes,
    .multiply = &multiply,
    .multiply_many = &multiply,
    .sparse = {&prepared_bytes, &prepare, &multiply},
    .activate = &activate,
    .weighted_sum = &weighted_sum,
    .attend = &attend,
    .multiply_floats = &multiply_floats,
    .multiply_floats_transposed = &multiply_floats_transposed,
};

}  // namespace headwater::avx2
