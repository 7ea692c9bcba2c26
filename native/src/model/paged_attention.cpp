// Work is cut into tiles: some queries of a sequence, some query heads of one KV head. With many
// tiles, as in prefill, each is computed over its whole context by one worker. With few, as in
// decode, each split of a tile's context is a unit of its own, and the splits' results are merged
// afterwards. Both ways perform the same operations in the same order.
#include "headwater/model/paged_attention.hpp"

#include <algorithm>

#include "headwater/parallel.hpp"

namespace headwater {

namespace {

constexpr std::int64_t kTilesPerThread = 8;
constexpr std::int64_t kUnitsPerThread = 2;
constexpr std::int64_t kFewHeads = 8;
// Bounds the memory for results of splits: they are merged whenever so many floats are full.
constexpr std::int64_t kMaxPartialFloats = 4 << 20;

std::int64_t ceil_div(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit; }

// Rows of states, one per query and head: [rows] maxima, sums, and [rows][value_dim].
struct States {
    float* maxima;
    float* sums;
    float* weighted;
    std::int64_t value_dim;

    static std::int64_t num_floats(std::int64_t rows, std::int64_t value_dim) {
        return rows * (value_dim + 2);
    }
    States(float* memory, std::int64_t rows, std::int64_t value_dim)
        : maxima(memory), sums(memory + rows), weighted(memory + 2 * rows), value_dim(value_dim) {}
    AttentionState row(std::int64_t i) const {
        return {maxima + i, sums + i, weighted + i * value_dim};
    }
    void clear(std::int64_t first, std::int64_t count) const {
        for (std::int64_t i = first; i < first + count; ++i) {
            clear_attention(row(i), value_dim);
        }
    }
};

class Call {
  public:
    Call(const Compute& compute, Workspace& workspace, const AttentionShape& shape,
         const TokenBatch& batch, const std::uint16_t* pages, const float* queries, float* outputs,
         std::int64_t first_row)
        : compute_(compute),
          workspace_(workspace),
          shape_(shape),
          batch_(batch),
          pages_(pages),
          queries_(queries),
          outputs_(outputs),
          first_row_(first_row),
          group_(shape.num_heads / shape.num_kv_heads),
          tiles_(workspace.tiles) {}

    void run(std::int64_t end_row) {
        cut_tiles(end_row);
        std::int64_t num_splits = 0;
        for (const AttentionTileSpec& tile : tiles_) {
            num_splits = std::max(num_splits, tile.end_split);
        }
        compute_.pool->reserve_scratch(attention_scratch_bytes(shape_.key_dim) +
                                       2 * 4 * States::num_floats(kMaxTileRows, shape_.value_dim));
        const auto num_tiles = static_cast<std::int64_t>(tiles_.size());
        if (num_tiles >= kTilesPerThread * compute_.pool->num_threads() || num_splits == 1) {
            parallel_for(*compute_.pool, num_tiles, [&](std::int64_t i, int worker) {
                attend_whole(tiles_[static_cast<std::size_t>(i)], worker);
            });
        } else {
            attend_split(num_splits);
        }
    }

  private:
    const SequenceSpan& span_of(const AttentionTileSpec& tile) const {
        return batch_.spans()[static_cast<std::size_t>(tile.span)];
    }

    // As many as fit in a tile, for they share the work on the keys; but fewer where there would
    // not be enough units for all threads. Rows do not depend on each other, so this changes no
    // bit.
    std::int64_t choose_heads_per_tile(std::int64_t end_row) const {
        std::int64_t query_splits = 0;
        for (const SequenceSpan& span : batch_.spans()) {
            const std::int64_t num_queries = std::min(end_row, span.first_row + span.num_new) -
                                             std::max(first_row_, span.first_row);
            query_splits += std::max<std::int64_t>(num_queries, 0) *
                            ceil_div(span.start + span.num_new, kSplitTokens);
        }
        const std::int64_t wanted = kUnitsPerThread * compute_.pool->num_threads();
        std::int64_t heads = std::min(group_, kMaxTileRows);
        while (heads > kFewHeads &&
               query_splits * shape_.num_kv_heads * ceil_div(group_, heads) < wanted) {
            heads = ceil_div(heads, 2);
        }
        return heads;
    }

