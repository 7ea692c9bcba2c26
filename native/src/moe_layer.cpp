#include "headwater/moe_layer.hpp"

#include <atomic>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "headwater/failure.hpp"
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
    void lay_out(Carver& carver);
    void start_counters();
    Scratch scratch_of(Carver& carver) const;
    void prepare_tokens() noexcept;
    void run_gate_up(std::int64_t shard, std::int64_t task, const Scratch& scratch) noexcept;
    void run_down(std::int64_t shard, std::int64_t task, const Scratch& scratch) noexcept;
    const ExpertWeights& weights_of(std::int64_t shard, const Active& active) const;
    // Where the weights of a task begin that this thread will take if it is the only one; null
    // with several threads, who would fetch each other's.
    const std::byte* next_gate_up(std::int64_t shard, std::int64_t task) const;
    const std::byte* next_down(std::int64_t shard, std::int64_t task) const;
    void add_experts(std::int64_t begin, std::int64_t end, const Scratch& scratch) noexcept;

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
    void (*multiply_)(const Product&);
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
    // Shards' tasks of down that are left, per slice.
    Counter* slices_;
    // Per shard: the next task.
    Counter* next_gate_up_;
    Counter* next_down_;
    Counter* next_token_;
    Counter* tokens_left_;
};

MoeRun::MoeRun(const MoeLayer& layer, const MoeBatch& batch)
    : layer_(layer),
      kernels_(layer.kernels_),
      pool_(layer.pool_),
      batch_(batch),
      multiply_(batch.mode == Mode::kDecode ? kernels_.multiply : kernels_.multiply_many),
      num_shards_(static_cast<std::int64_t>(layer.shards_.size())),
      hidden_(layer.hidden_),
      intermediate_(layer.intermediate_),
      per_token_(layer.options_.experts_per_token),
      num_pairs_(batch.num_tokens * per_token_),
      x_bytes_(kernels_.prepared_bytes(layer.shards_[0][0].gate)),
      h_bytes_(kernels_.prepared_bytes(layer.shards_[0][0].down)) {
    Carver counter(nullptr);
    lay_out(counter);
    Carver carver(pool_.shared().reserve(counter.used()));
    lay_out(carver);
    sort_pairs();

    const ExpertWeights& weights = layer_.shards_[0][0];
    const std::int64_t num_items = num_active_ * num_shards_;
    gate_up_rows_ = rows_per_task(
        intermediate_, 2 * packed_bytes(weights.gate.format, hidden_), num_items,
        pool_.num_threads());
    gate_up_slices_ = ceil_div(intermediate_, gate_up_rows_);
    down_rows_ = rows_per_task(hidden_, packed_bytes(weights.down.format, intermediate_),
                               num_items, pool_.num_threads());
    down_slices_ = ceil_div(hidden_, down_rows_);
    Carver worker_counter(nullptr);
    scratch_of(worker_counter);
    pool_.reserve_scratch(worker_counter.used());
    start_counters();
}

void MoeRun::lay_out(Carver& carver) {
    const std::int64_t num_experts = layer_.num_experts();
    const std::int64_t most_active = std::min(num_experts, num_pairs_);
    counts_ = carver.take<std::int64_t>(num_experts);
    active_ = carver.take<Active>(most_active);
    place_of_pair_ = carver.take<std::int64_t>(num_pairs_);
    x_ = carver.take<const std::byte*>(num_pairs_);
    h_ = carver.take<const std::byte*>(num_shards_ * num_pairs_);
    prepared_x_ = carver.take<std::byte>(batch_.num_tokens * x_bytes_);
    prepared_h_ = carver.take<std::byte>(num_shards_ * num_pairs_ * h_bytes_);
    activated_ = carver.take<float>(num_shards_ * num_pairs_ * intermediate_);
    partial_ = carver.take<float>(num_shards_ * num_pairs_ * hidden_);
    progress_ = carver.take<Progress>(num_shards_ * most_active);
    slices_ = carver.take<Counter>(ceil_div(hidden_, kRowUnit));
    next_gate_up_ = carver.take<Counter>(num_shards_);
    next_down_ = carver.take<Counter>(num_shards_);
    next_token_ = carver.take<Counter>(1);
    tokens_left_ = carver.take<Counter>(1);
}

