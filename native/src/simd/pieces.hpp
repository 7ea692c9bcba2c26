// Cutting work into pieces whose sizes are compile-time constants; for the algorithms beside it.
#pragma once

#include <cstdint>

namespace headwater {
namespace {

inline std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline std::int64_t larger(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

// Calls visit<count>() for a count of 1 to Max.
template <int Max, typename Visit>
inline void with_constant(std::int64_t count, const Visit& visit) {
    if (count == Max) {
        visit.template operator()<Max>();
    } else if constexpr (Max > 1) {
        with_constant<Max - 1>(count, visit);
    }
}

// Calls visit(first, count) for pieces of at most `max`, cut evenly.
template <typename Visit>
inline void for_pieces(std::int64_t total, std::int64_t max, const Visit& visit) {
    const std::int64_t num_pieces = (total + max - 1) / max;
    std::int64_t first = 0;
    for (std::int64_t piece = 1; piece <= num_pieces; ++piece) {
        const std::int64_t stop = total * piece / num_pieces;
        visit(first, stop - first);
        first = stop;
    }
}

}  // namespace
}  // namespace headwater