    void cut_tiles(std::int64_t end_row) {
        tiles_.clear();
        const std::int64_t heads_per_tile = choose_heads_per_tile(end_row);
        const std::int64_t queries_per_tile = kMaxTileRows / heads_per_tile;
        std::int64_t num_rows = 0;
        for (std::size_t s = 0; s < batch_.spans().size(); ++s) {
            const SequenceSpan& span = batch_.spans()[s];
            const std::int64_t begin = std::max(first_row_, span.first_row) - span.first_row;
            const std::int64_t end =
                std::min(end_row, span.first_row + span.num_new) - span.first_row;
            for (std::int64_t query = begin; query < end; query += queries_per_tile) {
                const std::int64_t num_queries = std::min(queries_per_tile, end - query);
                const std::int64_t first_split = first_visible(span.start + query) / kSplitTokens;
                const std::int64_t end_split =
                    ceil_div(span.start + query + num_queries, kSplitTokens);
                for (std::int64_t kv_head = 0; kv_head < shape_.num_kv_heads; ++kv_head) {
                    for (std::int64_t head = 0; head < group_; head += heads_per_tile) {
                        const std::int64_t num_heads = std::min(heads_per_tile, group_ - head);
                        tiles_.push_back({static_cast<std::int64_t>(s), query, num_queries, kv_head,
                                          head, num_heads, first_split, end_split, num_rows});
                        num_rows += num_queries * num_heads;
                    }
                }
            }
        }
        num_rows_ = num_rows;
    }

    // One split of a tile; rows from `row` on of `states` are overwritten.
    void attend(const AttentionTileSpec& tile, std::int64_t split, const States& states,
                std::int64_t row, int worker) const {
        const SequenceSpan& span = span_of(tile);
        const PagedCache cache = {pages_,
                                  span.block_ids,
                                  batch_.block_tokens(),
                                  shape_.block_stride,
                                  shape_.token_stride,
                                  tile.kv_head * shape_.head_stride,
                                  tile.kv_head * shape_.head_stride + shape_.value_offset};
        const float* queries[kMaxTileRows];
        std::int64_t visible_begin[kMaxTileRows];
        std::int64_t visible_end[kMaxTileRows];
        std::int64_t count = 0;
        for (std::int64_t q = tile.first_query; q < tile.first_query + tile.num_queries; ++q) {
            const std::int64_t position = span.start + q;
            for (std::int64_t h = 0; h < tile.num_heads; ++h) {
                queries[count] = queries_ + query_head(tile, q, h) * shape_.key_dim;
                visible_end[count] = position + 1;
                visible_begin[count] = first_visible(position);
                ++count;
            }
        }
        const std::int64_t first_key =
            std::max(split * kSplitTokens, first_visible(span.start + tile.first_query));
        const std::int64_t end_key =
            std::min((split + 1) * kSplitTokens, span.start + tile.first_query + tile.num_queries);
        compute_.kernels->attend(
            {&cache, shape_.key_dim, shape_.value_dim, count, queries, visible_begin, visible_end,
             first_key, end_key, states.maxima + row, states.sums + row,
             states.weighted + row * shape_.value_dim, compute_.pool->scratch(worker)});
    }

    std::int64_t first_visible(std::int64_t position) const {
        return shape_.window > 0 ? std::max<std::int64_t>(0, position + 1 - shape_.window) : 0;
    }

    // Index, among rows times heads of this call, of a tile's query head.
    std::int64_t query_head(const AttentionTileSpec& tile, std::int64_t query,
                            std::int64_t h) const {
        return (span_of(tile).first_row + query - first_row_) * shape_.num_heads +
               tile.kv_head * group_ + tile.first_head + h;
    }

    void merge(const AttentionTileSpec& tile, const States& states, std::int64_t row,
               const States& next, std::int64_t next_row) const {
        for (std::int64_t i = 0; i < tile.num_queries * tile.num_heads; ++i) {
            merge_attention(states.row(row + i), next.row(next_row + i), shape_.value_dim);
        }
    }

