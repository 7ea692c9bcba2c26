// Kernels: the table of functions that one instruction set offers, chosen once at start.
//
// Every function is a pure computation on one thread; how work is shared out is decided by
// linear_layer.hpp and moe_layer.hpp. A token's outputs depend on that token and the matrix only:
// never, not even in the last bit, on which other tokens or rows are in the call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "headwater/attention.hpp"
#include "headwater/cpu.hpp"
#include "headwater/float_product.hpp"
#include "headwater/matrix.hpp"

namespace headwater {

// Rows [row_begin, row_end) of `matrix` times each of the tokens: outputs[t][row - row_begin] is
// overwritten.
// The tokens are prepared for a matrix of the same format, columns and kind of zeros.
struct Product {
    const Matrix* matrix;
    std::int64_t row_begin;
    std::int64_t row_end;
    const std::byte* const* tokens;
    float* const* outputs;
    std::int64_t num_tokens;
    // Working memory of scratch_bytes(matrix), aligned to 64, for this thread alone.
    std::byte* scratch;
    // The weights that this thread is likely to read next, or null: a hint for prefetching.
    const std::byte* next = nullptr;
};

enum class Activation : std::uint8_t {
    // silu(gate) * up
    kSilu,
    // gpt-oss: gate and up clamped to +-limit (gate only from above), gate * sigmoid(1.702 * gate)
    // * (up + 1)
    kClampedSwiglu,
};

// Activations as a product wants them, and the product.
struct ProductWay {
    // Bytes of one prepared token; a multiple of 64.
    std::int64_t (*prepared_bytes)(const Matrix& matrix);
    // Of FP32 [columns]; `out` is aligned to 64.
    void (*prepare)(const Matrix& matrix, const float* x, std::byte* out);
    void (*multiply)(const Product& product);
};

struct Kernels {
    Isa isa;

    // Bytes of one prepared token; a multiple of 64.
    std::int64_t (*prepared_bytes)(const Matrix& matrix);
    // Rounds FP32 [columns] to BF16 and lays it out as `multiply` reads it; `out` is aligned to 64.
    void (*prepare)(const Matrix& matrix, const float* x, std::byte* out);
    std::int64_t (*scratch_bytes)(const Matrix& matrix);
    // For few tokens: every weight is read and expanded once, at the speed of the memory.
    void (*multiply)(const Product& product);
    // For many tokens: the same result up to the order of additions; a table without anything
    // better has `multiply` here.
    void (*multiply_many)(const Product& product);
    // For one or two tokens, as experts have in layers with many of them: as few cycles per weight
    // as can be, however many that are per token. Rounds otherwise, but not more; where there is
    // nothing better, `prepare` and `multiply`.
    ProductWay sparse;

    // out[i] = activation(gate[i], up[i]) in FP32; `out` may be `gate`.
    void (*activate)(Activation activation, float limit, const float* gate, const float* up,
                     float* out, std::int64_t count);
    // out[i] = sum over j of factors[j] * terms[j][i], added in the order of j.
    void (*weighted_sum)(const float* const* terms, const float* factors, std::int64_t num_terms,
                         float* out, std::int64_t count);

    // One tile of attention.
    void (*attend)(const AttentionTile& tile);
    // With FP32 activations: inputs[t][column] -> outputs[t][row - row_begin].
    void (*multiply_floats)(const FloatProduct& product);
    // Likewise with the transposed rows: inputs[t][row - row_begin] -> outputs[t][column].
    void (*multiply_floats_transposed)(const FloatProduct& product);
};

inline ProductWay few_of(const Kernels& kernels) {
    return {kernels.prepared_bytes, kernels.prepare, kernels.multiply};
}

inline ProductWay many_of(const Kernels& kernels) {
    return {kernels.prepared_bytes, kernels.prepare, kernels.multiply_many};
}

// Whether the tables given from now on multiply activations in two pieces (src/two_pieces.hpp)
// instead of rounding them to BF16. Layers keep the table that they were made with.
void set_exact_activations(bool are_exact);

// The table of one instruction set; it must be among supported_isas().
const Kernels& kernels_of(Isa isa);

// The table that this process uses: the best supported one, or what HEADWATER_FORCE_ISA names.
// Throws Failure(kConfig) on a name that is unknown or unsupported here.
const Kernels& active_kernels();

// Compares every kernel of a table with those of `reference` on small matrices of each format;
// throws Failure(kInternal) that names the first kernel in disagreement.
void self_test(const Kernels& kernels, const Kernels& reference);

// Each instruction set's table, defined in the translation unit compiled for it.
namespace scalar {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace amx {
extern const Kernels kKernels;
}

}  // namespace headwater
