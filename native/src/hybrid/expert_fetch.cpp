#include "hybrid/expert_fetch.hpp"

#include <algorithm>
#include <cstddef>

#include "task_cut.hpp"

namespace headwater {

namespace {

constexpr std::int64_t kPiece = 4096;
constexpr std::int64_t kLine = 64;
constexpr std::int64_t kFetchedRows = kRowUnit / 2;

// What one worker reads, piece by piece, while it may.
class Reader {
  public:
    Reader(std::int64_t most, const std::function<bool()>& is_over)
        : most_(most), is_over_(is_over) {}

    // Whether there may be more after it.
    bool read(const std::byte* data, std::int64_t num_bytes) {
        for (std::int64_t at = 0; at < num_bytes; at += kPiece) {
            if (num_read_ >= most_ || is_over_()) {
                return false;
            }
            const std::int64_t size = std::min(kPiece, num_bytes - at);
            touch(data + at, size);
            num_read_ += size;
        }
        return true;
    }
    std::int64_t num_read() const { return num_read_; }

  private:
    // By loads: of prefetches a core drops some when it has too many under way.
    static void touch(const std::byte* data, std::int64_t num_bytes) {
        for (std::int64_t at = 0; at < num_bytes; at += kLine) {
            static_cast<void>(*static_cast<const volatile std::byte*>(data + at));
        }
    }

    const std::int64_t most_;
    const std::function<bool()>& is_over_;
    std::int64_t num_read_ = 0;
};

}  // namespace

ExpertFetch::ExpertFetch(const WorkerPool& pool, const MoeLayer& layer,
                         std::span<const std::int32_t> experts, std::int64_t most_bytes)
    : pool_(pool),
      layer_(layer),
      experts_(experts),
      rows_per_task_(layer.gate_up_rows(static_cast<std::int64_t>(experts.size()))),
      tasks_per_expert_(ceil_div(layer.shards()[0][0].gate.rows, rows_per_task_)),
      most_per_worker_(most_bytes / pool.num_threads()) {}

std::int64_t ExpertFetch::run(int worker, const std::function<bool()>& is_over) const {
    const auto num_shards = static_cast<int>(layer_.shards().size());
    const int home = pool_.shard_of(worker, num_shards);
    const WorkerPool::Team team = pool_.team_of(home, num_shards);
    const auto num_tasks = tasks_per_expert_ * static_cast<std::int64_t>(experts_.size());
    Reader reader(most_per_worker_, is_over);
    for (std::int64_t task = worker - team.first; task < num_tasks; task += team.size) {
        const auto expert =
            static_cast<std::size_t>(experts_[static_cast<std::size_t>(task / tasks_per_expert_)]);
        const ExpertWeights& weights = layer_.shards()[static_cast<std::size_t>(home)][expert];
        const std::int64_t begin = task % tasks_per_expert_ * rows_per_task_;
        const std::int64_t end = std::min(begin + rows_per_task_, weights.gate.rows);
        for (const Matrix* matrix : {&weights.gate, &weights.up}) {
            for (std::int64_t row = begin; row < end; row += kRowUnit) {
                const std::byte* data = matrix->data + row * matrix->row_bytes;
                const std::int64_t size = std::min(kFetchedRows, end - row) * matrix->row_bytes;
                if (!reader.read(data, size)) {
                    return reader.num_read();
                }
            }
        }
    }
    return reader.num_read();
}

}  // namespace headwater
