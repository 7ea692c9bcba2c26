#include "moe_run.hpp"

#include <algorithm>
#include <cstring>
#include <new>

namespace headwater {

namespace {

// By the layer, not by its tokens, so that none of them depends on how many there are.
ProductWay way_of(const MoeLayer& layer, const Kernels& kernels, Mode mode) {
    if (mode == Mode::kDecode && layer.is_sparse()) {
        return kernels.sparse;
    }
    return mode == Mode::kDecode ? few_of(kernels) : many_of(kernels);
}

}  // namespace

MoeRun::MoeRun(const MoeLayer& layer, const MoeBatch& batch)
    : layer_(layer),
      kernels_(layer.kernels_),
      pool_(layer.pool_),
      batch_(batch),
      way_(way_of(layer, kernels_, batch.mode)),
      num_shards_(static_cast<std::int64_t>(layer.shards_.size())),
      hidden_(layer.hidden_),
      intermediate_(layer.intermediate_),
      per_token_(layer.options_.experts_per_token),
      num_pairs_(batch.num_tokens * per_token_),
      x_bytes_(way_.prepared_bytes(layer.shards_[0][0].gate)),
      h_bytes_(way_.prepared_bytes(layer.shards_[0][0].down)) {
    Carver counter(nullptr);
    lay_out(counter);
    Carver carver(pool_.shared().reserve(counter.used()));
    lay_out(carver);
    sort_pairs();

    const ExpertWeights& weights = layer_.shards_[0][0];
    const std::int64_t num_items = num_active_ * num_shards_;
    gate_up_rows_ = layer_.gate_up_rows(num_active_);
    gate_up_slices_ = ceil_div(intermediate_, gate_up_rows_);
    down_rows_ = rows_per_task(hidden_, packed_bytes(weights.down.format, intermediate_), num_items,
                               pool_.num_threads(), kLastTasksPerThread);
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
    is_taken_ = carver.take<std::atomic<bool>>(pool_.num_threads());
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
    for (std::int64_t expert = 0; expert < num_experts; ++expert) {
        if (counts_[expert] > 0) {
            active_[num_active_++] = {expert, 0, counts_[expert]};
            most_pairs_ = std::max(most_pairs_, counts_[expert]);
        }
    }
    bring_to_front(batch_.first);
    std::int64_t place = 0;
    for (std::int64_t i = 0; i < num_active_; ++i) {
        active_[i].first_place = counts_[active_[i].expert] = place;
        place += active_[i].num_pairs;
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

void MoeRun::bring_to_front(std::span<const std::int32_t> experts) {
    Active* front = active_;
    Active* const end = active_ + num_active_;
    for (const std::int32_t expert : experts) {
        Active* found =
            std::find_if(front, end, [&](const Active& a) { return a.expert == expert; });
        if (found != end) {
            std::rotate(front++, found, found + 1);
        }
    }
}

void MoeRun::start_counters() {
    for (int worker = 0; worker < pool_.num_threads(); ++worker) {
        new (&is_taken_[worker]) std::atomic<bool>{false};
    }
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
    run_tasks(home, take_own(worker, home), scratch);
    for (std::int64_t i = 1; i < num_shards_; ++i) {
        const std::int64_t shard = (home + i) % num_shards_;
        run_tasks(shard, take_gate_up(shard), scratch);
    }
}

// Each worker begins with a task of its own, whose weights it may have fetched (ExpertFetch).
std::int64_t MoeRun::take_own(int worker, std::int64_t shard) noexcept {
    const std::int64_t task = worker - team_of(shard).first;
    const bool is_free = !is_taken_[worker].exchange(true);
    return is_free && task < num_gate_up() ? task : take_gate_up(shard);
}

std::int64_t MoeRun::take_gate_up(std::int64_t shard) noexcept {
    const WorkerPool::Team team = team_of(shard);
    while (true) {
        const std::int64_t task = next_gate_up_[shard].value.fetch_add(1);
        if (task >= team.size || !is_taken_[team.first + task].exchange(true)) {
            return task;
        }
    }
}

// A task is taken while the one before it is under way, which can then fetch what it begins with.
void MoeRun::run_tasks(std::int64_t shard, std::int64_t gate_up, const Scratch& scratch) noexcept {
    const std::int64_t num_down = num_active_ * down_slices_;
    const auto take_down = [&] { return next_down_[shard].value.fetch_add(1); };
    std::int64_t down = gate_up < num_gate_up() ? num_down : take_down();
    while (gate_up < num_gate_up()) {
        const std::int64_t next = take_gate_up(shard);
        if (next >= num_gate_up()) {
            down = take_down();
        }
        run_gate_up(shard, gate_up,
                    next < num_gate_up() ? gate_data(shard, next) : down_data(shard, down),
                    scratch);
        gate_up = next;
    }
    while (down < num_down) {
        const std::int64_t next = take_down();
        run_down(shard, down, down_data(shard, next), scratch);
        down = next;
    }
}

const ExpertWeights& MoeRun::weights_of(std::int64_t shard, const Active& active) const {
    return layer_.shards_[static_cast<std::size_t>(shard)][static_cast<std::size_t>(active.expert)];
}

const std::byte* MoeRun::gate_data(std::int64_t shard, std::int64_t task) const {
    const Matrix& gate = weights_of(shard, active_[task / gate_up_slices_]).gate;
    return gate.data + task % gate_up_slices_ * gate_up_rows_ * gate.row_bytes;
}

const std::byte* MoeRun::down_data(std::int64_t shard, std::int64_t task) const {
    if (task >= num_active_ * down_slices_) {
        return nullptr;
    }
    const Matrix& down = weights_of(shard, active_[task / down_slices_]).down;
    return down.data + task % down_slices_ * down_rows_ * down.row_bytes;
}

void MoeRun::prepare_tokens() noexcept {
    const Matrix& gate = layer_.shards_[0][0].gate;
    for (std::int64_t t; (t = next_token_->value.fetch_add(1)) < batch_.num_tokens;) {
        way_.prepare(gate, batch_.x + t * batch_.x_stride, prepared_x_ + t * x_bytes_);
        tokens_left_->value.fetch_sub(1);
    }
    for (Backoff backoff; tokens_left_->value.load() > 0;) {
        backoff.wait();
    }
}

void MoeRun::run_gate_up(std::int64_t shard, std::int64_t task, const std::byte* next,
                         const Scratch& scratch) noexcept {
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
    way_.multiply(product);
    product.matrix = &weights.up;
    product.next = next;
    for (std::int64_t i = 0; i < active.num_pairs; ++i) {
        scratch.outputs[i] = scratch.up + i * gate_up_rows_;
    }
    way_.multiply(product);
    for (std::int64_t i = 0; i < active.num_pairs; ++i) {
        float* gate = activated_ + (first + i) * intermediate_ + begin;
        kernels_.activate(layer_.options_.activation, layer_.options_.limit, gate,
                          scratch.up + i * gate_up_rows_, gate, end - begin);
    }

    Progress& own = progress(shard, task / gate_up_slices_);
    if (own.slices_left.fetch_sub(1) == 1) {
        for (std::int64_t i = first; i < first + active.num_pairs; ++i) {
            way_.prepare(weights.down, activated_ + i * intermediate_, prepared_h_ + i * h_bytes_);
        }
        own.is_ready.store(true);
    }
}

void MoeRun::run_down(std::int64_t shard, std::int64_t task, const std::byte* next,
                      const Scratch& scratch) noexcept {
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
    way_.multiply({.matrix = &weights_of(shard, active).down,
                   .row_begin = begin,
                   .row_end = end,
                   .tokens = h_ + shard * num_pairs_ + active.first_place,
                   .outputs = scratch.outputs,
                   .num_tokens = active.num_pairs,
                   .scratch = scratch.kernel,
                   .next = next});
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

}  // namespace headwater