void MoeRun::sort_pairs() {
    const std::int64_t num_experts = layer_.num_experts();
    std::memset(counts_, 0, static_cast<std::size_t>(num_experts) * sizeof *counts_);
    for (std::int64_t pair = 0; pair < num_pairs_; ++pair) {
        ++counts_[batch_.experts[pair]];
    }
    std::int64_t place = 0;
    for (std::int64_t expert = 0; expert < num_experts; ++expert) {
        const std::int64_t num_pairs = counts_[expert];
        if (num_pairs > 0) {
            active_[num_active_++] = {expert, place, num_pairs};
            most_pairs_ = std::max(most_pairs_, num_pairs);
        }
        counts_[expert] = place;
        place += num_pairs;
    }
    for (std::int64_t pair = 0; pair < num_pairs_; ++pair) {
        const std::int64_t at = counts_[batch_.experts[pair]]++;
        place_of_pair_[pair] = at;
        x_[at] = prepared_x_ + pair / per_token_ * x_bytes_;
    }
    for (std::int64_t i = 0; i < num_shards_ * num_pairs_; ++i) {
        h_[i] = prepared_h_ + i * h_bytes_;
    }
}

void MoeRun::start_counters() {
    for (std::int64_t i = 0; i < num_shards_ * num_active_; ++i) {
        new (&progress_[i]) Progress{gate_up_slices_, false};
    }
    for (std::int64_t i = 0; i < down_slices_; ++i) {
        new (&slices_[i]) Counter{num_shards_ * num_active_};
    }
    for (std::int64_t shard = 0; shard < num_shards_; ++shard) {
        new (&next_gate_up_[shard]) Counter{0};
        new (&next_down_[shard]) Counter{0};
    }
    new (next_token_) Counter{0};
    new (tokens_left_) Counter{batch_.num_tokens};
}

MoeRun::Scratch MoeRun::scratch_of(Carver& carver) const {
    const ExpertWeights& weights = layer_.shards_[0][0];
    return {.outputs = carver.take<float*>(most_pairs_),
            .up = carver.take<float>(most_pairs_ * gate_up_rows_),
            .terms = carver.take<const float*>(num_shards_ * per_token_),
            .factors = carver.take<float>(num_shards_ * per_token_),
            .kernel = carver.take<std::byte>(std::max(kernels_.scratch_bytes(weights.gate),
                                                      kernels_.scratch_bytes(weights.down)))};
}

void MoeRun::operator()(int worker) noexcept {
    Carver carver(pool_.scratch(worker));
    const Scratch scratch = scratch_of(carver);
    prepare_tokens();
    // Its own shard first, then whatever others have left.
    const int home = pool_.shard_of(worker, static_cast<int>(num_shards_));
    for (std::int64_t i = 0; i < num_shards_; ++i) {
        const std::int64_t shard = (home + i) % num_shards_;
        const std::int64_t num_gate_up = num_active_ * gate_up_slices_;
        const std::int64_t num_down = num_active_ * down_slices_;
        std::int64_t task;
        while ((task = next_gate_up_[shard].value.fetch_add(1)) < num_gate_up) {
            run_gate_up(shard, task, scratch);
        }
        while ((task = next_down_[shard].value.fetch_add(1)) < num_down) {
            run_down(shard, task, scratch);
        }
    }
}

const ExpertWeights& MoeRun::weights_of(std::int64_t shard, const Active& active) const {
    return layer_.shards_[static_cast<std::size_t>(shard)][static_cast<std::size_t>(active.expert)];
}

const std::byte* MoeRun::next_gate_up(std::int64_t shard, std::int64_t task) const {
    if (pool_.num_threads() > 1) {
        return nullptr;
    }
    if (task == num_active_ * gate_up_slices_) {
        return next_down(shard, 0);
    }
    const Matrix& gate = weights_of(shard, active_[task / gate_up_slices_]).gate;
    return gate.data + task % gate_up_slices_ * gate_up_rows_ * gate.row_bytes;
}

const std::byte* MoeRun::next_down(std::int64_t shard, std::int64_t task) const {
    if (pool_.num_threads() > 1 || task == num_active_ * down_slices_) {
        return nullptr;
    }
    const Matrix& down = weights_of(shard, active_[task / down_slices_]).down;
    return down.data + task % down_slices_ * down_rows_ * down.row_bytes;
}

