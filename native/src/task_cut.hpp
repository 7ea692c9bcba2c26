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

// Rows per task, where `num_items` matrices of `rows` x `row_bytes` are shared out among
// `num_threads`: large enough to read memory in long runs, small enough for an even end.
inline std::int64_t rows_per_task(std::int64_t rows, std::int64_t row_bytes, std::int64_t num_items,
                                  int num_threads) {
    constexpr std::int64_t kMaxBytes = 4 << 20;
    constexpr std::int64_t kMinBytes = 32 << 10;
    constexpr std::int64_t kTasksPerThread = 6;
    std::int64_t result = std::min(rows, std::max<std::int64_t>(kMaxBytes / row_bytes, 1));
    if (num_threads > 1) {
        const std::int64_t even = rows * num_items / (kTasksPerThread * num_threads);
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
