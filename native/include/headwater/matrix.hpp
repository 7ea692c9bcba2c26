// Matrix: a weight matrix as it lies in memory, in one of the formats that the kernels read.
//
// It owns nothing: whoever makes one keeps the memory alive. Element [row, column] has the value
// that each format states below; products with it round activations to BF16 and accumulate in FP32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace headwater {

enum class Format : std::uint8_t {
    // Two bytes per element.
    kBf16,
    // E4M3 bytes, times one FP32 scale per block of 128 rows x 128 columns, ragged at the ends.
    kFp8,
    // Nibbles, low one first: byte j of a row holds columns 2j and 2j + 1. The value is
    // (nibble - zero) * scale, with one scale per `group` columns of a row; zero is 8 without
    // zeros.
    kInt4,
    // E2M1 nibbles in the same order, times 2^(scale - 127) per 32 columns of a row.
    kMxfp4,
};

enum class ScaleType : std::uint8_t { kNone, kF32, kBf16, kE8m0 };

// Rows and columns that share an FP8 scale, and columns that share an MXFP4 one.
inline constexpr std::int64_t kFp8Block = 128;
inline constexpr std::int64_t kMxfp4Group = 32;

struct Matrix {
    Format format = Format::kBf16;
    ScaleType scale_type = ScaleType::kNone;
    std::int64_t rows = 0;
    std::int64_t columns = 0;
    // Columns per scale; 0 where the format has none.
    std::int64_t group = 0;
    const std::byte* data = nullptr;
    std::int64_t row_bytes = 0;
    const std::byte* scales = nullptr;
    // From one row of scales to the next (for FP8, from one block of rows to the next).
    std::int64_t scale_row_bytes = 0;
    // One byte per group, or null.
    const std::uint8_t* zeros = nullptr;
    std::int64_t zero_row_bytes = 0;
};

// Bytes that `columns` elements of a row take.
std::int64_t packed_bytes(Format format, std::int64_t columns);

// Bytes of weights, scales and zeros that a product with the matrix reads.
std::int64_t stored_bytes(const Matrix& matrix);

// Columns [begin, begin + columns) of every row. Throws Failure(kConfig) unless the range falls
// on whole scales and bytes.
Matrix column_slice(const Matrix& matrix, std::int64_t begin, std::int64_t columns);

// Rows [begin, begin + rows). Throws Failure(kConfig) unless the range starts at a whole scale.
Matrix row_slice(const Matrix& matrix, std::int64_t begin, std::int64_t rows);

// Throws Failure(kConfig) that names `what` unless shape, strides and scales fit the format.
void check_matrix(const Matrix& matrix, const std::string& what);

}  // namespace headwater
