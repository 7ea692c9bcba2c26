// Decoder: a whole decoder-only model, one call per layer or one for all of them.
//
// It owns neither weights nor pool: whoever makes it keeps them alive. One thread at a time uses
// it. In either mode a token's result depends on its own sequence only, to the last bit: not on the
// other tokens of the batch, nor on how its prompt was cut, nor on the number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "headwater/model/compute.hpp"
#include "headwater/model/feed_forward.hpp"
#include "headwater/model/gqa_attention.hpp"
#include "headwater/model/mla_attention.hpp"
#include "headwater/model/rms_norm.hpp"
#include "headwater/model/token_batch.hpp"

namespace headwater {

using Attention = std::variant<GqaAttention, MlaAttention>;

struct DecoderLayer {
    RmsNorm attention_norm;
    Attention attention;
    RmsNorm ffn_norm;
    std::shared_ptr<FeedForward> ffn;
};

class Decoder {
  public:
    // `embedding` is BF16 [vocabulary, hidden]; `head` may be the same. Throws Failure(kConfig)
    // when the sizes do not fit.
    Decoder(const Compute& compute, const Matrix& embedding, std::vector<DecoderLayer> layers,
            RmsNorm final_norm, const Matrix& head);

    std::int64_t num_layers() const noexcept { return static_cast<std::int64_t>(layers_.size()); }
    std::int64_t hidden_size() const noexcept { return embedding_.columns; }
    std::int64_t vocab_size() const noexcept { return embedding_.rows; }

    // out [count, hidden]. Throws Failure(kInternal) for an id outside the vocabulary.
    void embed(const std::int64_t* token_ids, std::int64_t count, float* out) const;
    // hidden [num_tokens, hidden] is replaced by the layer's output; its KV goes to `pages`.
    void forward_layer(std::int64_t layer, const TokenBatch& batch, float* hidden,
                       std::uint16_t* pages);
    // hidden [count, hidden] after the last layer -> logits [count, vocabulary].
    void logits(const float* hidden, std::int64_t count, float* out);

  private:
    Compute compute_;
    Matrix embedding_;
    std::vector<DecoderLayer> layers_;
    RmsNorm final_norm_;
    Matrix head_;
    Workspace workspace_;
};

}  // namespace headwater
