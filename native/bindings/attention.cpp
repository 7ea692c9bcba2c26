// Python face of the FP32 kernels on their own: addresses in, GIL off, call. Models reach them
// through the decoder; headwater.kernels.attention and .float_product are the only callers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings.hpp"
#include "headwater/model/paged_attention.hpp"

namespace py = pybind11;

namespace headwater {

namespace {

void run_paged_attention(const Compute& compute, const TokenBatch& batch, std::int64_t num_heads,
                         std::int64_t num_kv_heads, std::int64_t key_dim, std::int64_t value_dim,
                         std::int64_t block_stride, std::int64_t token_stride,
                         std::int64_t head_stride, std::int64_t value_offset, std::int64_t window,
                         std::uintptr_t sinks, std::uintptr_t pages, std::uintptr_t queries,
                         std::uintptr_t outputs) {
    const AttentionShape shape = {
        num_heads,    num_kv_heads, key_dim,      value_dim, block_stride,
        token_stride, head_stride,  value_offset, window,    address<const float>(sinks)};
    Workspace workspace;
    paged_attention(compute, workspace, shape, batch, 0, batch.num_tokens(),
                    address<const std::uint16_t>(pages), address<const float>(queries),
                    address<float>(outputs));
}

void run_multiply_floats(const Compute& compute, const FloatMatrix& matrix, std::int64_t row_begin,
                         std::int64_t row_end, bool is_transposed, std::uintptr_t inputs,
                         std::uintptr_t outputs, std::int64_t num_tokens) {
    const std::int64_t num_rows = row_end - row_begin;
    std::vector<const float*> input_rows;
    std::vector<float*> output_rows;
    for (std::int64_t t = 0; t < num_tokens; ++t) {
        input_rows.push_back(address<const float>(inputs) +
                             t * (is_transposed ? num_rows : matrix.columns));
        output_rows.push_back(address<float>(outputs) +
                              t * (is_transposed ? matrix.columns : num_rows));
    }
    const FloatProduct product = {&matrix,           row_begin,          row_end,
                                  input_rows.data(), output_rows.data(), num_tokens};
    if (is_transposed) {
        compute.kernels->multiply_floats_transposed(product);
    } else {
        compute.kernels->multiply_floats(product);
    }
}

}  // namespace

void bind_attention(py::module_& m) {
    using NoGil = py::call_guard<py::gil_scoped_release>;
    m.def("paged_attention", &run_paged_attention, py::kw_only(), py::arg("compute"),
          py::arg("batch"), py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("key_dim"),
          py::arg("value_dim"), py::arg("block_stride"), py::arg("token_stride"),
          py::arg("head_stride"), py::arg("value_offset"), py::arg("window"), py::arg("sinks"),
          py::arg("pages"), py::arg("queries"), py::arg("outputs"), NoGil());
    m.def("multiply_floats", &run_multiply_floats, py::kw_only(), py::arg("compute"),
          py::arg("matrix"), py::arg("row_begin"), py::arg("row_end"), py::arg("is_transposed"),
          py::arg("inputs"), py::arg("outputs"), py::arg("num_tokens"), NoGil());
}

}  // namespace headwater
