// The part of the start-up check that is about kernels with FP32 activations.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "headwater/kernels.hpp"

namespace headwater {

// Throws when what a kernel gave is not what was expected.
using CompareKernel = std::function<void(const std::string& what, const std::vector<float>& got,
                                         const std::vector<float>& expected)>;

void float_self_test(const Kernels& kernels, const CompareKernel& compare);
// With weights in a format.
void float_self_test(const Kernels& kernels, const char* format, const Matrix& stored,
                     const CompareKernel& compare);

}  // namespace headwater
