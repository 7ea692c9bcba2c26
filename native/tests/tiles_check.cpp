// The kernels for AMX on a CPU without it: native/src/amx compiled against emulated tiles and FP16
// arithmetic, compared with the scalar kernels, and one token with many, decode with prefill, bit
// for bit.
//
// tests/native/test_emulated_tiles.py builds and runs it. `tiles_check SEED`.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "headwater/cpu.hpp"
#include "headwater/kernels.hpp"
#include "samples.hpp"
#include "two_pieces.hpp"

using namespace headwater;

namespace {

constexpr int kRounds = 6;
constexpr std::int64_t kMost = 40;
// FP32 sums against FP64.
constexpr double kTolerance = 5e-6;
// Sums of eight products in FP16.
constexpr double kSparseTolerance = 7e-4;

struct Lines {
    explicit Lines(std::int64_t num_bytes) : lines(static_cast<std::size_t>(num_bytes / 64 + 1)) {}
    std::byte* data() { return lines.data()->bytes; }

    struct alignas(64) Line {
        std::byte bytes[64];
    };
    std::vector<Line> lines;
};

// Rows [begin, end) times the tokens, [token][row].
std::vector<float> run(const Kernels& kernels, const ProductWay& way, const Matrix& m,
                       std::int64_t begin, std::int64_t end, const std::vector<float>& x,
                       std::int64_t first, std::int64_t count) {
    const std::int64_t token_bytes = way.prepared_bytes(m);
    Lines prepared(count * token_bytes);
    Lines scratch(kernels.scratch_bytes(m));
    std::vector<float> result(static_cast<std::size_t>(count * (end - begin)));
    std::vector<const std::byte*> tokens;
    std::vector<float*> outputs;
    for (std::int64_t t = 0; t < count; ++t) {
        std::byte* token = prepared.data() + t * token_bytes;
        way.prepare(m, x.data() + (first + t) * m.columns, token);
        tokens.push_back(token);
        outputs.push_back(result.data() + t * (end - begin));
    }
    way.multiply({.matrix = &m,
                  .row_begin = begin,
                  .row_end = end,
                  .tokens = tokens.data(),
                  .outputs = outputs.data(),
                  .num_tokens = count,
                  .scratch = scratch.data()});
    return result;
}

double relative_error(const std::vector<float>& got, const std::vector<float>& expected) {
    double error = 0;
    double norm = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
        const double difference = double{got[i]} - double{expected[i]};
        error += difference * difference;
        norm += double{expected[i]} * double{expected[i]};
    }
    return std::sqrt(error / norm);
}

[[noreturn]] void fail(const Kind& kind, const char* what, std::int64_t rows, std::int64_t columns,
                       std::int64_t count) {
    std::fprintf(stderr, "format %d, %lld rows, %lld columns, %lld tokens: %s\n",
                 static_cast<int>(kind.format), static_cast<long long>(rows),
                 static_cast<long long>(columns), static_cast<long long>(count), what);
    std::exit(1);
}

std::vector<float> alone(const ProductWay& way, const Matrix& m, std::int64_t begin,
                         const std::vector<float>& x) {
    std::vector<float> all;
    for (std::int64_t t = 0; t < kMost; ++t) {
        const auto one = run(amx::kKernels, way, m, begin, m.rows, x, t, 1);
        all.insert(all.end(), one.begin(), one.end());
    }
    return all;
}

bool is_prefix(const std::vector<float>& part, const std::vector<float>& all) {
    return std::memcmp(part.data(), all.data(), part.size() * sizeof(float)) == 0;
}

// Few tokens per expert: near enough, and alike however many there are; FP8 at any magnitude.
void check_sparse(const Kind& kind, const Matrix& m, std::int64_t begin,
                  const std::vector<float>& x, const std::vector<float>& expected) {
    const ProductWay& way = amx::kKernels.sparse;
    const auto single = alone(way, m, begin, x);
    const bool is_in_halves = kind.format == Format::kFp8;
    const Kernels& exact = kernels_in_two_pieces(Isa::kScalar);
    const double error =
        is_in_halves
            ? relative_error(single, run(exact, few_of(exact), m, begin, m.rows, x, 0, kMost))
            : relative_error(single, expected);
    if (!(error <= (is_in_halves ? kSparseTolerance : kTolerance))) {
        fail(kind, "a token of few differs from scalar", m.rows, m.columns, 1);
    }
    for (const std::int64_t count : {2, 3, 4, 5, 8, 9, 40}) {
        if (!is_prefix(run(amx::kKernels, way, m, begin, m.rows, x, 0, count), single)) {
            fail(kind, "few together differ from alone", m.rows, m.columns, count);
        }
    }
    if (!is_in_halves) {
        return;
    }
    for (const float power : {0x1p-90f, 0x1p90f}) {
        std::vector<float> scaled = x;
        std::vector<float> results = single;
        for (float& value : scaled) {
            value *= power;
        }
        for (float& value : results) {
            value *= power;
        }
        if (!is_prefix(run(amx::kKernels, way, m, begin, m.rows, scaled, 0, kMost), results)) {
            fail(kind, "few differ at another magnitude", m.rows, m.columns, kMost);
        }
    }
}

void check(const Kind& kind, std::mt19937& random) {
    const std::int64_t rows = 1 + random() % 200;
    std::int64_t columns = 1 + random() % 900;
    if (kind.format == Format::kInt4 || kind.format == Format::kMxfp4) {
        columns = (columns / kind.group + 1) * kind.group;
    }
    const Stack stack(kind, 1, rows, columns, random);
    const Matrix& m = stack.matrix;
    const std::int64_t begin = random() % 3 == 0 ? random() % rows : 0;
    std::vector<float> x(static_cast<std::size_t>(kMost * columns));
    for (float& value : x) {
        value = static_cast<float>(random() % 2000) / 1000.0f - 1.0f;
    }
    const auto expected =
        run(scalar::kKernels, few_of(scalar::kKernels), m, begin, rows, x, 0, kMost);
    check_sparse(kind, m, begin, x, expected);
    const bool is_same_everywhere = kind.format == Format::kBf16 || kind.format == Format::kFp8;
    for (const ProductWay& way : {few_of(amx::kKernels), many_of(amx::kKernels)}) {
        const ProductWay one = is_same_everywhere ? few_of(amx::kKernels) : way;
        const auto single = alone(one, m, begin, x);
        if (relative_error(single, expected) > kTolerance) {
            fail(kind, "a token alone differs from scalar", rows, columns, 1);
        }
        for (const std::int64_t count : {2, 16, 17, 33, 40}) {
            const auto got = run(amx::kKernels, way, m, begin, rows, x, 0, count);
            if (!is_prefix(got, single)) {
                fail(kind, "together differ from alone", rows, columns, count);
            }
        }
    }
}

}  // namespace

int main(int, char** arguments) {
    std::mt19937 random(static_cast<unsigned>(std::strtoul(arguments[1], nullptr, 10)));
    for (int round = 0; round < kRounds; ++round) {
        for (const Kind& kind : kKinds) {
            check(kind, random);
        }
    }
    self_test(amx::kKernels, scalar::kKernels);
    self_test(kernels_in_two_pieces(Isa::kAmx), kernels_in_two_pieces(Isa::kScalar));
    return 0;
}
