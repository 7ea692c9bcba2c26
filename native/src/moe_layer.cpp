#include "headwater/moe_layer.hpp"

#include <string>
#include <utility>

#include "headwater/failure.hpp"
#include "moe_run.hpp"
#include "task_cut.hpp"

namespace headwater {

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

bool MoeLayer::is_sparse() const noexcept {
    constexpr std::int64_t kFewest = 16;
    return num_experts() >= kFewest * options_.experts_per_token;
}

std::int64_t MoeLayer::gate_up_rows(std::int64_t num_active) const noexcept {
    return rows_per_task(intermediate_, 2 * packed_bytes(shards_[0][0].gate.format, hidden_),
                         num_active * static_cast<std::int64_t>(shards_.size()),
                         pool_.num_threads(), kTasksPerThread);
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
