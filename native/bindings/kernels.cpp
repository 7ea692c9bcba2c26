// Python face of the CPU kernels: addresses in, GIL off, call. headwater.kernels checks tensors,
// keeps their memory alive, and is the only caller.
#include "headwater/kernels.hpp"

#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings.hpp"
#include "headwater/failure.hpp"
#include "headwater/linear_layer.hpp"
#include "headwater/memory_read.hpp"
#include "headwater/moe_layer.hpp"
#include "headwater/worker_pool.hpp"

namespace py = pybind11;

namespace headwater {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

const Kernels& kernels_named(const std::string& isa) {
    if (const auto found = supported_isa(isa)) {
        return kernels_of(*found);
    }
    throw Failure(FailureKind::kConfig, "isa: '" + isa + "' is not supported by this CPU");
}

std::vector<std::string> supported_names() {
    std::vector<std::string> names;
    for (const Isa isa : supported_isas()) {
        names.emplace_back(isa_name(isa));
    }
    return names;
}

Matrix make_matrix(Format format, ScaleType scale_type, std::int64_t rows, std::int64_t columns,
                   std::int64_t group, std::uintptr_t data, std::int64_t row_bytes,
                   std::uintptr_t scales, std::int64_t scale_row_bytes, std::uintptr_t zeros,
                   std::int64_t zero_row_bytes) {
    const Matrix matrix{.format = format,
                        .scale_type = scale_type,
                        .rows = rows,
                        .columns = columns,
                        .group = group,
                        .data = address<const std::byte>(data),
                        .row_bytes = row_bytes,
                        .scales = address<const std::byte>(scales),
                        .scale_row_bytes = scale_row_bytes,
                        .zeros = address<const std::uint8_t>(zeros),
                        .zero_row_bytes = zero_row_bytes};
    check_matrix(matrix, "matrix");
    return matrix;
}

void run_linear(WorkerPool& pool, const std::string& isa,
                const std::vector<std::pair<const Matrix*, std::uintptr_t>>& parts,
                std::uintptr_t x, std::int64_t num_tokens, Mode mode) {
    std::vector<LinearPart> list;
    for (const auto& [matrix, output] : parts) {
        list.push_back({matrix, address<float>(output), matrix->rows});
    }
    const std::int64_t columns = list.empty() ? 0 : list.front().matrix->columns;
    const Kernels& kernels = kernels_or_active(isa);
    const py::gil_scoped_release no_gil;
    linear(pool, kernels, list, address<const float>(x), columns, num_tokens, mode);
}

std::unique_ptr<MoeLayer> make_moe_layer(WorkerPool& pool, const std::string& isa,
                                         const Matrix& gate_up, const Matrix& down,
                                         std::int64_t num_experts, int num_shards,
                                         int experts_per_token, Activation activation,
                                         float limit) {
    const Kernels& kernels = kernels_or_active(isa);
    return std::make_unique<MoeLayer>(pool, kernels,
                                      stacked_experts(gate_up, down, num_experts, num_shards),
                                      MoeLayer::Options{experts_per_token, activation, limit});
}

void run_moe(const MoeLayer& layer, std::uintptr_t x, std::uintptr_t experts,
             std::uintptr_t weights, std::uintptr_t output, std::int64_t num_tokens, Mode mode) {
    const auto* ids = address<const std::int32_t>(experts);
    for (std::int64_t i = 0; i < num_tokens * layer.experts_per_token(); ++i) {
        if (ids[i] < 0 || ids[i] >= layer.num_experts()) {
            throw Failure(FailureKind::kInternal, "experts: " + std::to_string(ids[i]) +
                                                      " chosen of " +
                                                      std::to_string(layer.num_experts()));
        }
    }
    layer.run({.x = address<const float>(x),
               .x_stride = layer.hidden_size(),
               .num_tokens = num_tokens,
               .experts = ids,
               .weights = address<const float>(weights),
               .output = address<float>(output),
               .output_stride = layer.hidden_size(),
               .mode = mode});
}

}  // namespace

