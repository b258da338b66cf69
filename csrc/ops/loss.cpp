// cross_entropy: checks and allocation. linear_cross_entropy is native on the CPU only
// (linear_loss_cpu.cpp); on CUDA Python composes it of cross_entropy and torch's products.
#include "ops/loss.h"

#include <tuple>

#include "ops/registry.h"

namespace omniattn::ops::loss {
namespace {

Tensor dense_targets(const char* op, const Tensor& target, Sizes leading) {
  require_int64(op, "target", target);
  require_sizes(op, "target", target, leading);
  return as_dense(target);
}

}  // namespace

Problem::Problem(const char* op_, DType dtype, int64_t cols, Sizes leading_, const Tensor& target,
                 const Options& options)
    : op(op_),
      acc(accumulator(dtype)),
      leading(leading_),
      targets(dense_targets(op, target, leading)),
      reduction(options.reduction) {
  require(options.reduction >= Reduction::none && options.reduction <= Reduction::sum, op,
          "reduction must be 0, 1 or 2, got ", static_cast<int64_t>(options.reduction));
  params = {.dtype = dtype,
            .rows = targets.numel(),
            .cols = cols,
            .logits = nullptr,
            .target = static_cast<const int64_t*>(targets.const_data_ptr()),
            .loss = nullptr,
            .lse = nullptr,
            .stride = cols,
            .ignore_index = options.ignore_index,
            .label_smoothing = options.label_smoothing,
            .z_loss = options.z_loss,
            .softcap = options.softcap};
  check_targets(op, params);
}

Tensor Problem::reduced(const Tensor& losses) const {
  if (reduction == Reduction::none) return losses;
  const Tensor total = empty_tensor({}, acc);
  run_total(op, params, reduction == Reduction::mean, total.mutable_data_ptr());
  return total;
}

Tensor Problem::row_weights(const Tensor& grad) const {
  const bool per_row = reduction == Reduction::none;
  require_tensor(op, "grad", grad, acc);
  require_sizes(op, "grad", grad, per_row ? leading : Sizes{});
  const Tensor dense = as_dense(grad);
  const Tensor weights = empty_tensor(leading, acc);
  run_row_weights(op, params, reduction == Reduction::mean, per_row, dense.const_data_ptr(),
                  weights.mutable_data_ptr());
  return weights;
}

namespace {

std::tuple<Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& target,
                                         int64_t ignore_index, double label_smoothing,
                                         double z_loss, double softcap, int64_t reduction) {
  constexpr const char* op = "cross_entropy";
  const DeviceScope scope(logits);
  const DType dtype = dtype_of(op, "logits", logits);
  const Rows rows = as_rows(op, "logits", logits, dtype);
  Problem p(op, dtype, rows.cols, leading_sizes(logits), target,
            {ignore_index, label_smoothing, z_loss, softcap, static_cast<Reduction>(reduction)});
  const Tensor losses = empty_tensor(p.leading, p.acc);
  const Tensor lse = empty_tensor({rows.rows}, p.acc);
  p.params.logits = rows.data();
  p.params.stride = rows.stride;
  p.params.loss = losses.mutable_data_ptr();
  p.params.lse = lse.mutable_data_ptr();
  run_forward(op, p.params);
  return {p.reduced(losses), lse};
}

// dlogits of `grad_dtype`, by default that of the logits.
Tensor cross_entropy_backward(const Tensor& grad, const Tensor& logits, const Tensor& target,
                              const Tensor& lse, int64_t ignore_index, double label_smoothing,
                              double z_loss, double softcap, int64_t reduction,
                              std::optional<ScalarType> grad_dtype) {
  constexpr const char* op = "cross_entropy_backward";
  const DeviceScope scope(logits);
  const DType dtype = dtype_of(op, "logits", logits);
  const Rows rows = as_rows(op, "logits", logits, dtype);
  Problem p(op, dtype, rows.cols, leading_sizes(logits), target,
            {ignore_index, label_smoothing, z_loss, softcap, static_cast<Reduction>(reduction)});
  require_dense(op, "lse", lse, p.acc, {rows.rows});
  const DType out = grad_dtype.has_value() ? dtype_of(op, "grad_dtype", *grad_dtype) : dtype;
  require(out == dtype || writes_gradients(dtype, out), op,
          "grad_dtype must be the dtype of the logits on this device, got scalar type ",
          static_cast<int>(scalar_type(out)));
  const Tensor weights = p.row_weights(grad);
  const Tensor dlogits = empty_tensor(logits.sizes(), out);
  p.params.logits = rows.data();
  p.params.stride = rows.stride;
  p.params.lse = lse.mutable_data_ptr();
  run_backward(op, {.forward = p.params,
                    .grad_dtype = out,
                    .row_weight = weights.const_data_ptr(),
                    .dlogits = dlogits.mutable_data_ptr(),
                    .stream = rows.rows * rows.cols * size_of(dtype) > kLargeBytes});
  return dlogits;
}

// target (...) int64, logits (..., V); reduction 0 none, 1 mean over kept targets, 2 sum.
// linear_cross_entropy: the same of x weight^T + bias, a chunk of tokens at a time; gradients for a
// gradient of 1, which need a reduction.
const Registry registry([](Registry& ops) {
  ops.add<cross_entropy>(
      "cross_entropy(Tensor logits, Tensor target, int ignore_index, float label_smoothing,"
      " float z_loss, float softcap, int reduction) -> (Tensor loss, Tensor lse)",
      differentiable);
  ops.add<cross_entropy_backward>(
      "cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor lse,"
      " int ignore_index, float label_smoothing, float z_loss, float softcap, int reduction,"
      " ScalarType? grad_dtype=None) -> Tensor");
  ops.define(
      "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor target,"
      " int ignore_index, float label_smoothing, float z_loss, float softcap, int reduction,"
      " bool x_grad, bool weight_grad, bool bias_grad)"
      " -> (Tensor loss, Tensor dx, Tensor dweight, Tensor dbias)",
      differentiable);
  ops.define(
      "linear_cross_entropy_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias,"
      " Tensor target, int ignore_index, float label_smoothing, float z_loss, float softcap,"
      " bool x_grad, bool weight_grad, bool bias_grad)"
      " -> (Tensor dx, Tensor dweight, Tensor dbias)");
});

}  // namespace
}  // namespace omniattn::ops::loss
