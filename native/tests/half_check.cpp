// native/include/headwater/half.hpp against the CPU's own conversions, which round the same way,
// and where FP16 ends. tests/native/test_half.py builds and runs it. `half_check SEED`.
#include <immintrin.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>

#include "headwater/half.hpp"

using namespace headwater;

namespace {

void expect(bool is_so, const char* what, std::uint32_t bits) {
    if (!is_so) {
        std::fprintf(stderr, "%s: bits %08x\n", what, bits);
        std::exit(1);
    }
}

void check_float(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint16_t got = half_from_float(value);
    if (std::isnan(value)) {
        expect(std::isnan(float_from_half(got)), "NaN did not stay NaN", bits);
    } else if (std::fabs(value) >= 65504.0F) {
        expect(float_from_half(got) == std::copysign(65504.0F, value), "not the greatest", bits);
    } else {
        const std::uint16_t expected = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
        expect(got == expected, "rounded otherwise", bits);
    }
}

}  // namespace

int main(int, char** arguments) {
    for (std::uint32_t code = 0; code < 1U << 16; ++code) {
        const auto half = static_cast<std::uint16_t>(code);
        const float value = float_from_half(half);
        const float expected = _cvtsh_ss(half);
        expect(std::isnan(expected)
                   ? std::isnan(value)
                   : std::bit_cast<std::uint32_t>(value) == std::bit_cast<std::uint32_t>(expected),
               "read otherwise", code);
        // Ties, and what is next to them.
        for (const float up : {0.0F, std::numeric_limits<float>::infinity()}) {
            check_float(std::nextafter(value, up));
        }
        check_float(value * 1.00048828125F);
        check_float(value);
    }
    std::mt19937 random(static_cast<unsigned>(std::strtoul(arguments[1], nullptr, 10)));
    for (int i = 0; i < 5'000'000; ++i) {
        check_float(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
    }
    check_float(std::numeric_limits<float>::infinity());
    return 0;
}
