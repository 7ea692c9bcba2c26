// WorkerPool: the process's pinned threads, which help the calling thread with one job at a time.
//
// A job is a function that takes pieces of work from a shared counter until none is left. Workers
// join when they come in time, and the caller never waits for one that has not joined: where cores
// are scarce or stolen, the job gets slower but does not stall. Idle workers spin for a short
// while, so that the next job finds them awake, and then sleep.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace headwater {

// Memory that only grows, aligned to a cache line; its content does not outlive the next growth.
class Arena {
  public:
    // At least `num_bytes` of it; allocates only when that is more than ever before.
    std::byte* reserve(std::int64_t num_bytes);
    std::byte* data() const noexcept { return data_.get(); }

  private:
    struct Free {
        void operator()(std::byte* p) const noexcept;
    };
    std::unique_ptr<std::byte, Free> data_;
    std::int64_t capacity_ = 0;
};

// Waiting for another thread that is about to finish: first politely busy, then giving way.
class Backoff {
  public:
    void wait() noexcept;

  private:
    int count_ = 0;
};

class WorkerPool {
  public:
    struct Options {
        // Including the caller.
        int num_threads = 1;
        // How long an idle worker stays awake; 0 when there are more threads than CPUs.
        std::chrono::microseconds spin{100};
        // Binds each worker to a CPU of its own, unless there are more threads than CPUs.
        bool pin = true;
    };

    // Throws Failure(kConfig) unless 1 <= num_threads <= 1024 and spin >= 0.
    explicit WorkerPool(const Options& options);
    ~WorkerPool();
    WorkerPool(const WorkerPool&) = delete;
    WorkerPool& operator=(const WorkerPool&) = delete;

    int num_threads() const noexcept { return num_threads_; }
    // CPUs of the workers, the caller's (worker 0) first; empty when they are not pinned.
    const std::vector<int>& cpus() const noexcept { return cpus_; }
    // Which of `num_shards` equal parts of the workers, in the order of their NUMA nodes, this is.
    int shard_of(int worker, int num_shards) const noexcept {
        return worker * num_shards / num_threads_;
    }
    // The workers of a part: `size` of them from `first` on.
    struct Team {
        int first;
        int size;
    };
    Team team_of(int shard, int num_shards) const noexcept {
        const int first = (shard * num_threads_ + num_shards - 1) / num_shards;
        return {first, ((shard + 1) * num_threads_ + num_shards - 1) / num_shards - first};
    }
    // While it is wanted, idle workers do not sleep, if they have CPUs of their own: they would
    // have to be woken for each of many short jobs.
    void keep_awake(bool is_wanted) noexcept { is_kept_awake_ = is_wanted; }
    // Binds the calling thread to the CPU that is kept free for it. Does nothing when not pinned.
    void pin_caller() const;

    // Calls job(worker) on this thread, as worker 0, and on the workers that join. On return, all
    // that joined are done. Not to be called by two threads at once, nor from within a job; the
    // job must not throw.
    template <class Job>
    void run(Job& job) noexcept {
        run_raw([](void* context, int worker) { (*static_cast<Job*>(context))(worker); }, &job);
    }

    // Working memory of each worker and of the job as a whole. Between jobs only: grows them.
    void reserve_scratch(std::int64_t bytes_per_worker);
    std::byte* scratch(int worker) const noexcept;
    Arena& shared() noexcept { return shared_; }

  private:
    using RawJob = void (*)(void* context, int worker);

    void run_raw(RawJob job, void* context) noexcept;
    void work(int worker) noexcept;
    // Waits until the number of the latest job is not `seen`.
    void await_job(std::uint32_t seen) noexcept;
    void await_helpers() noexcept;

    const int num_threads_;
    std::chrono::nanoseconds spin_;
    std::vector<int> cpus_;
    std::vector<Arena> scratch_;
    Arena shared_;
    std::atomic<bool> is_stopping_ = false;
    std::atomic<bool> is_kept_awake_ = false;

    RawJob job_ = nullptr;
    void* context_ = nullptr;
    // Number of the job (upper half), whether it may be joined (bit 31), how many are at it.
    alignas(64) std::atomic<std::uint64_t> state_ = 0;
    std::atomic<bool> is_caller_asleep_ = false;
    // Number of the latest job, and how many workers sleep until it changes.
    alignas(64) std::atomic<std::uint32_t> latest_job_ = 0;
    std::atomic<int> num_asleep_ = 0;

    std::vector<std::thread> threads_;
};

}  // namespace headwater
