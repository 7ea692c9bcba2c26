// What each file of the bindings adds to the module.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

namespace headwater {

struct Kernels;

// Python passes addresses of tensors as numbers.
template <class T>
T* address(std::uintptr_t value) {
    return reinterpret_cast<T*>(value);
}

// The table of the instruction set of that name, of the one in use where it is empty. Throws
// Failure(kConfig) on a name that is unknown or unsupported here.
const Kernels& kernels_or_active(const std::string& isa);

void bind_attention(pybind11::module_& m);
void bind_hybrid(pybind11::module_& m);
void bind_kernels(pybind11::module_& m);
void bind_model(pybind11::module_& m);
void bind_numa(pybind11::module_& m);

}  // namespace headwater
