// The table for CPUs with AVX-512 F, BW, VL, VBMI and BF16.
#include "headwater/kernels.hpp"

#include "functions.hpp"
#include "headwater/float_kernels.hpp"
#include "multiply.hpp"
#include "pointwise.hpp"

namespace headwater::avx512 {

std::int64_t prepared_bytes(const Matrix& m) { return token_bytes(m); }

void prepare(const Matrix& m, const float* x, std::byte* out) { prepare_token(m, x, out); }

std::int64_t scratch_bytes(const Matrix& m) {
    switch (m.format) {
        case Format::kBf16:
            return scratch_bytes_of<Bf16>(m);
        case Format::kFp8:
            return scratch_bytes_of<Fp8>(m);
        case Format::kMxfp4:
            return scratch_bytes_of<Mxfp4>(m);
        default:
            return scratch_bytes_of<Int4<true, false>>(m);
    }
}

void multiply(const Product& p) {
    switch (p.matrix->format) {
        case Format::kBf16:
            return multiply_format<Bf16>(p);
        case Format::kFp8:
            return multiply_format<Fp8>(p);
        case Format::kMxfp4:
            return multiply_format<Mxfp4>(p);
        case Format::kInt4:
            with_int4(*p.matrix, [&p]<class F>() { multiply_format<F>(p); });
    }
}

void activate(Activation activation, float limit, const float* gate, const float* up, float* out,
              std::int64_t count) {
    activate_all(activation, limit, gate, up, out, count);
}

void weighted_sum(const float* const* terms, const float* factors, std::int64_t num_terms,
                  float* out, std::int64_t count) {
    sum_all(terms, factors, num_terms, out, count);
}

const Kernels kKernels = {
    .isa = Isa::kAvx512,
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

}  // namespace headwater::avx512
