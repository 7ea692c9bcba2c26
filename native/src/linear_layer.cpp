#include "headwater/linear_layer.hpp"

#include <atomic>

#include "task_cut.hpp"

namespace headwater {

namespace {

// Up to this many tokens the caller prepares them alone, before anybody else is asked.
constexpr std::int64_t kFewTokens = 4;

bool has_same_layout(const Matrix& a, const Matrix& b) {
    return a.format == b.format && (a.zeros == nullptr) == (b.zeros == nullptr);
}

class LinearRun {
  public:
    LinearRun(WorkerPool& pool, const Kernels& kernels, std::span<const LinearPart> parts,
              const float* x, std::int64_t x_stride, std::int64_t num_tokens, Mode mode)
        : pool_(pool),
          multiply_(mode == Mode::kDecode ? kernels.multiply : kernels.multiply_many),
          kernels_(kernels),
          parts_(parts),
          x_(x),
          x_stride_(x_stride),
          num_tokens_(num_tokens) {
        Carver counter(nullptr);
        lay_out(counter);
        Carver carver(pool.shared().reserve(counter.used()));
        lay_out(carver);
        cut();
        left_to_prepare_ = num_layouts_ * num_tokens_;
        std::int64_t scratch = 0;
        for (const LinearPart& part : parts_) {
            scratch = std::max(scratch, kernels_.scratch_bytes(*part.matrix));
        }
        pool.reserve_scratch(scratch + num_tokens_ * static_cast<std::int64_t>(sizeof(float*)));
        if (num_tokens_ <= kFewTokens) {
            prepare_tokens();
        }
    }

    void operator()(int worker) noexcept {
        prepare_tokens();
        std::byte* scratch = pool_.scratch(worker);
        auto** outputs = reinterpret_cast<float**>(scratch);
        scratch += ceil_div(num_tokens_ * static_cast<std::int64_t>(sizeof(float*)), 64) * 64;
        // The next one is taken while a task is under way, which can then fetch its beginning.
        for (std::int64_t task = next_task_.fetch_add(1); task < num_tasks_;) {
            const std::int64_t next = next_task_.fetch_add(1);
            for (Backoff backoff; left_to_prepare_.load() > 0;) {
                backoff.wait();
            }
            run_task(find(task), next < num_tasks_ ? find(next).data() : nullptr, outputs, scratch);
            task = next;
        }
    }

  private:
    struct Cut {
        std::int64_t first_task;
        std::int64_t rows_per_task;
        int layout;
    };
    struct Task {
        const LinearPart& part;
        const Cut& cut;
        std::int64_t begin;

        const std::byte* data() const noexcept {
            return part.matrix->data + begin * part.matrix->row_bytes;
        }
    };

    // Parts whose tokens are prepared alike share them.
    void lay_out(Carver& carver) {
        cuts_ = carver.take<Cut>(static_cast<std::int64_t>(parts_.size()));
        layouts_ = carver.take<const Matrix*>(static_cast<std::int64_t>(parts_.size()));
        tokens_ =
            carver.take<const std::byte*>(static_cast<std::int64_t>(parts_.size()) * num_tokens_);
        num_layouts_ = 0;
        for (std::size_t i = 0; i < parts_.size(); ++i) {
            std::size_t like = 0;
            while (!has_same_layout(*parts_[like].matrix, *parts_[i].matrix)) {
                ++like;
            }
            if (like == i) {
                const Matrix& m = *parts_[i].matrix;
                const std::int64_t token_bytes = kernels_.prepared_bytes(m);
                auto* prepared = carver.take<std::byte>(num_tokens_ * token_bytes);
                for (std::int64_t t = 0; prepared != nullptr && t < num_tokens_; ++t) {
                    tokens_[num_layouts_ * num_tokens_ + t] = prepared + t * token_bytes;
                    layouts_[num_layouts_] = &m;
                }
            }
            if (cuts_ != nullptr) {
                cuts_[i].layout = like == i ? num_layouts_ : cuts_[like].layout;
            }
            num_layouts_ += like == i;
        }
    }

    void cut() {
        num_tasks_ = 0;
        for (std::size_t i = 0; i < parts_.size(); ++i) {
            const Matrix& m = *parts_[i].matrix;
            cuts_[i].first_task = num_tasks_;
            cuts_[i].rows_per_task = rows_per_task(m.rows, packed_bytes(m.format, m.columns), 1,
                                                   pool_.num_threads(), kLastTasksPerThread);
            num_tasks_ += ceil_div(m.rows, cuts_[i].rows_per_task);
        }
    }

    void prepare_tokens() noexcept {
        const std::int64_t total = num_layouts_ * num_tokens_;
        for (std::int64_t i; (i = next_token_.fetch_add(1)) < total;) {
            kernels_.prepare(*layouts_[i / num_tokens_], x_ + i % num_tokens_ * x_stride_,
                             const_cast<std::byte*>(tokens_[i]));
            left_to_prepare_.fetch_sub(1);
        }
    }

    Task find(std::int64_t task) const noexcept {
        std::size_t i = parts_.size() - 1;
        while (cuts_[i].first_task > task) {
            --i;
        }
        return {parts_[i], cuts_[i], (task - cuts_[i].first_task) * cuts_[i].rows_per_task};
    }

    void run_task(const Task& task, const std::byte* next, float** outputs,
                  std::byte* scratch) noexcept {
        const LinearPart& part = task.part;
        for (std::int64_t t = 0; t < num_tokens_; ++t) {
            outputs[t] = part.output + t * part.output_stride + task.begin;
        }
        multiply_({.matrix = part.matrix,
                   .row_begin = task.begin,
                   .row_end = std::min(task.begin + task.cut.rows_per_task, part.matrix->rows),
                   .tokens = tokens_ + task.cut.layout * num_tokens_,
                   .outputs = outputs,
                   .num_tokens = num_tokens_,
                   .scratch = scratch,
                   .next = next});
    }

    WorkerPool& pool_;
    void (*multiply_)(const Product&);
    const Kernels& kernels_;
    std::span<const LinearPart> parts_;
    const float* x_;
    const std::int64_t x_stride_;
    const std::int64_t num_tokens_;

    Cut* cuts_;
    const Matrix** layouts_;
    const std::byte** tokens_;
    int num_layouts_;
    std::int64_t num_tasks_;
    alignas(64) std::atomic<std::int64_t> next_token_ = 0;
    std::atomic<std::int64_t> left_to_prepare_ = 0;
    alignas(64) std::atomic<std::int64_t> next_task_ = 0;
};

}  // namespace

void linear(WorkerPool& pool, const Kernels& kernels, std::span<const LinearPart> parts,
            const float* x, std::int64_t x_stride, std::int64_t num_tokens, Mode mode) {
    if (parts.empty() || num_tokens == 0) {
        return;
    }
    LinearRun run(pool, kernels, parts, x, x_stride, num_tokens, mode);
    pool.run(run);
}

}  // namespace headwater
