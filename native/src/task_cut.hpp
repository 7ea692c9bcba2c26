// How layers cut rows into tasks, and lay out the memory of one run.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace headwater {

// Rows per task are a multiple of this: whole tiles, whole cache lines of output.
inline constexpr std::int64_t kRowUnit = 16;

inline std::int64_t ceil_div(std::int64_t value, std::int64_t unit) {
    return (value + unit - 1) / unit;
}

// Tasks that others follow may be long; of the last ones a thread waits half of one, on average,
// for the others. 16 Xeon cores, FP8, shares of the speed of the memory: 6 last tasks 0.83 to 0.85,
// 16 0.91 to 0.94, 32 0.92 to 0.93.
inline constexpr std::int64_t kTasksPerThread = 6;
inline constexpr std::int64_t kLastTasksPerThread = 16;

// Rows per task, where `num_items` matrices of `rows` x `row_bytes` are shared out among
// `num_threads`: large enough to read memory in long runs, small enough for an even end.
inline std::int64_t rows_per_task(std::int64_t rows, std::int64_t row_bytes, std::int64_t num_items,
                                  int num_threads, std::int64_t tasks_per_thread) {
    constexpr std::int64_t kMaxBytes = 4 << 20;
    constexpr std::int64_t kMinBytes = 32 << 10;
    std::int64_t result = std::min(rows, std::max<std::int64_t>(kMaxBytes / row_bytes, 1));
    if (num_threads > 1) {
        const std::int64_t even = rows * num_items / (tasks_per_thread * num_threads);
        result = std::min(result, std::max(even, kMinBytes / row_bytes));
    }
    return ceil_div(std::max<std::int64_t>(result, 1), kRowUnit) * kRowUnit;
}

// Hands out parts of one block of memory; without a block, it only counts what they need.
class Carver {
  public:
    explicit Carver(std::byte* base) : base_(base) {}

    template <class T>
    T* take(std::int64_t count) {
        constexpr std::int64_t kLine = 64;
        auto* part = reinterpret_cast<T*>(base_ == nullptr ? nullptr : base_ + used_);
        used_ += ceil_div(count * static_cast<std::int64_t>(sizeof(T)), kLine) * kLine;
        return part;
    }
    std::int64_t used() const noexcept { return used_; }

  private:
    std::byte* base_;
    std::int64_t used_ = 0;
};

}  // namespace headwater
