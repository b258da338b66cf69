// cross_entropy and jsd: checks and allocation. linear_loss.cpp has their linear forms.
#include "ops/losses/loss.h"

#include "ops/device.h"
#include "ops/registry.h"

namespace omniattn::ops::loss {
namespace {

OptTensor dense_targets(const char* op, const OptTensor& target, Sizes leading) {
  if (!target.has_value()) return std::nullopt;
  require_tensor(op, "target", *target, ScalarType::Long);
  require_sizes(op, "target", *target, leading);
  return as_dense(*target);
}

int64_t product(Sizes sizes) {
  int64_t count = 1;
  for (const int64_t n : sizes) count *= n;
  return count;
}

// Every target must be a class or ignore_index. On CUDA the kernels check this: reading targets
// here would wait for the GPU.
void check_targets(const char* op, const LossRows& rows, int64_t cols) {
  if constexpr (kOnCuda) return;
  for (int64_t i = 0; i < rows.count; ++i) {
    const int64_t t = rows.target[i];
    require((t >= 0 && t < cols) || t == rows.ignore_index, op, "target must be in [0, ", cols,
            ") or ignore_index=", rows.ignore_index, ", got target=", t, " at flat index ", i);
  }
}

// The dtype of the gradient of logits of `dtype`, which is the default.
DType gradient_dtype(const char* op, DType dtype, std::optional<ScalarType> grad_dtype) {
  const DType out = grad_dtype.has_value() ? dtype_of(op, "grad_dtype", *grad_dtype) : dtype;
  const bool narrows = kOnCuda && dtype == DType::f32 && size_of(out) == 2;
  require(out == dtype || narrows, op, "grad_dtype must be the dtype of the logits",
          kOnCuda ? ", or a 16-bit one of float32 logits" : "", ", got ", name_of(out), " with ",
          name_of(dtype), " logits");
  return out;
}

}  // namespace

Problem::Problem(const char* op_, DType dtype, int64_t cols, Sizes leading_,
                 const OptTensor& target, int64_t ignore_index, const OptTensor& class_weight_,
                 int64_t reduction_)
    : op(op_),
      acc(accumulator(dtype)),
      leading(leading_),
      targets(dense_targets(op, target, leading)),
      class_weight(class_weight_),
      reduction(static_cast<Reduction>(reduction_)) {
  require(reduction >= Reduction::none && reduction <= Reduction::sum, op,
          "reduction must be 0, 1 or 2, got ", reduction_);
  if (class_weight.has_value()) require_dense(op, "class_weight", *class_weight, acc, {cols});
  rows = {.dtype = dtype,
          .count = product(leading),
          .target = static_cast<const int64_t*>(data_or_null(targets)),
          .class_weight = data_or_null(class_weight),
          .loss = nullptr,
          .ignore_index = ignore_index};
}

Tensor Problem::reduced(const Tensor& losses) const {
  if (reduction == Reduction::none) return losses;
  const Tensor total = empty_tensor({}, acc);
  const bool mean = reduction == Reduction::mean;
  LossRows all = rows;
  all.loss = losses.mutable_data_ptr();
  if constexpr (kOnCuda) {
    require_launched(op, launch_loss_total(all, mean, total.mutable_data_ptr(), stream()));
  } else {
    loss_kernels(all.dtype).total(all, mean, total.mutable_data_ptr());
  }
  return total;
}

Tensor Problem::row_weights(const OptTensor& grad, bool divides) const {
  const bool mean = divides && reduction == Reduction::mean;
  const bool per_row = reduction == Reduction::none;
  OptTensor dense;
  if (grad.has_value()) {
    require_tensor(op, "grad", *grad, acc);
    require_sizes(op, "grad", *grad, per_row ? leading : Sizes{});
    dense = as_dense(*grad);
  } else if constexpr (kOnCuda) {
    dense = empty_tensor({}, acc);
    torch::stable::fill_(*dense, 1);
  }
  const Tensor weights = empty_tensor(leading, acc);
  const void* const from = data_or_null(dense);
  void* const to = weights.mutable_data_ptr();
  if constexpr (kOnCuda) {
    require_launched(op, launch_row_weights(rows, mean, per_row, from, to, stream()));
  } else {
    loss_kernels(rows.dtype).row_weights(rows, mean, per_row, from, to);
  }
  return weights;
}

CrossEntropyParams cross_entropy_params(const Problem& p, int64_t cols, const Options& options) {
  check_targets(p.op, p.rows, cols);
  return {.rows = p.rows,
          .cols = cols,
          .logits = nullptr,
          .row_max = nullptr,
          .log_sum = nullptr,
          .stride = cols,
          .label_smoothing = options.label_smoothing,
          .z_loss = options.z_loss,
          .softcap = options.softcap,
          .temperature = options.temperature};
}

namespace {

OMNIATTN_FIELDS(Logits, Tensor logits);
OMNIATTN_FIELDS(Statistics, Tensor row_max, log_sum);
OMNIATTN_FIELDS(LossResults, Tensor loss, row_max, log_sum);
// The dtype of the gradient, by default that of the logits.
OMNIATTN_FIELDS(Narrowed, OptScalarType grad_dtype = {});

LossResults cross_entropy(const OpCall& call, const Logits& x, const Targets& targets,
                          const Options& options, const Reduced& reduced) {
  const char* const op = call.op;
  const Tensor& logits = x.logits;
  const DeviceScope scope(logits);
  const DType dtype = dtype_of(op, "logits", logits);
  const Rows rows = as_rows(op, "logits", logits, dtype);
  const Problem p(op, dtype, rows.cols, leading_sizes(logits), targets.target, options.ignore_index,
                  targets.class_weight, reduced.reduction);
  const Tensor losses = empty_tensor(p.leading, p.acc);
  const Tensor row_max = scratch(rows.rows, p.acc), log_sum = scratch(rows.rows, p.acc);
  CrossEntropyParams params = cross_entropy_params(p, rows.cols, options);
  params.logits = rows.data();
  params.stride = rows.stride;
  params.rows.loss = losses.mutable_data_ptr();
  params.row_max = row_max.mutable_data_ptr();
  params.log_sum = log_sum.mutable_data_ptr();
  if constexpr (kOnCuda) {
    require_launched(op, launch_cross_entropy(params, stream()));
  } else {
    run_items(params, rows.rows, rows.cols, loss_kernels(dtype).forward);
  }
  return {p.reduced(losses), row_max, log_sum};
}

Tensor cross_entropy_backward(const OpCall& call, const Incoming& grads, const Logits& x,
                              const Targets& targets, const Statistics& saved,
                              const Options& options, const Reduced& reduced,
                              const Narrowed& narrowed) {
  const char* const op = call.op;
  const Tensor& logits = x.logits;
  const auto& [row_max, log_sum] = saved;
  const DeviceScope scope(logits);
  const DType dtype = dtype_of(op, "logits", logits);
  const Rows rows = as_rows(op, "logits", logits, dtype);
  const Problem p(op, dtype, rows.cols, leading_sizes(logits), targets.target, options.ignore_index,
                  targets.class_weight, reduced.reduction);
  require_dense(op, "row_max", row_max, p.acc, {rows.rows});
  require_dense(op, "log_sum", log_sum, p.acc, {rows.rows});
  const DType out = gradient_dtype(op, dtype, narrowed.grad_dtype);
  CrossEntropyParams params = cross_entropy_params(p, rows.cols, options);
  params.logits = rows.data();
  params.stride = rows.stride;
  params.row_max = row_max.mutable_data_ptr();
  params.log_sum = log_sum.mutable_data_ptr();
  const Tensor weights = p.row_weights(grads.grad);
  const Tensor dlogits = empty_tensor(logits.sizes(), out);
  const CrossEntropyBackwardParams backward{
      .forward = params,
      .grad_dtype = out,
      .row_weight = weights.const_data_ptr(),
      .dlogits = dlogits.mutable_data_ptr(),
      .stream = rows.rows * rows.cols * size_of(dtype) > kLargeBytes};
  if constexpr (kOnCuda) {
    require_launched(op, launch_cross_entropy_backward(backward, stream()));
  } else {
    run_items(backward, rows.rows, rows.cols, loss_kernels(dtype).backward);
  }
  return dlogits;
}

OMNIATTN_FIELDS(Models, Tensor student, teacher; OptTensor target);
OMNIATTN_FIELDS(JsdRest, bool log_probs; int64_t reduction);

// Checked arguments of both passes of jsd.
struct DivergenceProblem {
  DType dtype;
  Rows student, teacher;
  Problem loss;

