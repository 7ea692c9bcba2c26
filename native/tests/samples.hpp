// Random matrices of every format, for the programs beside this file.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "headwater/matrix.hpp"

namespace headwater {
namespace {

struct Kind {
    Format format;
    ScaleType scale_type;
    std::int64_t group;
    bool has_zeros;
};

constexpr Kind kKinds[] = {
    {Format::kBf16, ScaleType::kNone, 0, false},
    {Format::kFp8, ScaleType::kF32, kFp8Block, false},
    {Format::kInt4, ScaleType::kBf16, 32, false},
    {Format::kInt4, ScaleType::kBf16, 64, true},
    {Format::kMxfp4, ScaleType::kE8m0, kMxfp4Group, false},
};

// Exactly as many bytes as the matrices need, so that reading past them is found.
struct Stack {
    Stack(const Kind& kind, std::int64_t members, std::int64_t rows, std::int64_t columns,
          std::mt19937& random) {
        const std::int64_t groups = kind.group == 0 ? 0 : (columns + kind.group - 1) / kind.group;
        const std::int64_t scale_rows =
            kind.format == Format::kFp8 ? (rows + kFp8Block - 1) / kFp8Block : rows;
        const std::int64_t scale_bytes = kind.scale_type == ScaleType::kF32    ? 4
                                         : kind.scale_type == ScaleType::kBf16 ? 2
                                                                               : 1;
        matrix = {.format = kind.format,
                  .scale_type = kind.scale_type,
                  .rows = rows,
                  .columns = columns,
                  .group = kind.group,
                  .row_bytes = packed_bytes(kind.format, columns),
                  .scale_row_bytes = groups * scale_bytes,
                  .zero_row_bytes = groups};
        data.resize(static_cast<std::size_t>(members * rows * matrix.row_bytes));
        for (std::uint8_t& byte : data) {
            // Finite in every format.
            byte = static_cast<std::uint8_t>(random() & 0xBB);
        }
        scales.assign(static_cast<std::size_t>(members * scale_rows * matrix.scale_row_bytes),
                      0x3C);
        zeros.assign(static_cast<std::size_t>(kind.has_zeros ? members * rows * groups : 0), 7);
        matrix.data = reinterpret_cast<const std::byte*>(data.data());
        matrix.scales = reinterpret_cast<const std::byte*>(scales.data());
        matrix.zeros = kind.has_zeros ? zeros.data() : nullptr;
    }

    std::vector<std::uint8_t> data;
    std::vector<std::uint8_t> scales;
    std::vector<std::uint8_t> zeros;
    Matrix matrix;
};

}  // namespace
}  // namespace headwater
