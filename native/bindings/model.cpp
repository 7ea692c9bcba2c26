// Python face of the decoder: built part by part from addresses, then called with addresses,
// without the GIL. headwater.kernels.model checks tensors, keeps their memory alive, and is the
// only caller.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "headwater/failure.hpp"
#include "headwater/model/decoder.hpp"

namespace py = pybind11;

namespace headwater {

namespace {

std::vector<float> floats_at(std::uintptr_t data, std::int64_t count) {
    const auto* begin = address<const float>(data);
    return {begin, begin + count};
}

GqaAttention make_gqa(std::int64_t num_heads, std::int64_t num_kv_heads, std::int64_t head_dim,
                      float softmax_scale, const Matrix& q, const Matrix& k, const Matrix& v,
                      const Matrix& o, const std::optional<RmsNorm>& q_norm,
                      const std::optional<RmsNorm>& k_norm, std::shared_ptr<Rotary> rotary) {
    return {{num_heads, num_kv_heads, head_dim, softmax_scale},
            {q, k, v, o, q_norm, k_norm},
            std::move(rotary)};
}

MlaAttention make_mla(std::int64_t num_heads, std::int64_t latent_dim, std::int64_t nope_dim,
                      std::int64_t rope_dim, std::int64_t value_dim, float softmax_scale,
                      const std::optional<Matrix>& q_a, const std::optional<RmsNorm>& q_a_norm,
                      const Matrix& q, const Matrix& kv_a, const RmsNorm& kv_a_norm,
                      const FloatMatrix& kv_b, const Matrix& o, std::shared_ptr<Rotary> rotary) {
    return {{num_heads, latent_dim, nope_dim, rope_dim, value_dim, softmax_scale},
            {q_a, q_a_norm, q, kv_a, kv_a_norm, kv_b, o},
            std::move(rotary)};
}

Gate make_gate(const FloatMatrix& matrix, std::uintptr_t bias, std::int64_t experts_per_token,
               std::int64_t num_groups, std::int64_t groups_per_token, bool is_normalized,
               float scale) {
    return {matrix,
            {bias == 0 ? std::vector<float>() : floats_at(bias, matrix.rows), experts_per_token,
             num_groups, groups_per_token, is_normalized, scale}};
}

Compute make_compute(WorkerPool& pool, const std::string& isa, Mode mode) {
    return {&pool, &kernels_or_active(isa), mode};
}

void choose(const Gate& gate, const Compute& compute, std::uintptr_t x, std::int64_t num_tokens,
            std::uintptr_t experts, std::uintptr_t weights) {
    std::vector<float> logits(static_cast<std::size_t>(num_tokens * gate.num_experts()));
    gate.choose(compute, address<const float>(x), num_tokens, logits.data(),
                address<std::int32_t>(experts), address<float>(weights), gate.experts_per_token());
}

std::shared_ptr<FeedForward> make_dense(const Compute& compute, const Matrix& gate,
                                        const Matrix& up, const Matrix& down) {
    return std::make_shared<FeedForward>(compute, ExpertWeights{gate, up, down});
}

std::shared_ptr<FeedForward> make_routed(
    const Compute& compute, const Gate& gate, const Matrix& gate_up, const Matrix& down,
    int num_shards, const std::optional<std::tuple<Matrix, Matrix, Matrix>>& shared) {
    std::optional<ExpertWeights> common;
    if (shared) {
        common = ExpertWeights{std::get<0>(*shared), std::get<1>(*shared), std::get<2>(*shared)};
    }
    return std::make_shared<FeedForward>(
        compute, gate, stored_shards(gate_up, down, gate.num_experts(), num_shards), common);
}

template <class AnyAttention>
DecoderLayer make_layer(const RmsNorm& attention_norm, const AnyAttention& attention,
                        const RmsNorm& ffn_norm, std::shared_ptr<FeedForward> ffn) {
    return {attention_norm, attention, ffn_norm, std::move(ffn)};
}

using Span = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::uintptr_t, std::int64_t>;

std::unique_ptr<TokenBatch> make_batch(const std::vector<Span>& items, std::int64_t block_tokens,
                                       std::int64_t num_blocks) {
    std::vector<SequenceSpan> spans;
    spans.reserve(items.size());
    for (const auto& [first_row, num_new, start, block_ids, count] : items) {
        spans.push_back({first_row, num_new, start, address<const std::int64_t>(block_ids), count});
    }
    return std::make_unique<TokenBatch>(std::move(spans), block_tokens, num_blocks);
}

void forward(Decoder& decoder, const TokenBatch& batch, std::uintptr_t token_ids,
             const std::vector<std::uintptr_t>& pages, std::uintptr_t hidden) {
    if (static_cast<std::int64_t>(pages.size()) != decoder.num_layers()) {
        throw Failure(FailureKind::kInternal, "pages: expected one address per layer");
    }
    const py::gil_scoped_release no_gil;
    decoder.embed(address<const std::int64_t>(token_ids), batch.num_tokens(),
                  address<float>(hidden));
    for (std::int64_t layer = 0; layer < decoder.num_layers(); ++layer) {
        decoder.forward_layer(layer, batch, address<float>(hidden),
                              address<std::uint16_t>(pages[static_cast<std::size_t>(layer)]));
    }
}

void forward_layer(Decoder& decoder, std::int64_t layer, const TokenBatch& batch,
                   std::uintptr_t hidden, std::uintptr_t pages) {
    if (layer < 0 || layer >= decoder.num_layers()) {
        throw Failure(FailureKind::kInternal, "layer " + std::to_string(layer) + " is not there");
    }
    const py::gil_scoped_release no_gil;
    decoder.forward_layer(layer, batch, address<float>(hidden), address<std::uint16_t>(pages));
}

void bind_parts(py::module_& m) {
    py::class_<FloatMatrix>(m, "FloatMatrix")
        .def_static(
            "floats",
            [](std::int64_t rows, std::int64_t columns, std::uintptr_t data) {
                return FloatMatrix{rows, columns, address<const float>(data), {}};
            },
            py::arg("rows"), py::arg("columns"), py::arg("data"))
        .def_static(
            "stored",
            [](const Matrix& matrix) {
                return FloatMatrix{matrix.rows, matrix.columns, nullptr, matrix};
            },
            py::arg("matrix"));
    py::class_<RmsNorm>(m, "RmsNorm")
        .def(py::init([](std::uintptr_t weight, std::int64_t size, float eps) {
                 return RmsNorm(floats_at(weight, size), eps);
             }),
             py::arg("weight"), py::arg("size"), py::arg("eps"));
    py::class_<Rotary, std::shared_ptr<Rotary>>(m, "Rotary")
        .def(py::init<std::vector<float>, float, bool>(), py::arg("frequencies"),
             py::arg("amplitude"), py::arg("is_interleaved"));
    py::class_<GqaAttention>(m, "GqaAttention")
        .def(py::init(&make_gqa), py::kw_only(), py::arg("num_heads"), py::arg("num_kv_heads"),
             py::arg("head_dim"), py::arg("softmax_scale"), py::arg("q"), py::arg("k"),
             py::arg("v"), py::arg("o"), py::arg("q_norm"), py::arg("k_norm"), py::arg("rotary"));
    py::class_<MlaAttention>(m, "MlaAttention")
        .def(py::init(&make_mla), py::kw_only(), py::arg("num_heads"), py::arg("latent_dim"),
             py::arg("nope_dim"), py::arg("rope_dim"), py::arg("value_dim"),
             py::arg("softmax_scale"), py::arg("q_a"), py::arg("q_a_norm"), py::arg("q"),
             py::arg("kv_a"), py::arg("kv_a_norm"), py::arg("kv_b"), py::arg("o"),
             py::arg("rotary"));
    py::class_<Compute>(m, "Compute")
        .def(py::init(&make_compute), py::arg("pool"), py::arg("isa"), py::arg("mode"),
             py::keep_alive<1, 2>());
    py::class_<Gate>(m, "Gate")
        .def(py::init(&make_gate), py::kw_only(), py::arg("matrix"), py::arg("bias"),
             py::arg("experts_per_token"), py::arg("num_groups"), py::arg("groups_per_token"),
             py::arg("is_normalized"), py::arg("scale"))
        .def("choose", &choose, py::arg("compute"), py::arg("x"), py::arg("num_tokens"),
             py::arg("experts"), py::arg("weights"));
    py::class_<FeedForward, std::shared_ptr<FeedForward>>(m, "FeedForward")
        .def_static("dense", &make_dense, py::arg("compute"), py::arg("gate"), py::arg("up"),
                    py::arg("down"), py::keep_alive<0, 1>())
        .def_static("routed", &make_routed, py::arg("compute"), py::arg("gate"), py::arg("gate_up"),
                    py::arg("down"), py::arg("num_shards"), py::arg("shared"),
                    py::keep_alive<0, 1>());
}

}  // namespace

void bind_model(py::module_& m) {
    bind_parts(m);
    py::class_<DecoderLayer>(m, "DecoderLayer")
        .def(py::init(&make_layer<GqaAttention>), py::arg("attention_norm"), py::arg("attention"),
             py::arg("ffn_norm"), py::arg("ffn"))
        .def(py::init(&make_layer<MlaAttention>), py::arg("attention_norm"), py::arg("attention"),
             py::arg("ffn_norm"), py::arg("ffn"));
    py::class_<TokenBatch>(m, "TokenBatch")
        .def(py::init(&make_batch), py::arg("spans"), py::arg("block_tokens"),
             py::arg("num_blocks"));
    py::class_<Decoder>(m, "Decoder")
        .def(py::init<const Compute&, const Matrix&, std::vector<DecoderLayer>, RmsNorm,
                      const Matrix&>(),
             py::arg("compute"), py::arg("embedding"), py::arg("layers"), py::arg("final_norm"),
             py::arg("head"), py::keep_alive<1, 2>())
        .def(
            "embed",
            [](const Decoder& decoder, std::uintptr_t token_ids, std::int64_t count,
               std::uintptr_t out) {
                decoder.embed(address<const std::int64_t>(token_ids), count, address<float>(out));
            },
            py::arg("token_ids"), py::arg("count"), py::arg("out"))
        .def("forward", &forward, py::arg("batch"), py::arg("token_ids"), py::arg("pages"),
             py::arg("hidden"))
        .def("forward_layer", &forward_layer, py::arg("layer"), py::arg("batch"), py::arg("hidden"),
             py::arg("pages"))
        .def(
            "logits",
            [](Decoder& decoder, std::uintptr_t hidden, std::int64_t count, std::uintptr_t out) {
                const py::gil_scoped_release no_gil;
                decoder.logits(address<const float>(hidden), count, address<float>(out));
            },
            py::arg("hidden"), py::arg("count"), py::arg("out"));
}

}  // namespace headwater
