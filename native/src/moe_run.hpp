// MoeRun: one call of a MoeLayer, as a job of the worker pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "headwater/moe_layer.hpp"
#include "task_cut.hpp"

namespace headwater {

// One call of a layer. A pair is a token and one of its experts; pairs are put in the order of
// their experts, so that an expert's pairs are neighbours, and known by their place in it.
class MoeRun {
  public:
    MoeRun(const MoeLayer& layer, const MoeBatch& batch);

    void operator()(int worker) noexcept;

  private:
    // An expert that at least one token has chosen.
    struct Active {
        std::int64_t expert;
        std::int64_t first_place;
        std::int64_t num_pairs;
    };
    // How far an expert's shard is.
    struct alignas(64) Progress {
        std::atomic<std::int64_t> slices_left;
        std::atomic<bool> is_ready;
    };
    struct alignas(64) Counter {
        std::atomic<std::int64_t> value;
    };
    // A worker's own memory, cut anew for every task.
    struct Scratch {
        float** outputs;
        float* up;
        const float** terms;
        float* factors;
        std::byte* kernel;
    };

    void sort_pairs();
    void bring_to_front(std::span<const std::int32_t> experts);
    void lay_out(Carver& carver);
    void start_counters();
    Scratch scratch_of(Carver& carver) const;
    void prepare_tokens() noexcept;
    std::int64_t take_own(int worker, std::int64_t shard) noexcept;
    std::int64_t take_gate_up(std::int64_t shard) noexcept;
    // From a task of gate and up on that has been taken.
    void run_tasks(std::int64_t shard, std::int64_t gate_up, const Scratch& scratch) noexcept;
    // `next`: where the weights begin that this thread will read afterwards, or null.
    void run_gate_up(std::int64_t shard, std::int64_t task, const std::byte* next,
                     const Scratch& scratch) noexcept;
    void run_down(std::int64_t shard, std::int64_t task, const std::byte* next,
                  const Scratch& scratch) noexcept;
    const ExpertWeights& weights_of(std::int64_t shard, const Active& active) const;
    // Where the weights of a task begin; null where there is no such task of down.
    const std::byte* gate_data(std::int64_t shard, std::int64_t task) const;
    const std::byte* down_data(std::int64_t shard, std::int64_t task) const;
    void add_experts(std::int64_t begin, std::int64_t end, const Scratch& scratch) noexcept;

    std::int64_t num_gate_up() const noexcept { return num_active_ * gate_up_slices_; }
    WorkerPool::Team team_of(std::int64_t shard) const noexcept {
        return pool_.team_of(static_cast<int>(shard), static_cast<int>(num_shards_));
    }
    Progress& progress(std::int64_t shard, std::int64_t active) {
        return progress_[shard * num_active_ + active];
    }
    float* partial(std::int64_t shard, std::int64_t place) {
        return partial_ + (shard * num_pairs_ + place) * hidden_;
    }

    const MoeLayer& layer_;
    const Kernels& kernels_;
    WorkerPool& pool_;
    const MoeBatch& batch_;
    const ProductWay way_;
    const std::int64_t num_shards_;
    const std::int64_t hidden_;
    const std::int64_t intermediate_;
    const std::int64_t per_token_;
    const std::int64_t num_pairs_;
    const std::int64_t x_bytes_;
    const std::int64_t h_bytes_;

    std::int64_t num_active_ = 0;
    std::int64_t most_pairs_ = 0;
    std::int64_t gate_up_rows_ = 0;
    std::int64_t gate_up_slices_ = 0;
    std::int64_t down_rows_ = 0;
    std::int64_t down_slices_ = 0;

    // All in the pool's shared memory. By expert, by pair:
    std::int64_t* counts_;
    Active* active_;
    std::int64_t* place_of_pair_;
    // By place: the token's prepared activations, those of the expert's hidden layer per shard.
    const std::byte** x_;
    const std::byte** h_;
    std::byte* prepared_x_;
    std::byte* prepared_h_;
    // FP32 [shards, places, intermediate] and [shards, places, hidden].
    float* activated_;
    float* partial_;
    Progress* progress_;
    // Per worker: whether somebody has taken its first task.
    std::atomic<bool>* is_taken_;
    // Shards' tasks of down that are left, per slice.
    Counter* slices_;
    // Per shard: the next task.
    Counter* next_gate_up_;
    Counter* next_down_;
    Counter* next_token_;
    Counter* tokens_left_;
};

}  // namespace headwater
