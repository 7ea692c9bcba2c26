// Prefetches, as instructions that no compiler takes for idle: GCC 12 drops functions that do
// nothing but __builtin_prefetch.
#pragma once

#include <cstddef>

namespace headwater {
namespace {

// The line at `data` is brought into the first-level cache.
inline void fetch_near(const void* data) {
    asm volatile("prefetcht0 %0" : : "m"(*static_cast<const std::byte*>(data)));
}

// Into the second-level cache.
inline void fetch_far(const void* data) {
    asm volatile("prefetcht1 %0" : : "m"(*static_cast<const std::byte*>(data)));
}

}  // namespace
}  // namespace headwater
