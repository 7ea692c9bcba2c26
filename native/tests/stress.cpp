// Layers on one, few and too many threads, over and over: meant to run under a sanitizer.
//
//   cmake -S native -B build/tsan -DHEADWATER_SANITIZE=thread
//   cmake --build build/tsan --target headwater_stress && build/tsan/headwater_stress
//
// Fails when a result differs in any bit from that of one thread. The values do not matter here:
// tests/native compares them with the exact ones.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "headwater/linear_layer.hpp"
#include "headwater/moe_layer.hpp"

using namespace headwater;

namespace {

constexpr int kRounds = 16;
constexpr std::int64_t kExperts = 6;
constexpr int kPerToken = 3;
constexpr std::int64_t kHidden = 328;
constexpr std::int64_t kIntermediate = 256;

struct Kind {
    Format format;
    ScaleType scale_type;
    std::int64_t group;
    bool has_zeros;
};

constexpr Kind kKinds[] = {
    {Format::kBf16, ScaleType::kNone, 0, false},
    {Format::kFp8, ScaleType::kF32, kFp8Block, false},
    {Format::kInt4, ScaleType::kBf16, 32, false},
    {Format::kInt4, ScaleType::kBf16, 64, true},
    {Format::kMxfp4, ScaleType::kE8m0, kMxfp4Group, false},
};

// Exactly as many bytes as the matrices need, so that reading past them is found.
struct Stack {
    Stack(const Kind& kind, std::int64_t members, std::int64_t rows, std::int64_t columns,
          std::mt19937& random) {
        const std::int64_t groups = kind.group == 0 ? 0 : (columns + kind.group - 1) / kind.group;
        const std::int64_t scale_rows =
            kind.format == Format::kFp8 ? (rows + kFp8Block - 1) / kFp8Block : rows;
        const std::int64_t scale_bytes = kind.scale_type == ScaleType::kF32    ? 4
                                         : kind.scale_type == ScaleType::kBf16 ? 2
                                                                               : 1;
        matrix = {.format = kind.format,
                  .scale_type = kind.scale_type,
                  .rows = rows,
                  .columns = columns,
                  .group = kind.group,
                  .row_bytes = packed_bytes(kind.format, columns),
                  .scale_row_bytes = groups * scale_bytes,
                  .zero_row_bytes = groups};
        data.resize(static_cast<std::size_t>(members * rows * matrix.row_bytes));
        for (std::uint8_t& byte : data) {
            // Finite in every format.
            byte = static_cast<std::uint8_t>(random() & 0xBB);
        }
        scales.assign(static_cast<std::size_t>(members * scale_rows * matrix.scale_row_bytes),
                      0x3C);
        zeros.assign(static_cast<std::size_t>(kind.has_zeros ? members * rows * groups : 0), 7);
        matrix.data = reinterpret_cast<const std::byte*>(data.data());
        matrix.scales = reinterpret_cast<const std::byte*>(scales.data());
        matrix.zeros = kind.has_zeros ? zeros.data() : nullptr;
    }

    std::vector<std::uint8_t> data;
    std::vector<std::uint8_t> scales;
    std::vector<std::uint8_t> zeros;
    Matrix matrix;
};

void require_equal(const std::vector<float>& got, const std::vector<float>& expected,
                   const char* what, const Kernels& kernels, int num_threads) {
    if (std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)) != 0) {
        std::fprintf(stderr, "%s on %d threads with %s differs from one thread\n", what,
                     num_threads, isa_name(kernels.isa));
        std::exit(1);
    }
}

std::vector<float> run_moe(WorkerPool& pool, const Kernels& kernels, const Stack& gate_up,
                           const Stack& down, const std::vector<float>& x,
                           const std::vector<std::int32_t>& experts, int num_shards) {
    const MoeLayer layer(pool, kernels,
                         stacked_experts(gate_up.matrix, down.matrix, kExperts, num_shards),
                         {.experts_per_token = kPerToken});
    const std::vector<float> weights(experts.size(), 0.25f);
    std::vector<float> output(x.size());
    for (const Mode mode : {Mode::kDecode, Mode::kPrefill}) {
        layer.run({.x = x.data(),
                   .x_stride = kHidden,
                   .num_tokens = static_cast<std::int64_t>(experts.size()) / kPerToken,
                   .experts = experts.data(),
                   .weights = weights.data(),
                   .output = output.data(),
                   .output_stride = kHidden,
                   .mode = mode});
    }
    return output;
}

std::vector<float> run_linear(WorkerPool& pool, const Kernels& kernels, const Stack& stack,
                              const std::vector<float>& x) {
    const std::int64_t num_tokens = static_cast<std::int64_t>(x.size()) / kHidden;
    std::vector<float> output(static_cast<std::size_t>(num_tokens * kIntermediate));
    const LinearPart part{&stack.matrix, output.data(), kIntermediate};
    linear(pool, kernels, {&part, 1}, x.data(), kHidden, num_tokens, Mode::kDecode);
    return output;
}

void stress(const Kernels& kernels, const Kind& kind, WorkerPool& alone,
            std::vector<WorkerPool*>& pools, std::mt19937& random) {
    const Stack gate_up(kind, 2 * kExperts, kIntermediate, kHidden, random);
    const Stack down(kind, kExperts, kHidden, kIntermediate, random);
    for (int round = 0; round < kRounds; ++round) {
        const int num_tokens = round % 4 == 3 ? 11 : 1 + round % 3;
        std::vector<float> x(static_cast<std::size_t>(num_tokens * kHidden));
        for (float& value : x) {
            value = static_cast<float>(random() % 1000) / 500.0f - 1.0f;
        }
        std::vector<std::int32_t> experts;
        for (int i = 0; i < num_tokens * kPerToken; ++i) {
            experts.push_back(static_cast<std::int32_t>(random() % kExperts));
        }
        const int num_shards = 1 + round % 2;
        const auto moe = run_moe(alone, kernels, gate_up, down, x, experts, num_shards);
        const auto product = run_linear(alone, kernels, gate_up, x);
        for (WorkerPool* pool : pools) {
            require_equal(run_moe(*pool, kernels, gate_up, down, x, experts, num_shards), moe,
                          "experts", kernels, pool->num_threads());
            require_equal(run_linear(*pool, kernels, gate_up, x), product, "linear", kernels,
                          pool->num_threads());
        }
    }
}

}  // namespace

int main() {
    std::mt19937 random(1);
    WorkerPool alone({.num_threads = 1});
    WorkerPool two({.num_threads = 2});
    WorkerPool sleepy({.num_threads = 3, .spin = std::chrono::microseconds(0)});
    WorkerPool many({.num_threads = 9, .spin = std::chrono::microseconds(20)});
    std::vector<WorkerPool*> pools = {&two, &sleepy, &many};
    for (const Isa isa : supported_isas()) {
        for (const Kind& kind : kKinds) {
            // The scalar kernels are too slow for more than one format.
            if (isa != Isa::kScalar || kind.format == Format::kFp8) {
                stress(kernels_of(isa), kind, alone, pools, random);
            }
        }
        std::printf("%s: equal on all threads\n", isa_name(isa));
    }
    return 0;
}
