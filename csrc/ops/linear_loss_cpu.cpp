// Losses of a linear layer's logits on the CPU: logits and their gradients exist in the compute
// type for one chunk of tokens at a time.
#include "ops/gemm.h"
#include "ops/loss.h"
#include "ops/parallel.h"
#include "ops/registry.h"
#include "semantics/seqlen.h"

namespace omniattn::ops::loss {
namespace {

// Logits of one chunk of tokens: 64 MiB of fp32. Smaller chunks pack the weight more often (a
// quarter of the time at 100 rows), larger ones only cost memory.
constexpr int64_t kChunkLogits = int64_t{1} << 24;
constexpr int64_t kSumTask = 65536;

// total (...), of dtype `out`, = the sum over chunks, added in order.
void sum_chunks(const Tensor& sums, int64_t chunks, const Tensor& total, DType out) {
  const auto sum = loss_kernels().sum_chunks;
  parallel_ranges(total.numel(), kSumTask, [&](int64_t a, int64_t b) {
    sum(out, sums.const_data_ptr(), chunks, total.numel(), total.mutable_data_ptr(), a, b);
  });
}

void* at(const Tensor& t, int64_t element, DType dtype) {
  return static_cast<char*>(t.mutable_data_ptr()) + element * size_of(dtype);
}

// x (..., K) weight^T + bias, with weight (V, K) and bias (V), checked.
struct Projection {
  DType dtype, acc;
  Rows x, weight;
  OptTensor bias;

  Projection(const char* op, const Layer& in)
      : dtype(dtype_of(op, "x", in.x)),
        acc(accumulator(dtype)),
        x(as_rows(op, "x", in.x, dtype)),
        weight(as_rows(op, "weight", in.weight, dtype)),
        bias(as_vector(op, "bias", in.bias, dtype, weight.rows)) {
    require(in.weight.dim() == 2 && weight.cols == x.cols, op,
            "weight must have shape (V, K) with x (..., K), got K=", x.cols, " and ", weight.cols);
  }

  gemm::Operand inputs(int64_t first) const {
    const auto* const rows = static_cast<const char*>(x.data());
    return {rows + first * x.stride * size_of(dtype), dtype, x.stride};
  }
  gemm::Operand weights(bool transposed) const {
    return {weight.data(), dtype, weight.stride, transposed};
  }
  // logits (count, V) in the accumulator type, for the tokens from `first` on.
  void multiply(int64_t first, int64_t count, void* logits) const {
    gemm::multiply(inputs(first), weights(true), data_or_null(bias), logits, acc, weight.rows,
                   count, weight.rows, x.cols);
  }
};

// Chunks of the tokens of a call.
struct Chunks {
  int64_t tokens, count, size;

  // Sized for `matrices` matrices of logits (size, vocab) in memory at a time.
  Chunks(int64_t tokens_, int64_t vocab, int64_t matrices)
      : tokens(tokens_),
        count(std::max<int64_t>(1, ceil_div(tokens, grain_of(vocab, kChunkLogits / matrices)))),
        size(ceil_div(tokens, count)) {}

  int64_t first(int64_t c) const { return c * size; }
  int64_t length(int64_t c) const { return std::clamp<int64_t>(tokens - first(c), 0, size); }
};

// `count` rows from `first` on.
LossRows part_of(LossRows rows, int64_t first, int64_t count, const Tensor& losses) {
  rows.count = count;
  if (rows.target != nullptr) rows.target += first;
  rows.loss = at(losses, first, rows.dtype);
  return rows;
}

// Computes cross entropies of a chunk's logits, then overwrites the logits by their gradients.
class CrossEntropyRows {
 public:
  static constexpr int64_t kMatrices = 1;

  CrossEntropyRows(const Problem& p, const Chunks& chunks, int64_t vocab, const Options& options)
      : problem(p),
        losses(empty_tensor(p.leading, p.acc)),
        params_(cross_entropy_params(p, vocab, options)),
        row_max_(scratch(chunks.size, p.acc)),
        log_sum_(scratch(chunks.size, p.acc)) {
    params_.row_max = row_max_.mutable_data_ptr();
    params_.log_sum = log_sum_.mutable_data_ptr();
  }

  void forward(int64_t first, int64_t count, const void* logits) {
    params_.rows = part_of(problem.rows, first, count, losses);
    params_.logits = logits;
    run_items(params_, count, params_.cols, loss_kernels().forward);
  }
  void backward(const void* row_weight, void* logits) {
    const CrossEntropyBackwardParams backward{.forward = params_,
                                              .grad_dtype = problem.acc,
                                              .row_weight = row_weight,
                                              .dlogits = logits,
                                              .stream = false};
    run_items(backward, params_.rows.count, params_.cols, loss_kernels().backward);
  }

  const Problem& problem;
  const Tensor losses;

