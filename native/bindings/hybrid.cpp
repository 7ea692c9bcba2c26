// Python face of the worker that computes experts for a GPU; headwater.gpu.mailbox keeps the
// memory that it points to, and is the only caller.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <vector>

#include "bindings.hpp"
#include "headwater/expert_worker.hpp"
#include "headwater/model/feed_forward.hpp"

namespace py = pybind11;

namespace headwater {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

std::unique_ptr<ExpertWorker> make_worker(WorkerPool& pool,
                                          const std::vector<const MoeLayer*>& layers,
                                          const std::vector<std::array<std::uintptr_t, 8>>& lanes,
                                          std::int64_t cache_bytes) {
    std::vector<ExpertWorker::Lane> found;
    for (const auto& [posted, done, x, experts, weights, output, predicted, predictions] : lanes) {
        found.push_back({.posted = address<std::uint64_t>(posted),
                         .done = address<std::uint64_t>(done),
                         .x = address<const float>(x),
                         .experts = address<const std::int32_t>(experts),
                         .weights = address<const float>(weights),
                         .output = address<float>(output),
                         .predicted = address<std::uint64_t>(predicted),
                         .predictions = address<const std::int32_t>(predictions)});
    }
    return std::make_unique<ExpertWorker>(pool, layers, std::move(found), cache_bytes);
}

std::unique_ptr<MoeLayer> make_stored_experts(WorkerPool& pool, const Matrix& gate_up,
                                              const Matrix& down, std::int64_t num_experts,
                                              int num_shards, int experts_per_token) {
    MoeLayer::Options options;
    options.experts_per_token = experts_per_token;
    return std::make_unique<MoeLayer>(
        pool, active_kernels(), stored_shards(gate_up, down, num_experts, num_shards), options);
}

}  // namespace

void bind_hybrid(py::module_& m) {
    m.def("stored_experts", &make_stored_experts, py::arg("pool"), py::arg("gate_up"),
          py::arg("down"), py::arg("num_experts"), py::arg("num_shards"),
          py::arg("experts_per_token"), py::keep_alive<0, 1>());
    py::class_<ExpertWorker>(m, "ExpertWorker")
        .def(py::init(&make_worker), py::arg("pool"), py::arg("layers"), py::arg("lanes"),
             py::arg("cache_bytes"), py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
        .def_property_readonly_static("LAYER_BITS",
                                      [](const py::object&) { return ExpertWorker::kLayerBits; })
        .def_property_readonly("busy_ns", &ExpertWorker::busy_ns)
        .def_property_readonly("num_answered", &ExpertWorker::num_answered)
        .def_property_readonly("fetched_bytes", &ExpertWorker::fetched_bytes)
        .def_property_readonly("num_predicted", &ExpertWorker::num_predicted)
        .def_property_readonly("num_right", &ExpertWorker::num_right)
        .def("open", &ExpertWorker::open, py::arg("lane"), py::arg("num_tokens"), NoGil())
        .def("close", &ExpertWorker::close, py::arg("lane"), NoGil());
}

}  // namespace headwater
