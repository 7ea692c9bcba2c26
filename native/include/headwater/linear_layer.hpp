// Products of activations with whole matrices, their rows shared out among the workers.
#pragma once

#include <cstdint>
#include <span>

#include "headwater/kernels.hpp"
#include "headwater/worker_pool.hpp"

namespace headwater {

// How a layer is computed. Within a mode a token's result never depends on the batch or the number
// of threads; between modes it may differ in the order of additions.
enum class Mode : std::uint8_t {
    // Few tokens: bound by the speed of memory.
    kDecode,
    // Many tokens: bound by arithmetic.
    kPrefill,
};

// outputs[t * output_stride + row] = row of the matrix times token t.
struct LinearPart {
    const Matrix* matrix;
    float* output;
    std::int64_t output_stride;
};

// Multiplies the same tokens with several matrices of equally many columns, as one job. `x` is
// FP32 [num_tokens, columns] with `x_stride` floats from token to token; it is rounded to BF16 on
// the way. Allocates only when it is called with more tokens, or larger ones, than ever before.
void linear(WorkerPool& pool, const Kernels& kernels, std::span<const LinearPart> parts,
            const float* x, std::int64_t x_stride, std::int64_t num_tokens, Mode mode);

}  // namespace headwater
