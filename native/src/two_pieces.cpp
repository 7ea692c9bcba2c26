#include "two_pieces.hpp"

#include <algorithm>
#include <vector>

#include "headwater/bf16.hpp"

namespace headwater {

namespace {

// Rows and tokens that are multiplied at once, as pieces of a token need sums of their own.
constexpr std::int64_t kRows = 512;
constexpr std::int64_t kTokens = 128;

struct Scratch {
    const std::byte* tokens[2 * kTokens];
    float* outputs[2 * kTokens];
    alignas(64) float sums[kTokens][kRows];
};

template <const Kernels& kBase>
class TwoPieces {
  public:
    static constexpr std::int64_t kScratchBytes = sizeof(Scratch);

    static std::int64_t prepared_bytes(const Matrix& m) { return 2 * kBase.prepared_bytes(m); }

    static void prepare(const Matrix& m, const float* x, std::byte* out) {
        thread_local std::vector<float> rest;
        rest.resize(std::max(rest.size(), static_cast<std::size_t>(m.columns)));
        for (std::int64_t i = 0; i < m.columns; ++i) {
            rest[static_cast<std::size_t>(i)] = x[i] - float_from_bf16(bf16_from_float(x[i]));
        }
        kBase.prepare(m, x, out);
        kBase.prepare(m, rest.data(), out + kBase.prepared_bytes(m));
    }

    static std::int64_t scratch_bytes(const Matrix& m) {
        return kScratchBytes + kBase.scratch_bytes(m);
    }

    static void multiply(const Product& p) { multiply_by(kBase.multiply, p); }
    static void multiply_many(const Product& p) { multiply_by(kBase.multiply_many, p); }

  private:
    static void multiply_by(void (*base)(const Product&), const Product& p) {
        for (std::int64_t row = p.row_begin; row < p.row_end; row += kRows) {
            const std::int64_t end = std::min(row + kRows, p.row_end);
            for (std::int64_t token = 0; token < p.num_tokens; token += kTokens) {
                multiply_part(base, p, row, end, token, std::min(kTokens, p.num_tokens - token));
            }
        }
    }

    static void multiply_part(void (*base)(const Product&), const Product& p, std::int64_t row,
                              std::int64_t end, std::int64_t first, std::int64_t count) {
        auto& scratch = *reinterpret_cast<Scratch*>(p.scratch);
        const std::int64_t piece_bytes = kBase.prepared_bytes(*p.matrix);
        for (std::int64_t t = 0; t < count; ++t) {
            scratch.tokens[t] = p.tokens[first + t];
            scratch.tokens[count + t] = p.tokens[first + t] + piece_bytes;
            scratch.outputs[t] = p.outputs[first + t] + (row - p.row_begin);
            scratch.outputs[count + t] = scratch.sums[t];
        }
        base({.matrix = p.matrix,
              .row_begin = row,
              .row_end = end,
              .tokens = scratch.tokens,
              .outputs = scratch.outputs,
              .num_tokens = 2 * count,
              .scratch = p.scratch + kScratchBytes,
              .next = end < p.row_end ? p.matrix->data + end * p.matrix->row_bytes : p.next});
        for (std::int64_t t = 0; t < count; ++t) {
            for (std::int64_t i = 0; i < end - row; ++i) {
                scratch.outputs[t][i] += scratch.sums[t][i];
            }
        }
    }
};

template <const Kernels& kBase>
const Kernels& table() {
    static const Kernels kTable = [] {
        Kernels kernels = kBase;
        kernels.prepared_bytes = &TwoPieces<kBase>::prepared_bytes;
        kernels.prepare = &TwoPieces<kBase>::prepare;
        kernels.scratch_bytes = &TwoPieces<kBase>::scratch_bytes;
        kernels.multiply = &TwoPieces<kBase>::multiply;
        kernels.multiply_many = &TwoPieces<kBase>::multiply_many;
        // Its rounding of sums would be more than what a second piece adds.
        kernels.sparse = few_of(kernels);
        return kernels;
    }();
    return kTable;
}

}  // namespace

const Kernels& kernels_in_two_pieces(Isa isa) {
    switch (isa) {
        case Isa::kAmx:
            return table<amx::kKernels>();
        case Isa::kAvx512:
            return table<avx512::kKernels>();
        case Isa::kAvx2:
            return table<avx2::kKernels>();
        case Isa::kScalar:
            break;
    }
    return table<scalar::kKernels>();
}

}  // namespace headwater