  DivergenceProblem(const char* op, const Models& x, const DivergenceOptions& options,
                    int64_t reduction)
      : dtype(dtype_of(op, "student", x.student)),
        student(as_rows(op, "student", x.student, dtype)),
        teacher(as_rows(op, "teacher", x.teacher, dtype)),
        loss(op, dtype, student.cols, leading_sizes(x.student), x.target, options.ignore_index,
             std::nullopt, reduction) {
    require_sizes(op, "teacher", x.teacher, x.student.sizes());
  }

  DivergenceParams params(void* losses, const Tensor& statistics, const DivergenceOptions& options,
                          bool log_probs) const {
    LossRows rows = loss.rows;
    rows.loss = losses;
    return {.rows = rows,
            .cols = student.cols,
            .student = student.data(),
            .teacher = teacher.data(),
            .student_stride = student.stride,
            .teacher_stride = teacher.stride,
            .statistics = statistics.mutable_data_ptr(),
            .beta = options.beta,
            .temperature = options.temperature,
            .log_probs = log_probs};
  }
};

OMNIATTN_FIELDS(JsdResults, Tensor loss, statistics);
OMNIATTN_FIELDS(JsdSaved, Tensor statistics);

JsdResults jsd(const OpCall& call, const Models& x, const DivergenceOptions& options,
               const JsdRest& rest) {
  const char* const op = call.op;
  const DeviceScope scope(x.student);
  const DivergenceProblem p(op, x, options, rest.reduction);
  const Tensor losses = empty_tensor(p.loss.leading, p.loss.acc);
  const Tensor statistics = empty_tensor({p.student.rows, kDivergenceStatistics}, p.loss.acc);
  const DivergenceParams params =
      p.params(losses.mutable_data_ptr(), statistics, options, rest.log_probs);
  if constexpr (kOnCuda) {
    require_launched(op, launch_divergence(params, stream()));
  } else {
    run_items(params, p.student.rows, p.student.cols, divergence_kernels(p.dtype).forward);
  }
  return {p.loss.reduced(losses), statistics};
}

Tensor jsd_backward(const OpCall& call, const Incoming& grads, const Models& x,
                    const JsdSaved& saved, const DivergenceOptions& options, const JsdRest& rest,
                    const Narrowed& narrowed) {
  const char* const op = call.op;
  const Tensor& statistics = saved.statistics;
  const DeviceScope scope(x.student);
  const DivergenceProblem p(op, x, options, rest.reduction);
  require_dense(op, "statistics", statistics, p.loss.acc, {p.student.rows, kDivergenceStatistics});
  const DType out = gradient_dtype(op, p.dtype, narrowed.grad_dtype);
  const Tensor weights = p.loss.row_weights(grads.grad);
  const Tensor dstudent = empty_tensor(x.student.sizes(), out);
  const DivergenceBackwardParams backward{
      .forward = p.params(nullptr, statistics, options, rest.log_probs),
      .grad_dtype = out,
      .row_weight = weights.const_data_ptr(),
      .dstudent = dstudent.mutable_data_ptr(),
      .stream = p.student.rows * p.student.cols * size_of(p.dtype) > kLargeBytes};
  if constexpr (kOnCuda) {
    require_launched(op, launch_divergence_backward(backward, stream()));
  } else {
    run_items(backward, p.student.rows, p.student.cols, divergence_kernels(p.dtype).backward);
  }
  return dstudent;
}

const Registry registry([](Registry& ops) {
  ops.constant("divergence_statistics", kDivergenceStatistics);
  ops.add<cross_entropy>("cross_entropy", differentiable);
  ops.add<cross_entropy_backward>("cross_entropy_backward");
  ops.add<jsd>("jsd", differentiable);
  ops.add<jsd_backward>("jsd_backward");
});

}  // namespace
}  // namespace omniattn::ops::loss