void MoeRun::prepare_tokens() noexcept {
    const Matrix& gate = layer_.shards_[0][0].gate;
    for (std::int64_t t; (t = next_token_->value.fetch_add(1)) < batch_.num_tokens;) {
        kernels_.prepare(gate, batch_.x + t * batch_.x_stride, prepared_x_ + t * x_bytes_);
        tokens_left_->value.fetch_sub(1);
    }
    for (Backoff backoff; tokens_left_->value.load() > 0;) {
        backoff.wait();
    }
}

void MoeRun::run_gate_up(std::int64_t shard, std::int64_t task, const Scratch& scratch) noexcept {
    const Active& active = active_[task / gate_up_slices_];
    const ExpertWeights& weights = weights_of(shard, active);
    const std::int64_t begin = task % gate_up_slices_ * gate_up_rows_;
    const std::int64_t end = std::min(begin + gate_up_rows_, intermediate_);
    const std::int64_t first = shard * num_pairs_ + active.first_place;
    Product product{.matrix = &weights.gate,
                    .row_begin = begin,
                    .row_end = end,
                    .tokens = x_ + active.first_place,
                    .outputs = scratch.outputs,
                    .num_tokens = active.num_pairs,
                    .scratch = scratch.kernel,
                    .next = weights.up.data + begin * weights.up.row_bytes};
    for (std::int64_t i = 0; i < active.num_pairs; ++i) {
        scratch.outputs[i] = activated_ + (first + i) * intermediate_ + begin;
    }
    multiply_(product);
    product.matrix = &weights.up;
    product.next = next_gate_up(shard, task + 1);
    for (std::int64_t i = 0; i < active.num_pairs; ++i) {
        scratch.outputs[i] = scratch.up + i * gate_up_rows_;
    }
    multiply_(product);
    for (std::int64_t i = 0; i < active.num_pairs; ++i) {
        float* gate = activated_ + (first + i) * intermediate_ + begin;
        kernels_.activate(layer_.options_.activation, layer_.options_.limit, gate,
                          scratch.up + i * gate_up_rows_, gate, end - begin);
    }

    Progress& own = progress(shard, task / gate_up_slices_);
    if (own.slices_left.fetch_sub(1) == 1) {
        for (std::int64_t i = first; i < first + active.num_pairs; ++i) {
            kernels_.prepare(weights.down, activated_ + i * intermediate_,
                             prepared_h_ + i * h_bytes_);
        }
        own.is_ready.store(true);
    }
}

void MoeRun::run_down(std::int64_t shard, std::int64_t task, const Scratch& scratch) noexcept {
    const Active& active = active_[task / down_slices_];
    const std::int64_t slice = task % down_slices_;
    const std::int64_t begin = slice * down_rows_;
    const std::int64_t end = std::min(begin + down_rows_, hidden_);
    for (Backoff backoff; !progress(shard, task / down_slices_).is_ready.load();) {
        backoff.wait();
    }
    for (std::int64_t i = 0; i < active.num_pairs; ++i) {
        scratch.outputs[i] = partial(shard, active.first_place + i) + begin;
    }
    multiply_({.matrix = &weights_of(shard, active).down,
               .row_begin = begin,
               .row_end = end,
               .tokens = h_ + shard * num_pairs_ + active.first_place,
               .outputs = scratch.outputs,
               .num_tokens = active.num_pairs,
               .scratch = scratch.kernel,
               .next = next_down(shard, task + 1)});
    if (slices_[slice].value.fetch_sub(1) == 1) {
        add_experts(begin, end, scratch);
    }
}

void MoeRun::add_experts(std::int64_t begin, std::int64_t end, const Scratch& scratch) noexcept {
    for (std::int64_t t = 0; t < batch_.num_tokens; ++t) {
        std::int64_t num_terms = 0;
        for (std::int64_t pair = t * per_token_; pair < (t + 1) * per_token_; ++pair) {
            for (std::int64_t shard = 0; shard < num_shards_; ++shard) {
                scratch.terms[num_terms] = partial(shard, place_of_pair_[pair]) + begin;
                scratch.factors[num_terms++] = batch_.weights[pair];
            }
        }
        kernels_.weighted_sum(scratch.terms, scratch.factors, num_terms,
                              batch_.output + t * batch_.output_stride + begin, end - begin);
    }
}