const Kernels& kernels_or_active(const std::string& isa) {
    return isa.empty() ? active_kernels() : kernels_named(isa);
}

void bind_kernels(py::module_& m) {
    py::native_enum<Format>(m, "Format", "enum.Enum")
        .value("BF16", Format::kBf16)
        .value("FP8", Format::kFp8)
        .value("INT4", Format::kInt4)
        .value("MXFP4", Format::kMxfp4)
        .finalize();
    py::native_enum<ScaleType>(m, "ScaleType", "enum.Enum")
        .value("NONE", ScaleType::kNone)
        .value("F32", ScaleType::kF32)
        .value("BF16", ScaleType::kBf16)
        .value("E8M0", ScaleType::kE8m0)
        .finalize();
    py::native_enum<Mode>(m, "Mode", "enum.Enum")
        .value("DECODE", Mode::kDecode)
        .value("PREFILL", Mode::kPrefill)
        .finalize();
    py::native_enum<Activation>(m, "Activation", "enum.Enum")
        .value("SILU", Activation::kSilu)
        .value("CLAMPED_SWIGLU", Activation::kClampedSwiglu)
        .finalize();

    m.def("isa", [] { return isa_name(active_kernels().isa); });
    m.def("supported_isas", &supported_names);
    m.def("set_exact_activations", &set_exact_activations, py::arg("are_exact"));
    m.def(
        "self_test",
        [](const std::string& isa) { self_test(kernels_named(isa), kernels_of(Isa::kScalar)); },
        py::arg("isa"), NoGil());

    py::class_<Matrix>(m, "Matrix")
        .def(py::init(&make_matrix), py::kw_only(), py::arg("format"), py::arg("scale_type"),
             py::arg("rows"), py::arg("columns"), py::arg("group"), py::arg("data"),
             py::arg("row_bytes"), py::arg("scales"), py::arg("scale_row_bytes"), py::arg("zeros"),
             py::arg("zero_row_bytes"))
        .def_readonly("rows", &Matrix::rows)
        .def_readonly("columns", &Matrix::columns)
        .def_property_readonly("stored_bytes", &stored_bytes);

    py::class_<WorkerPool>(m, "WorkerPool")
        .def(py::init([](int num_threads, int spin_us, bool pin) {
                 return std::make_unique<WorkerPool>(
                     WorkerPool::Options{num_threads, std::chrono::microseconds(spin_us), pin});
             }),
             py::arg("num_threads"), py::arg("spin_us"), py::arg("pin"), NoGil())
        .def_property_readonly("num_threads", &WorkerPool::num_threads)
        .def_property_readonly("cpus", &WorkerPool::cpus)
        .def("pin_caller", &WorkerPool::pin_caller);

    m.def(
        "read_memory",
        [](WorkerPool& pool, std::uintptr_t data, std::int64_t num_bytes) {
            return read_memory(pool, address<const std::byte>(data), num_bytes);
        },
        py::arg("pool"), py::arg("data"), py::arg("num_bytes"), NoGil());
    m.def("linear", &run_linear, py::arg("pool"), py::arg("isa"), py::arg("parts"), py::arg("x"),
          py::arg("num_tokens"), py::arg("mode"));

    py::class_<MoeLayer>(m, "MoeLayer")
        .def(py::init(&make_moe_layer), py::arg("pool"), py::arg("isa"), py::arg("gate_up"),
             py::arg("down"), py::arg("num_experts"), py::arg("num_shards"),
             py::arg("experts_per_token"), py::arg("activation"), py::arg("limit"),
             py::keep_alive<1, 2>())
        .def_property_readonly("expert_bytes", &MoeLayer::expert_bytes)
        .def("run", &run_moe, py::arg("x"), py::arg("experts"), py::arg("weights"),
             py::arg("output"), py::arg("num_tokens"), py::arg("mode"), NoGil());
}

}  // namespace headwater
