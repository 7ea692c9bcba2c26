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
#include <span>
#include <vector>

#include "headwater/linear_layer.hpp"
#include "headwater/moe_layer.hpp"
#include "samples.hpp"

using namespace headwater;

namespace {

constexpr int kRounds = 16;
constexpr std::int64_t kExperts = 6;
constexpr int kPerToken = 3;
constexpr std::int64_t kHidden = 328;
constexpr std::int64_t kIntermediate = 256;

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
                           const std::vector<std::int32_t>& experts, int num_shards,
                           std::span<const std::int32_t> first = {}) {
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
                   .mode = mode,
                   .first = first});
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
            // Some of them are chosen, and they come first.
            const std::int32_t first[] = {4, 0, 5};
            require_equal(run_moe(*pool, kernels, gate_up, down, x, experts, num_shards, first),
                          moe, "experts", kernels, pool->num_threads());
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
    two.keep_awake(true);
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
