// BF16 as it lies in memory: the upper half of an FP32 word.
#pragma once

#include <bit>
#include <cstdint>

namespace headwater {

// To the nearest, ties to even; NaN stays NaN.
inline std::uint16_t bf16_from_float(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if ((bits & 0x7FFFFFFFU) > 0x7F800000U) {
        return static_cast<std::uint16_t>(bits >> 16 | 0x40U);
    }
    return static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16);
}

inline float float_from_bf16(std::uint16_t bits) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

}  // namespace headwater