 private:
  CrossEntropyParams params_;
  Tensor row_max_, log_sum_;
};

// Divergences from a teacher's logits, which are computed for the same chunk.
class DivergenceRows {
 public:
  static constexpr int64_t kMatrices = 2;

  DivergenceRows(const Problem& p, const Chunks& chunks, const Projection& teacher,
                 const DivergenceOptions& options)
      : problem(p),
        losses(empty_tensor(p.leading, p.acc)),
        teacher_(teacher),
        logits_(empty_tensor({chunks.size, teacher.weight.rows}, p.acc)),
        statistics_(empty_tensor({chunks.size, kDivergenceStatistics}, p.acc)),
        params_{.rows = p.rows,
                .cols = teacher.weight.rows,
                .student = nullptr,
                .teacher = logits_.const_data_ptr(),
                .student_stride = teacher.weight.rows,
                .teacher_stride = teacher.weight.rows,
                .statistics = statistics_.mutable_data_ptr(),
                .beta = options.beta,
                .temperature = options.temperature,
                .log_probs = false} {}

  void forward(int64_t first, int64_t count, const void* logits) {
    teacher_.multiply(first, count, logits_.mutable_data_ptr());
    params_.rows = part_of(problem.rows, first, count, losses);
    params_.student = logits;
    run_items(params_, count, params_.cols, divergence_kernels().forward);
  }
  void backward(const void* row_weight, void* logits) {
    const DivergenceBackwardParams backward{.forward = params_,
                                            .grad_dtype = problem.acc,
                                            .row_weight = row_weight,
                                            .dstudent = logits,
                                            .stream = false};
    run_items(backward, params_.rows.count, params_.cols, divergence_kernels().backward);
  }

  const Problem& problem;
  const Tensor losses;

 private:
  const Projection& teacher_;
  Tensor logits_, statistics_;
  DivergenceParams params_;
};

// Loops over the chunks: computes losses, and gradients of dtype `out` for given weights of rows.
template <class RowLosses>
class LinearLoss {
 public:
  LinearLoss(const Projection& p, const Chunks& chunks, RowLosses& rows, DType out, Wanted wanted)
      : p_(p),
        chunks_(chunks),
        rows_(rows),
        out_(out),
        logits_(empty_tensor({chunks.size, p.weight.rows}, p.acc)),
        dx_(wanted.x_grad, p.x.tensor.sizes(), out),
        dweight_(wanted.weight_grad, {p.weight.rows, p.x.cols}, out),
        weight_sums_(wanted.weight_grad && out != p.acc, {p.weight.rows, p.x.cols}, p.acc),
        dbias_(wanted.bias_grad, {p.weight.rows}, out),
        bias_sums_(wanted.bias_grad, {chunks.count, p.weight.rows}, p.acc) {}

  // row_weight (tokens); null: no gradients.
  Gradients run(const OptTensor& row_weight) {
    for (int64_t c = 0; c < chunks_.count; ++c) {
      const int64_t first = chunks_.first(c), count = chunks_.length(c);
      p_.multiply(first, count, logits_.mutable_data_ptr());
      rows_.forward(first, count, logits_.const_data_ptr());
      if (!row_weight.has_value()) continue;
      // Gradients overwrite the logits.
      rows_.backward(at(*row_weight, first, p_.acc), logits_.mutable_data_ptr());
      backward(c, first, count);
    }
    const Tensor dweight = dweight_.tensor(), dbias = dbias_.tensor();
    if (weight_sums_.data() != nullptr) sum_chunks(weight_sums_.tensor(), 1, dweight, out_);
    if (dbias_.data() != nullptr) sum_chunks(bias_sums_.tensor(), chunks_.count, dbias, out_);
    return {dx_.tensor(), dweight, dbias};
  }

 private:
  void backward(int64_t c, int64_t first, int64_t count) {
    const int64_t vocab = p_.weight.rows, width = p_.x.cols;
    gemm::Operand grads{logits_.const_data_ptr(), p_.acc, vocab};
    if (dx_.data() != nullptr) {
      gemm::multiply(grads, p_.weights(false), nullptr, at(dx_.tensor(), first * width, out_), out_,
                     width, count, width, vocab);
    }
    if (dbias_.data() != nullptr) {
      gemm::sum_columns({logits_, count, vocab, vocab}, p_.acc,
                        at(bias_sums_.tensor(), c * vocab, p_.acc));
    }
    if (dweight_.data() != nullptr) {
      void* const sums = weight_sums_.data() != nullptr ? weight_sums_.data() : dweight_.data();
      grads.transposed = true;
      gemm::multiply(grads, p_.inputs(first), nullptr, sums, p_.acc, width, vocab, width, count,
                     c > 0);
    }
  }

