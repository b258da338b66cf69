// linear_cross_entropy and linear_jsd: logits and their gradients exist for one chunk of tokens at
// a time.
#include "ops/losses/linear_loss.h"

#include "ops/registry.h"
#include "ops/torch_ops.h"

namespace omniattn::ops::loss {

Projection::Projection(const char* op_, const Layer& in)
    : op(op_),
      dtype(dtype_of(op, "x", in.x)),
      acc(accumulator(dtype)),
      x(as_rows(op, "x", in.x, dtype)),
      weight(as_rows(op, "weight", in.weight, dtype)),
      bias(as_vector(op, "bias", in.bias, dtype, weight.rows)) {
  require(in.weight.dim() == 2 && weight.cols == x.cols, op,
          "weight must have shape (V, K) with x (..., K), got K=", x.cols, " and ", weight.cols);
}

LayerGradients::LayerGradients(const Projection& p, const Chunks& chunks, DType out, Wanted wanted)
    : p_(p),
      chunks_(chunks),
      out_(out),
      dx_(wanted.x_grad, p.x.tensor.sizes(), out),
      dweight_(wanted.weight_grad, {p.weight.rows, p.x.cols}, out),
      weight_sums_(wanted.weight_grad && out != p.acc, {p.weight.rows, p.x.cols}, p.acc),
      dbias_(wanted.bias_grad, {p.weight.rows}, out),
      bias_sums_(wanted.bias_grad, {chunks.count, p.weight.rows}, p.acc) {}

namespace {

OMNIATTN_FIELDS(Teacher, Tensor teacher_x, teacher_weight; OptTensor teacher_bias, target);
OMNIATTN_FIELDS(LossAndGradients, Tensor loss, dx, dweight, dbias);

// `count` rows from `first` on.
LossRows part_of(LossRows rows, int64_t first, int64_t count, const Tensor& losses) {
  rows.count = count;
  if (rows.target != nullptr) rows.target += first;
  rows.loss = at(losses, first, rows.dtype);
  return rows;
}

// Computes cross entropies of a chunk's logits, then the gradients of the logits, which may
// overwrite them.
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
    if constexpr (kOnCuda) {
      require_launched(problem.op, launch_cross_entropy(params_, stream()));
    } else {
      run_items(params_, count, params_.cols, loss_kernels(params_.rows.dtype).forward);
    }
  }
  void backward(const void* row_weight, DType grad_dtype, void* dlogits) {
    const CrossEntropyBackwardParams backward{.forward = params_,
                                              .grad_dtype = grad_dtype,
                                              .row_weight = row_weight,
                                              .dlogits = dlogits,
                                              .stream = false};
    if constexpr (kOnCuda) {
      require_launched(problem.op, launch_cross_entropy_backward(backward, stream()));
    } else {
      run_items(backward, params_.rows.count, params_.cols,
                loss_kernels(params_.rows.dtype).backward);
    }
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
    teacher_.multiply(first, count, logits_);
    params_.rows = part_of(problem.rows, first, count, losses);
    params_.student = logits;
    if constexpr (kOnCuda) {
      require_launched(problem.op, launch_divergence(params_, stream()));
    } else {
      run_items(params_, count, params_.cols, divergence_kernels(params_.rows.dtype).forward);
    }
  }
  void backward(const void* row_weight, DType grad_dtype, void* dlogits) {
    const DivergenceBackwardParams backward{.forward = params_,
                                            .grad_dtype = grad_dtype,
                                            .row_weight = row_weight,
                                            .dstudent = dlogits,
                                            .stream = false};
    if constexpr (kOnCuda) {
      require_launched(problem.op, launch_divergence_backward(backward, stream()));
    } else {
      run_items(backward, params_.rows.count, params_.cols,
                divergence_kernels(params_.rows.dtype).backward);
    }
  }

  const Problem& problem;
  const Tensor losses;

 private:
  const Projection& teacher_;
  Tensor logits_, statistics_;
  DivergenceParams params_;
};

