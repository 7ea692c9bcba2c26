// ExpertWorker: a thread that computes routed experts whenever a GPU asks for them.
//
// A lane is memory that both sides see. The GPU writes a layer's inputs and then a ticket; the
// thread finds the ticket by looking again and again, computes the layer on the worker pool, writes
// the outputs and then the same ticket back. Nobody is called and nothing is queued, so a layer's
// hand-over takes the time of a few writes over the bus.
//
// While nobody asks, memory would be idle. So the GPU may say beforehand which experts it will
// probably ask for, and the pool then reads their weights into the caches until it does ask.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "headwater/moe_layer.hpp"
#include "headwater/worker_pool.hpp"

namespace headwater {

class ExpertWorker {
  public:
    // Lower bits of a ticket: the layer's index; above them a count, so that no two in a row are
    // equal.
    static constexpr int kLayerBits = 16;

    // Addresses in memory that the GPU can write to; they must outlive the worker.
    struct Lane {
        std::uint64_t* posted;
        std::uint64_t* done;
        // FP32 [tokens, hidden]; INT32 and FP32 [tokens, experts per token]; FP32 [tokens, hidden].
        const float* x;
        const std::int32_t* experts;
        const float* weights;
        float* output;
        // The ticket that will be posted, and the experts that will probably be asked for with it,
        // INT32 [tokens, experts per token], each token's likeliest first.
        std::uint64_t* predicted;
        const std::int32_t* predictions;
    };

    // Layers are numbered as in `layers`; all have the same sizes. `cache_bytes` is what may be
    // read ahead for one of them.
    ExpertWorker(WorkerPool& pool, std::vector<const MoeLayer*> layers, std::vector<Lane> lanes,
                 std::int64_t cache_bytes);
    ~ExpertWorker();
    ExpertWorker(const ExpertWorker&) = delete;
    ExpertWorker& operator=(const ExpertWorker&) = delete;

    // Tickets of the lane are answered from now on, for so many tokens each. While no lane is open
    // the thread sleeps; while one is, it takes a CPU, and the pool is its own.
    void open(int lane, std::int64_t num_tokens);
    // To be called when the GPU is done with the lane, or has failed: nothing is computed or read
    // ahead for it afterwards. Throws Failure(kInternal) when a ticket since `open` asked for what
    // there is not; the GPU got an answer all the same.
    void close(int lane);

    // Nanoseconds spent on computing, and tickets answered, since the beginning.
    std::int64_t busy_ns() const noexcept { return busy_ns_.load(std::memory_order_relaxed); }
    std::int64_t num_answered() const noexcept {
        return num_answered_.load(std::memory_order_relaxed);
    }
    // Bytes read ahead, for how many tickets, and for how many of them the likeliest expert was
    // then asked for.
    std::int64_t fetched_bytes() const noexcept {
        return fetched_bytes_.load(std::memory_order_relaxed);
    }
    std::int64_t num_predicted() const noexcept {
        return num_predicted_.load(std::memory_order_relaxed);
    }
    std::int64_t num_right() const noexcept { return num_right_.load(std::memory_order_relaxed); }

  private:
    struct State {
        std::atomic<std::int64_t> num_tokens = 0;
        std::uint64_t answered = 0;
        // The ticket for which `fetched` was read ahead.
        std::uint64_t prepared = 0;
        std::vector<std::int32_t> fetched;
    };

    void work();
    bool look_at(std::size_t lane);
    void answer(std::size_t lane, std::uint64_t ticket, std::int64_t num_tokens);
    // Reads ahead for the lane, if there is a new prediction, until somebody asks.
    bool prepare(std::size_t lane);
    // Whether there is something else to do than to read ahead.
    bool is_wanted() const noexcept;
    // Of a lane with so many tokens.
    std::size_t num_choices(std::int64_t num_tokens) const;
    std::string problem_of(std::uint64_t ticket, std::span<const std::int32_t> experts) const;
    void report(std::string problem);

    WorkerPool& pool_;
    const std::vector<const MoeLayer*> layers_;
    const std::vector<Lane> lanes_;
    const std::int64_t cache_bytes_;
    std::unique_ptr<State[]> states_;
    std::atomic<int> num_open_ = 0;
    std::atomic<bool> is_stopping_ = false;
    std::atomic<std::int64_t> busy_ns_ = 0;
    std::atomic<std::int64_t> num_answered_ = 0;
    std::atomic<std::int64_t> fetched_bytes_ = 0;
    std::atomic<std::int64_t> num_predicted_ = 0;
    std::atomic<std::int64_t> num_right_ = 0;
    // Held by whoever uses the pool.
    std::mutex pool_use_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::string problem_;
    std::thread thread_;
};

}  // namespace headwater