namespace {

bool is_alike(const Matrix& a, const Matrix& b) {
    return a.format == b.format && a.scale_type == b.scale_type && a.rows == b.rows &&
           a.columns == b.columns && a.group == b.group &&
           (a.zeros == nullptr) == (b.zeros == nullptr);
}

void require(bool condition, const std::string& problem) {
    if (!condition) {
        throw Failure(FailureKind::kConfig, "experts: " + problem);
    }
}

}  // namespace

MoeLayer::MoeLayer(WorkerPool& pool, const Kernels& kernels,
                   std::vector<std::vector<ExpertWeights>> shards, const Options& options)
    : pool_(pool), kernels_(kernels), shards_(std::move(shards)), options_(options) {
    require(!shards_.empty() && !shards_[0].empty(), "expected at least one");
    const ExpertWeights& first = shards_[0][0];
    hidden_ = first.gate.columns;
    intermediate_ = first.gate.rows;
    require(first.down.rows == hidden_ && first.down.columns == intermediate_,
            "down must be [" + std::to_string(hidden_) + ", " + std::to_string(intermediate_) +
                "] to fit gate, got [" + std::to_string(first.down.rows) + ", " +
                std::to_string(first.down.columns) + "]");
    require(options_.experts_per_token >= 1 &&
                options_.experts_per_token <= static_cast<std::int64_t>(shards_[0].size()),
            "a token cannot choose " + std::to_string(options_.experts_per_token) + " of " +
                std::to_string(shards_[0].size()));
    require(options_.activation != Activation::kClampedSwiglu || options_.limit > 0,
            "the clamped activation needs a limit above 0");
    for (const std::vector<ExpertWeights>& experts : shards_) {
        require(experts.size() == shards_[0].size(), "every shard must hold all of them");
        for (const ExpertWeights& expert : experts) {
            check_matrix(expert.gate, "experts: gate");
            check_matrix(expert.up, "experts: up");
            check_matrix(expert.down, "experts: down");
            require(is_alike(expert.gate, first.gate) && is_alike(expert.up, first.gate) &&
                        is_alike(expert.down, first.down),
                    "all must have the same shapes and formats");
        }
    }
}

std::int64_t MoeLayer::num_experts() const noexcept {
    return static_cast<std::int64_t>(shards_[0].size());
}

std::int64_t MoeLayer::expert_bytes() const noexcept {
    const ExpertWeights& weights = shards_[0][0];
    return static_cast<std::int64_t>(shards_.size()) *
           (stored_bytes(weights.gate) + stored_bytes(weights.up) + stored_bytes(weights.down));
}

void MoeLayer::run(const MoeBatch& batch) const {
    if (batch.num_tokens == 0) {
        return;
    }
    MoeRun run(*this, batch);
    pool_.run(run);
}

Matrix stacked_member(const Matrix& first, std::int64_t index) {
    const bool has_blocks = first.format == Format::kFp8;
    const std::int64_t scale_rows = has_blocks ? ceil_div(first.rows, kFp8Block) : first.rows;
    Matrix member = first;
    member.data += index * first.rows * first.row_bytes;
    if (first.scales != nullptr) {
        member.scales += index * scale_rows * first.scale_row_bytes;
    }
    if (first.zeros != nullptr) {
        member.zeros += index * first.rows * first.zero_row_bytes;
    }
    return member;
}

std::vector<std::vector<ExpertWeights>> stacked_experts(const Matrix& gate_up, const Matrix& down,
                                                        std::int64_t num_experts, int num_shards) {
    require(num_shards >= 1 && gate_up.rows % num_shards == 0,
            std::to_string(gate_up.rows) + " intermediate rows cannot be cut into " +
                std::to_string(num_shards) + " equal shards");
    const std::int64_t size = gate_up.rows / num_shards;
    std::vector<std::vector<ExpertWeights>> shards(static_cast<std::size_t>(num_shards));
    for (int shard = 0; shard < num_shards; ++shard) {
        for (std::int64_t expert = 0; expert < num_experts; ++expert) {
            const std::int64_t begin = shard * size;
            shards[static_cast<std::size_t>(shard)].push_back(
                {row_slice(stacked_member(gate_up, 2 * expert), begin, size),
                 row_slice(stacked_member(gate_up, 2 * expert + 1), begin, size),
                 column_slice(stacked_member(down, expert), begin, size)});
        }
    }
    return shards;
}

}  // namespace headwater
