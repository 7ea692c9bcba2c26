// What one forward pass computes: new tokens of several sequences, packed one after the other.
#pragma once

#include <cstdint>
#include <vector>

namespace headwater {

// Rows [first_row, first_row + num_new) of the batch are the tokens of one sequence from position
// `start` on; `block_ids`, which the caller keeps alive, reach to the last of them.
struct SequenceSpan {
    std::int64_t first_row;
    std::int64_t num_new;
    std::int64_t start;
    const std::int64_t* block_ids;
    std::int64_t num_blocks;
};

class TokenBatch {
  public:
    // Throws Failure(kInternal) unless the spans cover the rows one after the other and have
    // blocks, all below `num_blocks`, for all their tokens.
    TokenBatch(std::vector<SequenceSpan> spans, std::int64_t block_tokens, std::int64_t num_blocks);

    std::int64_t num_tokens() const noexcept {
        return static_cast<std::int64_t>(positions_.size());
    }
    std::int64_t block_tokens() const noexcept { return block_tokens_; }
    const std::vector<SequenceSpan>& spans() const noexcept { return spans_; }
    // Per row.
    const std::vector<std::int64_t>& positions() const noexcept { return positions_; }
    std::int64_t block(std::int64_t row) const { return blocks_[static_cast<std::size_t>(row)]; }
    std::int64_t offset(std::int64_t row) const {
        return positions_[static_cast<std::size_t>(row)] % block_tokens_;
    }

  private:
    std::vector<SequenceSpan> spans_;
    std::int64_t block_tokens_;
    std::vector<std::int64_t> positions_;
    std::vector<std::int64_t> blocks_;
};

}  // namespace headwater