  const Projection& p_;
  const Chunks chunks_;
  RowLosses& rows_;
  DType out_;
  Tensor logits_;
  Output dx_, dweight_, weight_sums_, dbias_, bias_sums_;
};

// Computes the loss, and any wanted gradients in the compute type.
template <class RowLosses>
LossAndGradients with_gradients(const Projection& p, const Chunks& chunks, RowLosses& rows,
                                Wanted wanted) {
  const Problem& loss = rows.problem;
  OptTensor row_weights;
  if (wanted.x_grad || wanted.weight_grad || wanted.bias_grad) {
    require(loss.reduction != Reduction::none, loss.op,
            "x_grad, weight_grad and bias_grad need a reduction, got reduction=none");
    row_weights = loss.row_weights(std::nullopt);
  }
  auto [dx, dweight, dbias] = LinearLoss(p, chunks, rows, p.acc, wanted).run(row_weights);
  return {loss.reduced(rows.losses), dx, dweight, dbias};
}

// Computes the gradients of unreduced losses.
template <class RowLosses>
Gradients gradients(const Tensor& grad, const Projection& p, const Chunks& chunks, RowLosses& rows,
                    Wanted wanted) {
  const Tensor row_weights = rows.problem.row_weights(grad);
  return LinearLoss(p, chunks, rows, p.dtype, wanted).run(row_weights);
}

// Checked arguments and working memory of both passes of linear_cross_entropy.
struct LinearCrossEntropy {
  Projection p;
  Problem loss;
  Chunks chunks;
  CrossEntropyRows rows;

  LinearCrossEntropy(const char* op, const Layer& layer, const Targets& targets,
                     const Options& options, int64_t reduction)
      : p(op, layer),
        loss(op, p.acc, p.weight.rows, leading_sizes(layer.x), targets.target, options.ignore_index,
             targets.class_weight, reduction),
        chunks(p.x.rows, p.weight.rows, CrossEntropyRows::kMatrices),
        rows(loss, chunks, p.weight.rows, options) {}
};

// Checked arguments and working memory of both passes of linear_jsd.
struct LinearDivergence {
  Projection p, teacher;
  Problem loss;
  Chunks chunks;
  DivergenceRows rows;

  LinearDivergence(const char* op, const Layer& layer, const Teacher& given,
                   const DivergenceOptions& options, int64_t reduction)
      : p(op, layer),
        teacher(op, {given.teacher_x, given.teacher_weight, given.teacher_bias}),
        loss(op, p.acc, p.weight.rows, leading_sizes(layer.x), given.target, options.ignore_index,
             std::nullopt, reduction),
        chunks(p.x.rows, p.weight.rows, DivergenceRows::kMatrices),
        rows(loss, chunks, teacher, options) {
    require(teacher.dtype == p.dtype, op, "teacher_x must have the dtype of x");
    require(teacher.weight.rows == p.weight.rows, op, "teacher_weight must have V=", p.weight.rows,
            " rows, got ", teacher.weight.rows);
    require(teacher.x.rows == p.x.rows, op, "teacher_x must have ", p.x.rows, " tokens, got ",
            teacher.x.rows);
  }
};

constexpr auto kUnreduced = static_cast<int64_t>(Reduction::none);

}  // namespace

LossAndGradients linear_cross_entropy(const OpCall& call, const Layer& layer,
                                      const Targets& targets, const Options& options,
                                      const Reduced& reduced, const Wanted& wanted) {
  LinearCrossEntropy x(call.op, layer, targets, options, reduced.reduction);
  return with_gradients(x.p, x.chunks, x.rows, wanted);
}

Gradients linear_cross_entropy_backward(const OpCall& call, const Incoming& grads,
                                        const Layer& layer, const Targets& targets,
                                        const Options& options, const Wanted& wanted) {
  LinearCrossEntropy x(call.op, layer, targets, options, kUnreduced);
  return gradients(grads.grad, x.p, x.chunks, x.rows, wanted);
}

LossAndGradients linear_jsd(const OpCall& call, const Layer& layer, const Teacher& teacher,
                            const DivergenceOptions& options, const Reduced& reduced,
                            const Wanted& wanted) {
  LinearDivergence x(call.op, layer, teacher, options, reduced.reduction);
  return with_gradients(x.p, x.chunks, x.rows, wanted);
}

Gradients linear_jsd_backward(const OpCall& call, const Incoming& grads, const Layer& layer,
                              const Teacher& teacher, const DivergenceOptions& options,
                              const Wanted& wanted) {
  LinearDivergence x(call.op, layer, teacher, options, kUnreduced);
  return gradients(grads.grad, x.p, x.chunks, x.rows, wanted);
}

namespace {

const Registry registry([](Registry& ops) {
  ops.implement<linear_cross_entropy>("linear_cross_entropy", differentiable);
  ops.implement<linear_cross_entropy_backward>("linear_cross_entropy_backward");
  ops.implement<linear_jsd>("linear_jsd", differentiable);
  ops.implement<linear_jsd_backward>("linear_jsd_backward");
});

}  // namespace
}  // namespace omniattn::ops::loss
