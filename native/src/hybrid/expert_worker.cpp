#include "headwater/expert_worker.hpp"

#include <immintrin.h>

#include <chrono>
#include <utility>

#include "headwater/failure.hpp"

namespace headwater {

namespace {

constexpr std::uint64_t kLayerMask = (std::uint64_t{1} << ExpertWorker::kLayerBits) - 1;

}  // namespace

ExpertWorker::ExpertWorker(WorkerPool& pool, std::vector<const MoeLayer*> layers,
                           std::vector<Lane> lanes)
    : pool_(pool),
      layers_(std::move(layers)),
      lanes_(std::move(lanes)),
      states_(std::make_unique<State[]>(lanes_.size())) {
    if (layers_.empty() || layers_.size() > kLayerMask) {
        throw Failure(FailureKind::kInternal,
                      "expert worker: " + std::to_string(layers_.size()) + " layers");
    }
    for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
        states_[lane].answered = std::atomic_ref(*lanes_[lane].posted).load();
    }
    thread_ = std::thread([this] { work(); });
}

ExpertWorker::~ExpertWorker() {
    {
        const std::lock_guard lock(mutex_);
        is_stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void ExpertWorker::open(int lane, std::int64_t num_tokens) {
    if (lane < 0 || static_cast<std::size_t>(lane) >= lanes_.size() || num_tokens < 1) {
        throw Failure(FailureKind::kInternal, "expert worker: lane " + std::to_string(lane) +
                                                  " with " + std::to_string(num_tokens) +
                                                  " tokens");
    }
    {
        const std::lock_guard lock(mutex_);
        if (states_[static_cast<std::size_t>(lane)].num_tokens.exchange(num_tokens) == 0) {
            num_open_.fetch_add(1);
        }
    }
    changed_.notify_all();
}

void ExpertWorker::close(int lane) {
    std::string problem;
    {
        const std::lock_guard lock(mutex_);
        if (states_[static_cast<std::size_t>(lane)].num_tokens.exchange(0) != 0) {
            num_open_.fetch_sub(1);
        }
        problem = std::exchange(problem_, {});
    }
    if (!problem.empty()) {
        throw Failure(FailureKind::kInternal, "expert worker: " + problem);
    }
}

void ExpertWorker::work() {
    pool_.pin_caller();
    while (true) {
        {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [this] { return is_stopping_ || num_open_ > 0; });
        }
        // A lane that was answered last is looked at last, so that two take turns.
        std::size_t first = 0;
        while (num_open_.load(std::memory_order_relaxed) > 0 && !is_stopping_) {
            for (std::size_t i = 0; i < lanes_.size(); ++i) {
                const std::size_t lane = (first + i) % lanes_.size();
                if (look_at(lane)) {
                    first = lane + 1;
                    break;
                }
            }
            _mm_pause();
        }
        if (is_stopping_) {
            return;
        }
    }
}

bool ExpertWorker::look_at(std::size_t lane) {
    State& state = states_[lane];
    const std::int64_t num_tokens = state.num_tokens.load(std::memory_order_relaxed);
    if (num_tokens == 0) {
        return false;
    }
    const std::uint64_t ticket =
        std::atomic_ref(*lanes_[lane].posted).load(std::memory_order_acquire);
    if (ticket == state.answered) {
        return false;
    }
    state.answered = ticket;
    answer(lanes_[lane], ticket, num_tokens);
    return true;
}

void ExpertWorker::answer(const Lane& lane, std::uint64_t ticket, std::int64_t num_tokens) {
    const auto began_at = std::chrono::steady_clock::now();
    if (std::string problem = problem_of(lane, ticket, num_tokens); !problem.empty()) {
        const std::lock_guard lock(mutex_);
        problem_ = std::move(problem);
    } else {
        const MoeLayer& layer = *layers_[ticket & kLayerMask];
        layer.run({.x = lane.x,
                   .x_stride = layer.hidden_size(),
                   .num_tokens = num_tokens,
                   .experts = lane.experts,
                   .weights = lane.weights,
                   .output = lane.output,
                   .output_stride = layer.hidden_size(),
                   .mode = Mode::kDecode});
    }
    const std::chrono::nanoseconds taken = std::chrono::steady_clock::now() - began_at;
    busy_ns_.fetch_add(taken.count(), std::memory_order_relaxed);
    num_answered_.fetch_add(1, std::memory_order_relaxed);
    std::atomic_ref(*lane.done).store(ticket, std::memory_order_release);
}

std::string ExpertWorker::problem_of(const Lane& lane, std::uint64_t ticket,
                                     std::int64_t num_tokens) const {
    const std::uint64_t index = ticket & kLayerMask;
    if (index >= layers_.size()) {
        return "layer " + std::to_string(index) + " of " + std::to_string(layers_.size());
    }
    const MoeLayer& layer = *layers_[index];
    for (std::int64_t i = 0; i < num_tokens * layer.experts_per_token(); ++i) {
        if (lane.experts[i] < 0 || lane.experts[i] >= layer.num_experts()) {
            return "expert " + std::to_string(lane.experts[i]) + " of " +
                   std::to_string(layer.num_experts());
        }
    }
    return {};
}

}  // namespace headwater
