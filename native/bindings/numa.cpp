// Python face of numa.hpp.
#include "headwater/numa.hpp"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings.hpp"

namespace py = pybind11;

namespace headwater {

void bind_numa(py::module_& m) {
    m.def(
        "place_pages",
        [](const Segment& segment, const std::vector<PayloadRange>& ranges,
           const std::vector<int>& nodes) { place_pages(*segment.mapping(), ranges, nodes); },
        py::arg("segment"), py::arg("ranges"), py::arg("nodes"),
        py::call_guard<py::gil_scoped_release>());
    m.def(
        "nodes_of_pages",
        [](const Segment& segment, const std::vector<std::uint64_t>& offsets) {
            return nodes_of_pages(*segment.mapping(), offsets);
        },
        py::arg("segment"), py::arg("offsets"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace headwater
