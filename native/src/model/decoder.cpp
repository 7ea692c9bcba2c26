#include "headwater/model/decoder.hpp"

#include <string>
#include <utility>

#include "headwater/bf16.hpp"
#include "headwater/failure.hpp"

namespace headwater {

namespace {

void require(bool condition, const std::string& problem) {
    if (!condition) {
        throw Failure(FailureKind::kConfig, "model: " + problem);
    }
}

}  // namespace

Decoder::Decoder(const Compute& compute, const Matrix& embedding, std::vector<DecoderLayer> layers,
                 RmsNorm final_norm, const Matrix& head)
    : compute_(compute),
      embedding_(embedding),
      layers_(std::move(layers)),
      final_norm_(std::move(final_norm)),
      head_(head) {
    require(embedding_.format == Format::kBf16, "the embedding must be BF16");
    require(head_.columns == hidden_size() && final_norm_.size() == hidden_size(),
            "head and final norm must have the embedding's size");
    for (const DecoderLayer& layer : layers_) {
        require(
            layer.attention_norm.size() == hidden_size() && layer.ffn_norm.size() == hidden_size(),
            "norms must have the embedding's size");
    }
}

void Decoder::embed(const std::int64_t* token_ids, std::int64_t count, float* out) const {
    for (std::int64_t t = 0; t < count; ++t) {
        if (token_ids[t] < 0 || token_ids[t] >= vocab_size()) {
            throw Failure(FailureKind::kInternal,
                          "token " + std::to_string(token_ids[t]) + " is outside the vocabulary");
        }
        const auto* row = reinterpret_cast<const std::uint16_t*>(
            embedding_.data + token_ids[t] * embedding_.row_bytes);
        for (std::int64_t i = 0; i < hidden_size(); ++i) {
            out[t * hidden_size() + i] = float_from_bf16(row[i]);
        }
    }
}

void Decoder::forward_layer(std::int64_t index, const TokenBatch& batch, float* hidden,
                            std::uint16_t* pages) {
    DecoderLayer& layer = layers_[static_cast<std::size_t>(index)];
    const std::int64_t num_tokens = batch.num_tokens();
    const std::int64_t size = hidden_size();
    const auto [normalised, addend] =
        carve<2>(workspace_.layer, {num_tokens * size, num_tokens * size});
    for_tokens(compute_, num_tokens, size, [&](std::int64_t row) {
        layer.attention_norm.apply(hidden + row * size, normalised + row * size);
    });
    std::visit(
        [&](const auto& attention) {
            attention.run(compute_, workspace_, batch, normalised, pages, addend);
        },
        layer.attention);
    for_tokens(compute_, num_tokens, size, [&](std::int64_t row) {
        float* mine = hidden + row * size;
        for (std::int64_t i = 0; i < size; ++i) {
            mine[i] += addend[row * size + i];
        }
        layer.ffn_norm.apply(mine, normalised + row * size);
    });
    layer.ffn->run(compute_, workspace_, normalised, num_tokens, addend);
    for_tokens(compute_, num_tokens, size, [&](std::int64_t row) {
        for (std::int64_t i = row * size; i < (row + 1) * size; ++i) {
            hidden[i] += addend[i];
        }
    });
}

void Decoder::logits(const float* hidden, std::int64_t count, float* out) {
    const std::int64_t size = hidden_size();
    const auto [normalised] = carve<1>(workspace_.layer, {count * size});
    for (std::int64_t t = 0; t < count; ++t) {
        final_norm_.apply(hidden + t * size, normalised + t * size);
    }
    const LinearPart part[] = {{&head_, out, head_.rows}};
    linear(*compute_.pool, *compute_.kernels, part, normalised, size, count, compute_.mode);
}

}  // namespace headwater
