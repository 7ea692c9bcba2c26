#include "headwater/matrix.hpp"

#include "headwater/failure.hpp"

namespace headwater {

namespace {

std::int64_t ceil_div(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit; }

std::int64_t scale_bytes(ScaleType type) {
    switch (type) {
        case ScaleType::kNone:
            return 0;
        case ScaleType::kF32:
            return 4;
        case ScaleType::kBf16:
            return 2;
        case ScaleType::kE8m0:
            return 1;
    }
    return 0;
}

[[noreturn]] void refuse(const std::string& problem) {
    throw Failure(FailureKind::kConfig, problem);
}

bool is_known_scale(const Matrix& m) {
    switch (m.format) {
        case Format::kBf16:
            return m.scale_type == ScaleType::kNone && m.group == 0;
        case Format::kFp8:
            return m.scale_type == ScaleType::kF32 && m.group == kFp8Block;
        case Format::kInt4:
            return (m.scale_type == ScaleType::kF32 || m.scale_type == ScaleType::kBf16) &&
                   (m.group == 32 || m.group == 64 || m.group == 128);
        case Format::kMxfp4:
            return m.scale_type == ScaleType::kE8m0 && m.group == kMxfp4Group;
    }
    return false;
}

}  // namespace

std::int64_t packed_bytes(Format format, std::int64_t columns) {
    switch (format) {
        case Format::kBf16:
            return 2 * columns;
        case Format::kFp8:
            return columns;
        case Format::kInt4:
        case Format::kMxfp4:
            return ceil_div(columns, 2);
    }
    return 0;
}

std::int64_t stored_bytes(const Matrix& m) {
    const std::int64_t weights = m.rows * packed_bytes(m.format, m.columns);
    if (m.group == 0) {
        return weights;
    }
    const std::int64_t scale_rows = m.format == Format::kFp8 ? ceil_div(m.rows, kFp8Block) : m.rows;
    const std::int64_t groups = ceil_div(m.columns, m.group);
    return weights + scale_rows * groups * scale_bytes(m.scale_type) +
           (m.zeros == nullptr ? 0 : m.rows * groups);
}

Matrix column_slice(const Matrix& m, std::int64_t begin, std::int64_t columns) {
    const std::int64_t unit = m.group == 0 ? 1 : m.group;
    if (begin < 0 || columns <= 0 || begin + columns > m.columns || begin % unit != 0) {
        refuse("columns " + std::to_string(begin) + " to " + std::to_string(begin + columns) +
               " of a matrix of " + std::to_string(m.columns) + " columns: expected a part that " +
               "starts at a multiple of " + std::to_string(unit));
    }
    Matrix slice = m;
    slice.columns = columns;
    slice.data += packed_bytes(m.format, begin);
    if (slice.scales != nullptr) {
        slice.scales += begin / unit * scale_bytes(m.scale_type);
    }
    if (slice.zeros != nullptr) {
        slice.zeros += begin / unit;
    }
    return slice;
}

Matrix row_slice(const Matrix& m, std::int64_t begin, std::int64_t rows) {
    const std::int64_t unit = m.format == Format::kFp8 ? kFp8Block : 1;
    if (begin < 0 || rows <= 0 || begin + rows > m.rows || begin % unit != 0) {
        refuse("rows " + std::to_string(begin) + " to " + std::to_string(begin + rows) +
               " of a matrix of " + std::to_string(m.rows) + " rows: expected a part that " +
               "starts at a multiple of " + std::to_string(unit));
    }
    Matrix slice = m;
    slice.rows = rows;
    slice.data += begin * m.row_bytes;
    if (slice.scales != nullptr) {
        slice.scales += begin / unit * m.scale_row_bytes;
    }
    if (slice.zeros != nullptr) {
        slice.zeros += begin * m.zero_row_bytes;
    }
    return slice;
}

void check_matrix(const Matrix& m, const std::string& what) {
    if (m.rows <= 0 || m.columns <= 0) {
        refuse(what + ": expected at least one row and column, got " + std::to_string(m.rows) +
               " x " + std::to_string(m.columns));
    }
    if (!is_known_scale(m)) {
        refuse(what + ": the kernels do not know this combination of format, type of scales and " +
               "group size " + std::to_string(m.group));
    }
    if (m.zeros != nullptr && m.format != Format::kInt4) {
        refuse(what + ": only INT4 matrices have zeros");
    }
    const std::int64_t groups = m.group == 0 ? 0 : ceil_div(m.columns, m.group);
    if (m.data == nullptr || m.row_bytes < packed_bytes(m.format, m.columns) ||
        (groups > 0 &&
         (m.scales == nullptr || m.scale_row_bytes < groups * scale_bytes(m.scale_type))) ||
        (m.zeros != nullptr && m.zero_row_bytes < groups)) {
        refuse(what + ": rows of weights, scales or zeros are shorter than " +
               std::to_string(m.columns) + " columns need");
    }
}

}  // namespace headwater