// Computes the losses of all chunks, and gradients of dtype `out` for given weights of the rows
// (tokens); without weights, no gradients.
template <class RowLosses>
Gradients run_chunks(const Projection& p, const Chunks& chunks, RowLosses& rows, DType out,
                     Wanted wanted, const OptTensor& row_weights) {
  const DType dtype = LayerGradients::gradient_dtype(p);
  const Tensor logits = empty_tensor({chunks.size, p.weight.rows}, p.acc);
  const Tensor dlogits = row_weights.has_value() && dtype != p.acc
                             ? empty_tensor({chunks.size, p.weight.rows}, dtype)
                             : logits;
  LayerGradients gradients(p, chunks, out, wanted);
  for (int64_t c = 0; c < chunks.count; ++c) {
    const int64_t first = chunks.first(c), count = chunks.length(c);
    p.multiply(first, count, logits);
    rows.forward(first, count, logits.const_data_ptr());
    if (!row_weights.has_value()) continue;
    rows.backward(at(*row_weights, first, p.acc), dtype, dlogits.mutable_data_ptr());
    gradients.add(c, dlogits);
  }
  return gradients.total();
}

// Multiplies gradients of a sum by the weight that a mean gives to each row.
void divide_by_rows(const Problem& loss, const Gradients& gradients) {
  if (loss.reduction != Reduction::mean || loss.rows.count == 0) return;
  const Tensor weights = torch::stable::view(loss.row_weights(std::nullopt), {loss.rows.count});
  const Tensor weight = slice(weights, 0, 0, 1);
  with_fields(gradients, [&](const auto&... gradient) {
    (call_torch("aten::mul_", "Tensor", gradient, weight), ...);
  });
}

// Computes the loss, and any wanted gradients in the compute type. On CUDA a mean divides them at
// the end: half gradients of logits could underflow earlier.
template <class RowLosses>
LossAndGradients with_gradients(const Projection& p, const Chunks& chunks, RowLosses& rows,
                                Wanted wanted) {
  const Problem& loss = rows.problem;
  OptTensor row_weights;
  if (wanted.x_grad || wanted.weight_grad || wanted.bias_grad) {
    require(loss.reduction != Reduction::none, loss.op,
            "x_grad, weight_grad and bias_grad need a reduction, got reduction=none");
    row_weights = loss.row_weights(std::nullopt, !kOnCuda);
  }
  const Gradients found = run_chunks(p, chunks, rows, p.acc, wanted, row_weights);
  if (kOnCuda && row_weights.has_value()) divide_by_rows(loss, found);
  return {loss.reduced(rows.losses), found.dx, found.dweight, found.dbias};
}

// Computes the gradients of unreduced losses.
template <class RowLosses>
Gradients gradients(const Tensor& grad, const Projection& p, const Chunks& chunks, RowLosses& rows,
                    Wanted wanted) {
  return run_chunks(p, chunks, rows, p.dtype, wanted, rows.problem.row_weights(grad));
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

LossAndGradients linear_cross_entropy(const OpCall& call, const Layer& layer,
                                      const Targets& targets, const Options& options,
                                      const Reduced& reduced, const Wanted& wanted) {
  const DeviceScope scope(layer.x);
  const NoGrad no_grad;
  LinearCrossEntropy x(call.op, layer, targets, options, reduced.reduction);
  return with_gradients(x.p, x.chunks, x.rows, wanted);
}

Gradients linear_cross_entropy_backward(const OpCall& call, const Incoming& grads,
                                        const Layer& layer, const Targets& targets,
                                        const Options& options, const Wanted& wanted) {
  const DeviceScope scope(layer.x);
  const NoGrad no_grad;
  LinearCrossEntropy x(call.op, layer, targets, options, kUnreduced);
  return gradients(grads.grad, x.p, x.chunks, x.rows, wanted);
}

LossAndGradients linear_jsd(const OpCall& call, const Layer& layer, const Teacher& teacher,
                            const DivergenceOptions& options, const Reduced& reduced,
                            const Wanted& wanted) {
  const DeviceScope scope(layer.x);
  const NoGrad no_grad;
  LinearDivergence x(call.op, layer, teacher, options, reduced.reduction);
  return with_gradients(x.p, x.chunks, x.rows, wanted);
}

Gradients linear_jsd_backward(const OpCall& call, const Incoming& grads, const Layer& layer,
                              const Teacher& teacher, const DivergenceOptions& options,
                              const Wanted& wanted) {
  const DeviceScope scope(layer.x);
  const NoGrad no_grad;
  LinearDivergence x(call.op, layer, teacher, options, kUnreduced);
  return gradients(grads.grad, x.p, x.chunks, x.rows, wanted);
}

const Registry registry([](Registry& ops) {
  ops.add<linear_cross_entropy>("linear_cross_entropy", differentiable);
  ops.add<linear_cross_entropy_backward>("linear_cross_entropy_backward");
  ops.add<linear_jsd>("linear_jsd", differentiable);
  ops.add<linear_jsd_backward>("linear_jsd_backward");
});

}  // namespace
}  // namespace omniattn::ops::loss
