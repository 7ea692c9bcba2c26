// FP16 as keys and values lie in memory.
#pragma once

#include <bit>
#include <cstdint>

namespace headwater {

// To the nearest, ties to even. What lies beyond the greatest number, 65504, becomes it: one entry
// that is off by a little is better than an answer of NaN. NaN stays NaN.
inline std::uint16_t half_from_float(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = bits >> 16 & 0x8000U;
    const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
    if (magnitude > 0x7F800000U) {
        return static_cast<std::uint16_t>(sign | 0x7E00U);
    }
    if (magnitude >= 0x477FE000U) {
        return static_cast<std::uint16_t>(sign | 0x7BFFU);
    }
    if (magnitude < 0x38800000U) {
        // A unit of 0.5 is that of FP16's subnormal numbers.
        const float sum = std::bit_cast<float>(magnitude) + 0.5F;
        return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(sum) - 0x3F000000U));
    }
    const std::uint32_t rounded = magnitude + 0xFFFU + (magnitude >> 13 & 1U);
    return static_cast<std::uint16_t>(sign | (rounded - 0x38000000U) >> 13);
}

inline float float_from_half(std::uint16_t bits) {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
    const std::uint32_t exponent = bits >> 10 & 31U;
    const std::uint32_t fraction = bits & 0x3FFU;
    if (exponent == 0) {
        const float value = static_cast<float>(fraction) * 0x1p-24F;
        return sign == 0 ? value : -value;
    }
    if (exponent == 31) {
        return std::bit_cast<float>(sign | 0x7F800000U | fraction << 13);
    }
    return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

}  // namespace headwater
