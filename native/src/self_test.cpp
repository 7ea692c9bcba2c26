// The start-up check of a table of kernels against another one.
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "float_self_test.hpp"
#include "headwater/failure.hpp"
#include "headwater/kernels.hpp"

namespace headwater {

namespace {

// Larger than the rounding of FP32 sums of this length, smaller than any wrong weight; likewise
// larger than the rounding of activations to BF16, which not every way does.
constexpr double kTolerance = 1e-4;
constexpr double kSparseTolerance = 3e-3;
constexpr std::int64_t kRows = 7;

// A fixed sequence, the same on every machine.
class Numbers {
  public:
    std::uint32_t next() {
        state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
        return static_cast<std::uint32_t>(state_ >> 33);
    }
    float uniform() { return static_cast<float>(next() % 4096) / 2048.0f - 1.0f; }

  private:
    std::uint64_t state_ = 20260101;
};

struct AlignedBytes {
    explicit AlignedBytes(std::int64_t count) : lines(static_cast<std::size_t>(count / 64 + 1)) {}
    std::byte* data() { return lines.data()->bytes; }

    struct alignas(64) Line {
        std::byte bytes[64];
    };
    std::vector<Line> lines;
};

struct Case {
    const char* name;
    Format format;
    ScaleType scale_type;
    std::int64_t group;
    bool has_zeros;
};

constexpr Case kCases[] = {
    {"bf16", Format::kBf16, ScaleType::kNone, 0, false},
    {"fp8", Format::kFp8, ScaleType::kF32, kFp8Block, false},
    {"int4", Format::kInt4, ScaleType::kBf16, 32, false},
    {"int4 with zeros", Format::kInt4, ScaleType::kF32, 128, true},
    {"mxfp4", Format::kMxfp4, ScaleType::kE8m0, kMxfp4Group, false},
};

// A matrix with every code of its format, and the memory that it lies in.
struct Sample {
    Sample(const Case& c, std::int64_t columns, Numbers& numbers) {
        const std::int64_t row_bytes = packed_bytes(c.format, columns);
        const std::int64_t groups = c.group == 0 ? 0 : (columns + c.group - 1) / c.group;
        for (std::int64_t i = 0; i < kRows * row_bytes; ++i) {
            auto code = static_cast<std::uint8_t>(i + i / 256);
            if (c.format == Format::kFp8 && (code & 0x7F) == 0x7F) {
                code = 0;
            } else if (c.format == Format::kBf16 && i % 2 == 1) {
                // Exponents near 0, so that sums are of products alike.
                code = static_cast<std::uint8_t>(0x3C + numbers.next() % 4 +
                                                 numbers.next() % 2 * 0x80);
            }
            data.push_back(static_cast<std::byte>(code));
        }
        for (std::int64_t i = 0; i < kRows * groups; ++i) {
            floats.push_back(0.5f + 0.25f * numbers.uniform());
            halves.push_back(static_cast<std::uint16_t>(0x3E00 + numbers.next() % 256));
            exponents.push_back(static_cast<std::uint8_t>(120 + numbers.next() % 12));
            zeros.push_back(static_cast<std::uint8_t>(numbers.next() % 16));
        }
        const void* scales = nullptr;
        std::int64_t scale_bytes = 0;
        if (c.scale_type == ScaleType::kF32) {
            scales = floats.data();
            scale_bytes = 4;
        } else if (c.scale_type == ScaleType::kBf16) {
            scales = halves.data();
            scale_bytes = 2;
        } else if (c.scale_type == ScaleType::kE8m0) {
            scales = exponents.data();
            scale_bytes = 1;
        }
        matrix = {.format = c.format,
                  .scale_type = c.scale_type,
                  .rows = kRows,
                  .columns = columns,
                  .group = c.group,
                  .data = data.data(),
                  .row_bytes = row_bytes,
                  .scales = static_cast<const std::byte*>(scales),
                  .scale_row_bytes = groups * scale_bytes,
                  .zeros = c.has_zeros ? zeros.data() : nullptr,
                  .zero_row_bytes = groups};
    }

