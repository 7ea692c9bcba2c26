#include "float_self_test.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "headwater/bf16.hpp"

namespace headwater {

namespace {

constexpr std::int64_t kTokens = 5;
constexpr std::int64_t kRows = 7;

struct alignas(64) Line {
    std::byte bytes[64];
};

float wave(std::int64_t i, float step) { return std::sin(step * static_cast<float>(i)); }

std::vector<float> waves(std::int64_t count, float step) {
    std::vector<float> values;
    for (std::int64_t i = 0; i < count; ++i) {
        values.push_back(wave(i, step));
    }
    return values;
}

std::vector<std::uint16_t> bf16_waves(std::int64_t count, float step) {
    std::vector<std::uint16_t> values;
    for (std::int64_t i = 0; i < count; ++i) {
        values.push_back(bf16_from_float(wave(i, step)));
    }
    return values;
}

// Two blocks out of order, the last keys unseen by some rows; what must not be read is NaN.
std::vector<float> attend(const Kernels& kernels) {
    constexpr std::int64_t kKeyDim = 41;
    constexpr std::int64_t kValueDim = 35;
    constexpr std::int64_t kBlockTokens = 48;
    constexpr std::int64_t kFirstKey = 5;
    constexpr std::int64_t kEndKey = 90;
    std::vector<std::uint16_t> pages = bf16_waves(3 * kBlockTokens * kKeyDim, 0.7F);
    const std::vector<std::int64_t> block_ids = {2, 0};
    const PagedCache cache = {
        pages.data(), block_ids.data(), kBlockTokens, kBlockTokens * kKeyDim, kKeyDim, 0, 0};
    constexpr std::uint16_t kNan = 0x7FC0;
    for (std::int64_t position = 0; position < 2 * kBlockTokens; ++position) {
        if (position < kFirstKey || position >= kEndKey) {
            const std::int64_t at = cache.token(position) - pages.data();
            std::fill_n(pages.begin() + at, kKeyDim, kNan);
        }
    }
    const std::vector<float> queries = waves(kRows * kKeyDim, 1.3F);
    std::vector<const float*> rows;
    std::vector<std::int64_t> begin;
    std::vector<std::int64_t> end;
    for (std::int64_t row = 0; row < kRows; ++row) {
        rows.push_back(queries.data() + row * kKeyDim);
        begin.push_back(row * 3);
        end.push_back(kEndKey - row);
    }
    std::vector<float> result(kRows * (kValueDim + 2));
    std::vector<Line> scratch(attention_scratch_bytes(kKeyDim) / sizeof(Line) + 1);
    kernels.attend({&cache, kKeyDim, kValueDim, kRows, rows.data(), begin.data(), end.data(),
                    kFirstKey, kEndKey, result.data(), result.data() + kRows,
                    result.data() + 2 * kRows, scratch.data()->bytes});
    return result;
}

std::vector<float> multiply(void (*function)(const FloatProduct&), const FloatMatrix& matrix,
                            std::int64_t input_size, std::int64_t output_size) {
    const std::vector<float> inputs = waves(kTokens * input_size, 0.9F);
    std::vector<float> outputs(static_cast<std::size_t>(kTokens * output_size));
    std::vector<const float*> input_rows;
    std::vector<float*> output_rows;
    for (std::int64_t t = 0; t < kTokens; ++t) {
        input_rows.push_back(inputs.data() + t * input_size);
        output_rows.push_back(outputs.data() + t * output_size);
    }
    function({&matrix, 0, matrix.rows, input_rows.data(), output_rows.data(), kTokens});
    return outputs;
}

}  // namespace

void float_self_test(const Kernels& kernels, const CompareKernel& compare) {
    compare("attend", attend(kernels), attend(scalar::kKernels));
}

void float_self_test(const Kernels& kernels, const char* format, const Matrix& stored,
                     const CompareKernel& compare) {
    const FloatMatrix matrix = {stored.rows, stored.columns, nullptr, stored};
    compare(std::string("multiply_floats ") + format,
            multiply(kernels.multiply_floats, matrix, matrix.columns, matrix.rows),
            multiply(scalar::kKernels.multiply_floats, matrix, matrix.columns, matrix.rows));
    compare(
        std::string("multiply_floats_transposed ") + format,
        multiply(kernels.multiply_floats_transposed, matrix, matrix.rows, matrix.columns),
        multiply(scalar::kKernels.multiply_floats_transposed, matrix, matrix.rows, matrix.columns));
}

}  // namespace headwater
