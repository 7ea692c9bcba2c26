// The table for CPUs with AMX: as on AVX-512, but products of BF16 and FP8, and of the other
// formats with many tokens, go through tiles; those of FP8 with very few tokens are in FP16.
//
// A tile product adds 16 rows x 32 columns of weights, expanded to BF16, times 32 columns x 16
// tokens. As on AVX-512 the columns of one scale are summed up on their own, scaled, and added to
// FP32 totals. BF16 and FP8 have the same result bit for bit however many tokens there are; the
// formats of nibbles, whose scales are too many for that, have it within each of the two functions.
#include <algorithm>

#include "../avx512/functions.hpp"
#include "few.hpp"
#include "halves.hpp"
#include "headwater/float_kernels.hpp"
#include "many.hpp"

namespace headwater::amx {
namespace {

std::int64_t scratch_bytes(const Matrix& m) {
    return std::max({few_bytes(m), many_bytes(m), halves_bytes(m), avx512::scratch_bytes(m)});
}

template <class F>
void multiply_format(const Product& p) {
    return p.num_tokens <= kFewTokens ? multiply_few<F>(p) : multiply_many<F>(p);
}

void multiply_many(const Product& p) {
    const Matrix& m = *p.matrix;
    switch (m.format) {
        case Format::kBf16:
            return multiply_format<Bf16>(p);
        case Format::kFp8:
            return multiply_format<Fp8>(p);
        case Format::kMxfp4:
            return multiply_many<avx512::Mxfp4>(p);
        case Format::kInt4:
            avx512::with_int4(m, [&p]<class F>() { multiply_many<F>(p); });
    }
}

void multiply(const Product& p) {
    const Format format = p.matrix->format;
    if (format == Format::kBf16 || format == Format::kFp8) {
        multiply_many(p);
    } else {
        avx512::multiply(p);
    }
}

bool is_in_halves(const Matrix& m) { return m.format == Format::kFp8; }

std::int64_t sparse_prepared_bytes(const Matrix& m) {
    return is_in_halves(m) ? halves_prepared_bytes(m) : avx512::prepared_bytes(m);
}

void prepare_sparse(const Matrix& m, const float* x, std::byte* out) {
    is_in_halves(m) ? prepare_halves(m, x, out) : avx512::prepare(m, x, out);
}

void multiply_sparse(const Product& p) {
    is_in_halves(*p.matrix) ? multiply_halves(p) : multiply(p);
}

}  // namespace

const Kernels kKernels = {
    .isa = Isa::kAmx,
    .prepared_bytes = &avx512::prepared_bytes,
    .prepare = &avx512::prepare,
    .scratch_bytes = &scratch_bytes,
    .multiply = &multiply,
    .multiply_many = &multiply_many,
    .sparse = {&sparse_prepared_bytes, &prepare_sparse, &multiply_sparse},
    .activate = &avx512::activate,
    .weighted_sum = &avx512::weighted_sum,
    .attend = &avx512::attend,
    .multiply_floats = &avx512::multiply_floats,
    .multiply_floats_transposed = &avx512::multiply_floats_transposed,
};

}  // namespace headwater::amx
