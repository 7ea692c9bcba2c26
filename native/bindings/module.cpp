// Python face of the native core: types in, GIL off, call, errors out. headwater.shm is the typed
// face that the rest of the product uses.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <string>

#include "bindings.hpp"
#include "headwater/failure.hpp"
#include "headwater/file_reader.hpp"
#include "headwater/shm_registry.hpp"
#include "headwater/shm_segment.hpp"

namespace py = pybind11;
using namespace headwater;

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

const char* error_class(FailureKind kind) {
    switch (kind) {
        case FailureKind::kSegment:
            return "SegmentError";
        case FailureKind::kSegmentExists:
            return "SegmentExistsError";
        case FailureKind::kSegmentNotFound:
            return "SegmentNotFoundError";
        case FailureKind::kSharedMemoryFull:
            return "SharedMemoryFullError";
        case FailureKind::kCheckpoint:
            return "CheckpointError";
        case FailureKind::kCancelled:
            return "CancelledError";
        case FailureKind::kConfig:
            return "ConfigError";
        case FailureKind::kNotPermitted:
            return "NotPermittedError";
        case FailureKind::kInternal:
            return "InternalError";
    }
    return "InternalError";
}

void raise_failure(std::exception_ptr raised) {
    try {
        if (raised) {
            std::rethrow_exception(raised);
        }
    } catch (const Failure& failure) {
        const py::object type =
            py::module_::import("headwater.errors").attr(error_class(failure.kind()));
        PyErr_SetString(type.ptr(), failure.what());
    }
}

// Empty bytes stand for "made from nothing", which the header writes as zeros.
Digest to_digest(const py::bytes& bytes) {
    const std::string_view text = bytes;
    Digest digest{};
    if (!text.empty() && text.size() != digest.size()) {
        throw Failure(FailureKind::kSegment,
                      "digest: expected 0 or 32 bytes, got " + std::to_string(text.size()));
    }
    std::copy(text.begin(), text.end(), digest.begin());
    return digest;
}

py::bytes from_digest(const Digest& digest) {
    if (digest == Digest{}) {
        return py::bytes();
    }
    return py::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
}

std::unique_ptr<Segment> create(const std::string& name, std::uint64_t payload_bytes,
                                std::uint32_t kind, std::uint32_t lifetime, std::uint64_t epoch,
                                std::uint32_t layout_version, const py::bytes& digest) {
    const CreateOptions options{payload_bytes,
                                static_cast<SegmentKind>(kind),
                                static_cast<Lifetime>(lifetime),
                                epoch,
                                layout_version,
                                to_digest(digest)};
    const py::gil_scoped_release no_gil;
    return Segment::create(name, options);
}

std::unique_ptr<Segment> attach(const std::string& name, bool writable,
                                std::optional<std::uint64_t> total_bytes,
                                std::optional<std::uint64_t> epoch,
                                std::optional<std::uint32_t> layout_version,
                                const std::optional<py::bytes>& digest) {
    AttachOptions options{writable, total_bytes, epoch, layout_version, std::nullopt};
    if (digest) {
        options.digest = to_digest(*digest);
    }
    const py::gil_scoped_release no_gil;
    return Segment::attach(name, options);
}

std::unique_ptr<SegmentView> view(const Segment& segment, std::uint64_t offset,
                                  std::uint64_t num_bytes) {
    return std::make_unique<SegmentView>(segment.mapping(), offset, num_bytes);
}

py::buffer_info view_buffer(SegmentView& self) {
    return py::buffer_info(reinterpret_cast<std::uint8_t*>(self.data()),
                           static_cast<py::ssize_t>(self.num_bytes()), !self.is_writable());
}