    std::vector<std::byte> data;
    std::vector<float> floats;
    std::vector<std::uint16_t> halves;
    std::vector<std::uint8_t> exponents;
    std::vector<std::uint8_t> zeros;
    Matrix matrix;
};

std::vector<float> multiply(const Kernels& kernels, const ProductWay& way, const Matrix& m,
                            const std::vector<float>& x, std::int64_t num_tokens) {
    const std::int64_t token_bytes = way.prepared_bytes(m);
    AlignedBytes prepared(num_tokens * token_bytes);
    AlignedBytes scratch(kernels.scratch_bytes(m));
    std::vector<float> result(static_cast<std::size_t>(num_tokens * kRows));
    std::vector<const std::byte*> tokens;
    std::vector<float*> outputs;
    for (std::int64_t t = 0; t < num_tokens; ++t) {
        std::byte* token = prepared.data() + t * token_bytes;
        way.prepare(m, x.data() + t * m.columns, token);
        tokens.push_back(token);
        outputs.push_back(result.data() + t * kRows);
    }
    way.multiply({&m, 0, kRows, tokens.data(), outputs.data(), num_tokens, scratch.data()});
    return result;
}

void compare(const Kernels& kernels, const std::string& what, const std::vector<float>& got,
             const std::vector<float>& expected, double tolerance = kTolerance) {
    double error = 0.0;
    double norm = 0.0;
    for (std::size_t i = 0; i < got.size(); ++i) {
        error += (got[i] - expected[i]) * (got[i] - expected[i]);
        norm += expected[i] * expected[i];
    }
    // Written so that NaN fails.
    if (!(std::sqrt(error) <= tolerance * std::sqrt(norm))) {
        throw Failure(FailureKind::kInternal,
                      std::string("self-test: kernel '") + what + "' of the instruction set " +
                          isa_name(kernels.isa) + " disagrees with the reference (relative error " +
                          std::to_string(std::sqrt(error / norm)) +
                          "); set HEADWATER_FORCE_ISA=scalar to run without it");
    }
}

}  // namespace

void self_test(const Kernels& kernels, const Kernels& reference) {
    Numbers numbers;
    const auto random_floats = [&](std::int64_t count) {
        std::vector<float> values(static_cast<std::size_t>(count));
        for (float& value : values) {
            value = numbers.uniform();
        }
        return values;
    };
    const auto compare_floats = [&](const std::string& what, const std::vector<float>& got,
                                    const std::vector<float>& expected) {
        compare(kernels, what, got, expected);
    };
    float_self_test(kernels, compare_floats);
    for (const Case& c : kCases) {
        for (const std::int64_t columns : {256, 328}) {
            const Sample sample(c, columns, numbers);
            float_self_test(kernels, c.name, sample.matrix, compare_floats);
            for (const std::int64_t num_tokens : {1, 2, 5, 19}) {
                const auto x = random_floats(num_tokens * columns);
                const auto expected =
                    multiply(reference, few_of(reference), sample.matrix, x, num_tokens);
                const auto compare_way = [&](const char* what, const ProductWay& way,
                                             double tolerance) {
                    compare(kernels, std::string(what) + " " + c.name,
                            multiply(kernels, way, sample.matrix, x, num_tokens), expected,
                            tolerance);
                };
                compare_way("multiply", few_of(kernels), kTolerance);
                compare_way("multiply_many", many_of(kernels), kTolerance);
                compare_way("sparse", kernels.sparse, kSparseTolerance);
            }
        }
    }
    constexpr std::int64_t kCount = 77;
    const auto gate = random_floats(kCount);
    const auto up = random_floats(kCount);
    for (const Activation activation : {Activation::kSilu, Activation::kClampedSwiglu}) {
        std::vector<float> got(kCount);
        std::vector<float> expected(kCount);
        kernels.activate(activation, 0.5f, gate.data(), up.data(), got.data(), kCount);
        reference.activate(activation, 0.5f, gate.data(), up.data(), expected.data(), kCount);
        compare(kernels, "activate", got, expected);
    }
    const float* terms[] = {gate.data(), up.data()};
    const float factors[] = {0.75f, -0.3f};
    std::vector<float> got(kCount);
    std::vector<float> expected(kCount);
    kernels.weighted_sum(terms, factors, 2, got.data(), kCount);
    reference.weighted_sum(terms, factors, 2, expected.data(), kCount);
    compare(kernels, "weighted_sum", got, expected);
}

}  // namespace headwater
