#include "headwater/model/token_batch.hpp"

#include <string>
#include <utility>

#include "headwater/failure.hpp"

namespace headwater {

namespace {

void require(bool condition, const char* what) {
    if (!condition) {
        throw Failure(FailureKind::kInternal, std::string("token batch: ") + what);
    }
}

}  // namespace

TokenBatch::TokenBatch(std::vector<SequenceSpan> spans, std::int64_t block_tokens,
                       std::int64_t num_blocks)
    : spans_(std::move(spans)), block_tokens_(block_tokens) {
    require(block_tokens > 0, "block_tokens must be positive");
    require(!spans_.empty(), "there must be a span");
    for (const SequenceSpan& span : spans_) {
        require(span.first_row == num_tokens(), "spans must follow one another");
        require(span.num_new > 0 && span.start >= 0, "a span must hold tokens");
        const std::int64_t stop = span.start + span.num_new;
        require(stop <= span.num_blocks * block_tokens, "blocks end before the tokens");
        for (std::int64_t i = 0; i * block_tokens < stop; ++i) {
            require(span.block_ids[i] >= 0 && span.block_ids[i] < num_blocks,
                    "a block is not of the pool");
        }
        for (std::int64_t position = span.start; position < stop; ++position) {
            positions_.push_back(position);
            blocks_.push_back(span.block_ids[position / block_tokens]);
        }
    }
}

}  // namespace headwater