void bind_segment(py::module_& m) {
    py::class_<SegmentView>(m, "SegmentView", py::buffer_protocol())
        .def_buffer(&view_buffer)
        .def("__len__", &SegmentView::num_bytes);

    py::class_<Segment>(m, "Segment")
        .def_static("create", &create, py::arg("name"), py::arg("payload_bytes"), py::arg("kind"),
                    py::arg("lifetime"), py::arg("epoch"), py::arg("layout_version"),
                    py::arg("digest"))
        .def_static("attach", &attach, py::arg("name"), py::arg("writable"), py::arg("total_bytes"),
                    py::arg("epoch"), py::arg("layout_version"), py::arg("digest"))
        .def_property_readonly("name", &Segment::name)
        .def_property_readonly("is_closed", &Segment::is_closed)
        .def_property_readonly("is_owner", &Segment::is_owner)
        .def_property_readonly("payload_bytes",
                               [](const Segment& s) { return s.mapping()->payload_bytes(); })
        .def_property_readonly("is_writable",
                               [](const Segment& s) { return s.mapping()->is_writable(); })
        .def_property_readonly(
            "state",
            [](const Segment& s) {
                return state_name(static_cast<std::uint32_t>(s.mapping()->state()));
            })
        .def_property_readonly(
            "kind",
            [](const Segment& s) { return static_cast<std::uint32_t>(s.mapping()->header().kind); })
        .def_property_readonly(
            "lifetime",
            [](const Segment& s) {
                return static_cast<std::uint32_t>(s.mapping()->header().lifetime);
            })
        .def_property_readonly(
            "is_sealed", [](const Segment& s) { return s.mapping()->header().is_sealed != 0; })
        .def_property_readonly("total_bytes",
                               [](const Segment& s) { return s.mapping()->header().total_bytes; })
        .def_property_readonly("epoch",
                               [](const Segment& s) { return s.mapping()->header().epoch; })
        .def_property_readonly(
            "layout_version", [](const Segment& s) { return s.mapping()->header().layout_version; })
        .def_property_readonly(
            "digest", [](const Segment& s) { return from_digest(s.mapping()->header().digest); })
        .def_property_readonly("owner_pid",
                               [](const Segment& s) { return s.mapping()->header().owner_pid; })
        .def("seal", &Segment::seal, NoGil())
        .def("mark_ready", &Segment::mark_ready, NoGil())
        .def("poison", &Segment::poison, NoGil())
        .def("unlink", &Segment::unlink, NoGil())
        .def("adopt_ownership", &Segment::adopt_ownership, NoGil())
        .def("release_ownership", &Segment::release_ownership, NoGil())
        .def("close", &Segment::close, NoGil())
        .def("view", &view, py::arg("offset"), py::arg("num_bytes"))
        .def(
            "populate",
            [](const Segment& s, std::uint64_t offset, std::uint64_t num_bytes) {
                s.mapping()->populate(offset, num_bytes);
            },
            py::arg("offset"), py::arg("num_bytes"), NoGil())
        .def("load_u64", &Segment::load_u64, py::arg("offset"))
        .def("store_u64", &Segment::store_u64, py::arg("offset"), py::arg("value"))
        .def("try_lock_slot", &Segment::try_lock_slot, py::arg("slot"))
        .def("unlock_slot", &Segment::unlock_slot, py::arg("slot"))
        .def("is_slot_locked", &Segment::is_slot_locked, py::arg("slot"))
        .def("fileno", [](const Segment& s) { return s.mapping()->file().fd(); });
}

void bind_registry(py::module_& m) {
    py::class_<SegmentInfo>(m, "SegmentInfo")
        .def_readonly("name", &SegmentInfo::name)
        .def_readonly("state", &SegmentInfo::state)
        .def_readonly("problem", &SegmentInfo::problem)
        .def_readonly("total_bytes", &SegmentInfo::total_bytes)
        .def_readonly("kind", &SegmentInfo::kind)
        .def_readonly("lifetime", &SegmentInfo::lifetime)
        .def_readonly("is_sealed", &SegmentInfo::is_sealed)
        .def_readonly("epoch", &SegmentInfo::epoch)
        .def_readonly("layout_version", &SegmentInfo::layout_version)
        .def_property_readonly("digest",
                               [](const SegmentInfo& info) { return from_digest(info.digest); })
        .def_readonly("owner_pid", &SegmentInfo::owner_pid)
        .def_readonly("created_unix_nano", &SegmentInfo::created_unix_nano)
        .def_readonly("is_owner_alive", &SegmentInfo::is_owner_alive)
        .def_readonly("is_attached", &SegmentInfo::is_attached);
    m.def("list_segments", &list_segments, py::arg("prefix"), NoGil());
    m.def("reap", &reap, py::arg("prefix"), py::arg("release_weights"), NoGil());
}

// Joins the threads without the GIL.
struct LoadJobDeleter {
    void operator()(LoadJob* job) const {
        const py::gil_scoped_release no_gil;
        delete job;
    }
};
using LoadJobHolder = std::unique_ptr<LoadJob, LoadJobDeleter>;

LoadJobHolder start_load(
    const Segment& segment,
    const std::vector<std::tuple<std::string, std::uint64_t, std::uint64_t, std::uint64_t>>& items,
    int num_threads) {
    const py::gil_scoped_release no_gil;
    std::vector<Piece> pieces;
    pieces.reserve(items.size());
    for (const auto& [path, file_offset, num_bytes, dest_offset] : items) {
        pieces.push_back({path, file_offset, num_bytes, dest_offset});
    }
    return LoadJobHolder(new LoadJob(segment.mapping(), pieces, num_threads));
}

void bind_file_reader(py::module_& m) {
    py::class_<LoadJob, LoadJobHolder>(m, "LoadJob")
        .def_property_readonly("total_bytes", &LoadJob::total_bytes)
        .def_property_readonly("loaded_bytes", &LoadJob::loaded_bytes)
        .def("wait", &LoadJob::wait, py::arg("timeout_ms"), NoGil())
        .def("cancel", &LoadJob::cancel);
    m.def("start_load", &start_load, py::arg("segment"), py::arg("pieces"), py::arg("num_threads"));
}

}  // namespace

PYBIND11_MODULE(_native, m) {
    m.doc() = "Headwater's C++ core.";
    py::register_exception_translator(&raise_failure);
    bind_segment(m);
    bind_registry(m);
    bind_file_reader(m);
    bind_kernels(m);
    bind_hybrid(m);
    bind_attention(m);
    bind_model(m);
    bind_numa(m);
}