    void finish(const AttentionTileSpec& tile, const States& states, std::int64_t row) const {
        for (std::int64_t q = tile.first_query; q < tile.first_query + tile.num_queries; ++q) {
            for (std::int64_t h = 0; h < tile.num_heads; ++h) {
                const float* sink = shape_.sinks == nullptr ? nullptr
                                                            : shape_.sinks + tile.kv_head * group_ +
                                                                  tile.first_head + h;
                finish_attention(states.row(row++), sink, shape_.value_dim,
                                 outputs_ + query_head(tile, q, h) * shape_.value_dim);
            }
        }
    }

    void attend_whole(const AttentionTileSpec& tile, int worker) const {
        auto* memory = reinterpret_cast<float*>(compute_.pool->scratch(worker) +
                                                attention_scratch_bytes(shape_.key_dim));
        const States states(memory, kMaxTileRows, shape_.value_dim);
        const States next(memory + States::num_floats(kMaxTileRows, shape_.value_dim), kMaxTileRows,
                          shape_.value_dim);
        states.clear(0, tile.num_queries * tile.num_heads);
        for (std::int64_t split = tile.first_split; split < tile.end_split; ++split) {
            attend(tile, split, next, 0, worker);
            merge(tile, states, 0, next, 0);
        }
        finish(tile, states, 0);
    }

    // Waves of as many splits as there is room for.
    void attend_split(std::int64_t num_splits) const {
        const std::int64_t row_floats = States::num_floats(num_rows_, shape_.value_dim);
        const std::int64_t splits_per_wave =
            std::clamp<std::int64_t>(kMaxPartialFloats / row_floats, 1, num_splits);
        auto* memory = reinterpret_cast<float*>(
            workspace_.partials.reserve((splits_per_wave + 1) * row_floats * 4));
        const States states(memory, num_rows_, shape_.value_dim);
        const auto partial = [&](std::int64_t split) {
            return States(memory + (1 + split % splits_per_wave) * row_floats, num_rows_,
                          shape_.value_dim);
        };
        const auto num_tiles = static_cast<std::int64_t>(tiles_.size());
        const auto tile_at = [&](std::int64_t i) -> const AttentionTileSpec& {
            return tiles_[static_cast<std::size_t>(i)];
        };
        states.clear(0, num_rows_);
        for (std::int64_t first = 0; first < num_splits; first += splits_per_wave) {
            const std::int64_t stop = std::min(first + splits_per_wave, num_splits);
            parallel_for(*compute_.pool, num_tiles * (stop - first),
                         [&](std::int64_t i, int worker) {
                             const AttentionTileSpec& tile = tile_at(i % num_tiles);
                             const std::int64_t split = first + i / num_tiles;
                             if (split >= tile.first_split && split < tile.end_split) {
                                 attend(tile, split, partial(split), tile.first_row, worker);
                             }
                         });
            parallel_for(*compute_.pool, num_tiles, [&](std::int64_t i, int) {
                const AttentionTileSpec& tile = tile_at(i);
                for (std::int64_t split = std::max(first, tile.first_split);
                     split < std::min(stop, tile.end_split); ++split) {
                    merge(tile, states, tile.first_row, partial(split), tile.first_row);
                }
                if (stop == num_splits) {
                    finish(tile, states, tile.first_row);
                }
            });
        }
    }

    const Compute& compute_;
    Workspace& workspace_;
    const AttentionShape& shape_;
    const TokenBatch& batch_;
    const std::uint16_t* pages_;
    const float* queries_;
    float* outputs_;
    std::int64_t first_row_;
    std::int64_t group_;
    std::vector<AttentionTileSpec>& tiles_;
    std::int64_t num_rows_ = 0;
};

}  // namespace

void paged_attention(const Compute& compute, Workspace& workspace, const AttentionShape& shape,
                     const TokenBatch& batch, std::int64_t first_row, std::int64_t end_row,
                     const std::uint16_t* pages, const float* queries, float* outputs) {
    Call(compute, workspace, shape, batch, pages, queries, outputs, first_row).run(end_row);
}

}  // namespace headwater
