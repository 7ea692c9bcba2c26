#include "headwater/expert_worker.hpp"

#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <span>
#include <utility>

#include "headwater/failure.hpp"
#include "hybrid/expert_fetch.hpp"

namespace headwater {

namespace {

constexpr std::uint64_t kLayerMask = (std::uint64_t{1} << ExpertWorker::kLayerBits) - 1;

}  // namespace

ExpertWorker::ExpertWorker(WorkerPool& pool, std::vector<const MoeLayer*> layers,
                           std::vector<Lane> lanes, std::int64_t cache_bytes)
    : pool_(pool),
      layers_(std::move(layers)),
      lanes_(std::move(lanes)),
      cache_bytes_(cache_bytes),
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
    }
    {
        // After a step that failed the thread may still be at it.
        const std::lock_guard use(pool_use_);
        if (num_open_ == 0) {
            pool_.keep_awake(false);
        }
        const std::lock_guard lock(mutex_);
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
            bool is_busy = false;
            for (std::size_t i = 0; i < lanes_.size() && !is_busy; ++i) {
                const std::size_t lane = (first + i) % lanes_.size();
                if (look_at(lane)) {
                    first = lane + 1;
                    is_busy = true;
                }
            }
            for (std::size_t lane = 0; lane < lanes_.size() && !is_busy; ++lane) {
                is_busy = prepare(lane);
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
    const std::uint64_t ticket =
        std::atomic_ref(*lanes_[lane].posted).load(std::memory_order_acquire);
    if (state.num_tokens == 0 || ticket == state.answered) {
        return false;
    }
    const std::lock_guard use(pool_use_);
    const std::int64_t num_tokens = state.num_tokens;
    if (num_tokens == 0) {
        return false;
    }
    state.answered = ticket;
    answer(lane, ticket, num_tokens);
    return true;
}

void ExpertWorker::answer(std::size_t lane, std::uint64_t ticket, std::int64_t num_tokens) {
    const auto began_at = std::chrono::steady_clock::now();
    const Lane& memory = lanes_[lane];
    const std::span chosen(memory.experts, num_choices(num_tokens));
    if (std::string problem = problem_of(ticket, chosen); !problem.empty()) {
        report(std::move(problem));
    } else {
        const MoeLayer& layer = *layers_[ticket & kLayerMask];
        const State& state = states_[lane];
        const std::span<const std::int32_t> fetched =
            state.prepared == ticket ? state.fetched : std::span<const std::int32_t>();
        // After the last layer the CPUs are for what comes then.
        pool_.keep_awake((ticket & kLayerMask) + 1 < layers_.size());
        layer.run({.x = memory.x,
                   .x_stride = layer.hidden_size(),
                   .num_tokens = num_tokens,
                   .experts = memory.experts,
                   .weights = memory.weights,
                   .output = memory.output,
                   .output_stride = layer.hidden_size(),
                   .mode = Mode::kDecode,
                   .first = fetched});
        if (!fetched.empty() && std::ranges::count(chosen, fetched.front()) > 0) {
            num_right_.fetch_add(1, std::memory_order_relaxed);
        }
    }
    const std::chrono::nanoseconds taken = std::chrono::steady_clock::now() - began_at;
    busy_ns_.fetch_add(taken.count(), std::memory_order_relaxed);
    num_answered_.fetch_add(1, std::memory_order_relaxed);
    std::atomic_ref(*memory.done).store(ticket, std::memory_order_release);
}

bool ExpertWorker::prepare(std::size_t lane) {
    State& state = states_[lane];
    const std::uint64_t ticket =
        std::atomic_ref(*lanes_[lane].predicted).load(std::memory_order_acquire);
    // A prediction that comes after its question is of no use any more.
    if (state.num_tokens == 0 || ticket <= state.answered || ticket == state.prepared) {
        return false;
    }
    const std::lock_guard use(pool_use_);
    const std::int64_t num_tokens = state.num_tokens;
    if (num_tokens == 0) {
        return false;
    }
    state.prepared = ticket;
    state.fetched.clear();
    // Every token's likeliest expert first, then every token's second.
    const auto choices = static_cast<std::size_t>(layers_[0]->experts_per_token());
    const std::span predictions(lanes_[lane].predictions, num_choices(num_tokens));
    for (std::size_t choice = 0; choice < choices; ++choice) {
        for (std::size_t at = choice; at < predictions.size(); at += choices) {
            if (std::ranges::count(state.fetched, predictions[at]) == 0) {
                state.fetched.push_back(predictions[at]);
            }
        }
    }
    if (std::string problem = problem_of(ticket, state.fetched); !problem.empty()) {
        state.fetched.clear();
        report(std::move(problem));
        return false;
    }
    const ExpertFetch fetch(pool_, *layers_[ticket & kLayerMask], state.fetched, cache_bytes_);
    auto job = [&](int worker) noexcept {
        fetched_bytes_.fetch_add(fetch.run(worker, [this] { return is_wanted(); }),
                                 std::memory_order_relaxed);
    };
    pool_.run(job);
    num_predicted_.fetch_add(1, std::memory_order_relaxed);
    return true;
}

bool ExpertWorker::is_wanted() const noexcept {
    for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
        if (states_[lane].num_tokens.load(std::memory_order_relaxed) > 0 &&
            std::atomic_ref(*lanes_[lane].posted).load(std::memory_order_relaxed) !=
                states_[lane].answered) {
            return true;
        }
    }
    return is_stopping_ || num_open_.load(std::memory_order_relaxed) == 0;
}

std::size_t ExpertWorker::num_choices(std::int64_t num_tokens) const {
    return static_cast<std::size_t>(num_tokens * layers_[0]->experts_per_token());
}

std::string ExpertWorker::problem_of(std::uint64_t ticket,
                                     std::span<const std::int32_t> experts) const {
    const std::uint64_t index = ticket & kLayerMask;
    if (index >= layers_.size()) {
        return "layer " + std::to_string(index) + " of " + std::to_string(layers_.size());
    }
    for (const std::int32_t expert : experts) {
        if (expert < 0 || expert >= layers_[index]->num_experts()) {
            return "expert " + std::to_string(expert) + " of " +
                   std::to_string(layers_[index]->num_experts());
        }
    }
    return {};
}

void ExpertWorker::report(std::string problem) {
    const std::lock_guard lock(mutex_);
    problem_ = std::move(problem);
}

}  // namespace headwater
