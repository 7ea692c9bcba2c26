#include "headwater/worker_pool.hpp"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <new>
#include <string>

#include "headwater/cpu.hpp"
#include "headwater/failure.hpp"

namespace headwater {

namespace {

constexpr int kMaxThreads = 1024;
constexpr std::size_t kLine = 64;
constexpr std::uint64_t kIsOpen = 1ULL << 31;
constexpr std::uint64_t kHelpers = kIsOpen - 1;

std::uint32_t job_number(std::uint64_t state) { return static_cast<std::uint32_t>(state >> 32); }

void futex_wait(const void* address, std::uint32_t expected) noexcept {
    syscall(SYS_futex, address, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(const void* address, int count) noexcept {
    syscall(SYS_futex, address, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

void pin(pthread_t thread, int cpu) noexcept {
    const std::size_t num_bytes = CPU_ALLOC_SIZE(cpu + 1);
    cpu_set_t* set = CPU_ALLOC(cpu + 1);
    CPU_ZERO_S(num_bytes, set);
    CPU_SET_S(cpu, num_bytes, set);
    // Fails only when the cpuset has just shrunk; the thread then runs where it may.
    pthread_setaffinity_np(thread, num_bytes, set);
    CPU_FREE(set);
}

}  // namespace

void Arena::Free::operator()(std::byte* p) const noexcept { std::free(p); }

std::byte* Arena::reserve(std::int64_t num_bytes) {
    if (num_bytes > capacity_) {
        const std::size_t rounded =
            (static_cast<std::size_t>(num_bytes) + kLine - 1) / kLine * kLine;
        auto* fresh = static_cast<std::byte*>(std::aligned_alloc(kLine, rounded));
        if (fresh == nullptr) {
            throw std::bad_alloc();
        }
        data_.reset(fresh);
        capacity_ = static_cast<std::int64_t>(rounded);
    }
    return data_.get();
}

void Backoff::wait() noexcept {
    constexpr int kBusyRounds = 200;
    if (++count_ < kBusyRounds) {
        _mm_pause();
    } else {
        sched_yield();
    }
}

WorkerPool::WorkerPool(const Options& options)
    : num_threads_(options.num_threads), spin_(options.spin) {
    if (num_threads_ < 1 || num_threads_ > kMaxThreads) {
        throw Failure(FailureKind::kConfig, "threads: expected 1 to " +
                                                std::to_string(kMaxThreads) + ", got " +
                                                std::to_string(num_threads_));
    }
    if (spin_.count() < 0) {
        throw Failure(FailureKind::kConfig, "spin: expected 0 or more microseconds, got " +
                                                std::to_string(options.spin.count()));
    }
    scratch_.resize(static_cast<std::size_t>(num_threads_));
    const std::vector<int> places = worker_cpus(num_threads_);
    if (places.empty()) {
        spin_ = std::chrono::nanoseconds(0);
    } else if (options.pin) {
        cpus_ = places;
    }
    for (int worker = 1; worker < num_threads_; ++worker) {
        threads_.emplace_back([this, worker] { work(worker); });
        if (!cpus_.empty()) {
            pin(threads_.back().native_handle(), cpus_[static_cast<std::size_t>(worker)]);
        }
    }
}

WorkerPool::~WorkerPool() {
    is_stopping_ = true;
    latest_job_.fetch_add(1);
    futex_wake(&latest_job_, num_threads_);
    for (std::thread& thread : threads_) {
        thread.join();
    }
}

void WorkerPool::pin_caller() const {
    if (!cpus_.empty()) {
        pin(pthread_self(), cpus_.front());
    }
}

void WorkerPool::reserve_scratch(std::int64_t bytes_per_worker) {
    for (Arena& arena : scratch_) {
        arena.reserve(bytes_per_worker);
    }
}

std::byte* WorkerPool::scratch(int worker) const noexcept {
    return scratch_[static_cast<std::size_t>(worker)].data();
}

void WorkerPool::run_raw(RawJob job, void* context) noexcept {
    if (threads_.empty()) {
        job(context, 0);
        return;
    }
    job_ = job;
    context_ = context;
    const std::uint32_t number = latest_job_.load(std::memory_order_relaxed) + 1;
    state_.store(static_cast<std::uint64_t>(number) << 32 | kIsOpen);
    // Either this store is seen by a worker about to sleep, or its count is seen here.
    latest_job_.store(number);
    if (num_asleep_.load() > 0) {
        futex_wake(&latest_job_, num_threads_);
    }
    job(context, 0);
    state_.fetch_and(~kIsOpen);
    await_helpers();
}

void WorkerPool::await_helpers() noexcept {
    Backoff backoff;
    const auto start = std::chrono::steady_clock::now();
    for (int round = 1; (state_.load() & kHelpers) != 0; ++round) {
        if (round % 64 != 0 || std::chrono::steady_clock::now() - start < spin_) {
            backoff.wait();
            continue;
        }
        is_caller_asleep_.store(true);
        const auto low_half = static_cast<std::uint32_t>(state_.load());
        if (low_half != 0) {
            // The count is in the lower half, which comes first in memory.
            futex_wait(&state_, low_half);
        }
        is_caller_asleep_.store(false);
    }
}

void WorkerPool::await_job(std::uint32_t seen) noexcept {
    const auto start = std::chrono::steady_clock::now();
    for (int round = 1; latest_job_.load() == seen; ++round) {
        if (round % 64 != 0 || std::chrono::steady_clock::now() - start < spin_ ||
            (is_kept_awake_.load(std::memory_order_relaxed) && spin_.count() > 0)) {
            _mm_pause();
            continue;
        }
        num_asleep_.fetch_add(1);
        if (latest_job_.load() == seen) {
            futex_wait(&latest_job_, seen);
        }
        num_asleep_.fetch_sub(1);
    }
}

void WorkerPool::work(int worker) noexcept {
    std::uint32_t seen = 0;
    while (true) {
        await_job(seen);
        if (is_stopping_) {
            return;
        }
        seen = latest_job_.load();
        std::uint64_t state = state_.load();
        while ((state & kIsOpen) != 0) {
            if (!state_.compare_exchange_weak(state, state + 1)) {
                continue;
            }
            seen = job_number(state);
            job_(context_, worker);
            const std::uint64_t left = state_.fetch_sub(1) - 1;
            if ((left & (kIsOpen | kHelpers)) == 0 && is_caller_asleep_.load()) {
                futex_wake(&state_, 1);
            }
            break;
        }
    }
}

}  // namespace headwater
