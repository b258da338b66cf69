// cross_entropy, cross_entropy_backward: checks and allocation for either device. Included by
// loss_cpu.cpp and loss_cuda.cpp, each of which defines the functions declared here.
#pragma once

#include "kernels/loss/loss.h"

#include <tuple>

#include "ops/tensor.h"

namespace {

using namespace omniattn;
using namespace omniattn::ops;

enum class Reduction : int64_t { none, mean, sum };

struct LossOptions {
  int64_t ignore_index;
  double label_smoothing, z_loss, softcap;
  Reduction reduction;
};

// Whether gradients of logits of `dtype` can be written in another one.
bool writes_gradients(DType dtype, DType grad_dtype);
// Every target must be a class or ignore_index.
void check_targets(const char* op, const CrossEntropyParams& p);
void run_forward(const CrossEntropyParams& p);
void run_backward(const CrossEntropyBackwardParams& p);
// total () = the reduction of p.loss.
void run_total(const CrossEntropyParams& p, Reduction reduction, void* total);
// weights (rows) = grad, (rows) or with a reduction (), times the reduction's weight of a row.
void run_row_weights(const CrossEntropyParams& p, Reduction reduction, const void* grad,
                     void* weights);

LossOptions options_of(const char* op, int64_t ignore_index, double label_smoothing, double z_loss,
                       double softcap, int64_t reduction) {
  require(reduction >= 0 && reduction <= 2, op, "reduction must be 0, 1 or 2, got ", reduction);
  return {ignore_index, label_smoothing, z_loss, softcap, static_cast<Reduction>(reduction)};
}

Sizes leading_sizes(const Tensor& t) {
  return {t.sizes().data(), static_cast<size_t>(t.dim() - 1)};
}

// The targets (...) of classes (..., cols), contiguous.
Tensor dense_targets(const char* op, const Tensor& target, Sizes leading) {
  require(is_here(target) && target.scalar_type() == ScalarType::Long, op,
          "target must be int64 on ", kDeviceName, ", got scalar type ",
          static_cast<int>(target.scalar_type()));
  require_sizes(op, "target", target, leading);
  return target.is_contiguous() ? target : torch::stable::contiguous(target);
}

CrossEntropyParams params_of(DType dtype, int64_t rows, int64_t cols, const void* logits,
                             int64_t stride, const void* target, const LossOptions& options) {
  CrossEntropyParams p{};
  p.dtype = dtype;
  p.rows = rows;
  p.cols = cols;
  p.logits = logits;
  p.stride = stride;
  p.target = static_cast<const int64_t*>(target);
  p.ignore_index = options.ignore_index;
  p.label_smoothing = options.label_smoothing;
  p.z_loss = options.z_loss;
  p.softcap = options.softcap;
  return p;
}

// The losses, of the compute dtype, as they are or reduced.
Tensor reduce_losses(const Tensor& losses, const CrossEntropyParams& p, Reduction reduction) {
  if (reduction == Reduction::none) return losses;
  const Tensor total = empty_tensor(Sizes{}, accumulator(p.dtype));
  run_total(p, reduction, total.mutable_data_ptr());
  return total;
}

Tensor row_weights(const char* op, const Tensor& grad, const CrossEntropyParams& p,
                   Reduction reduction, Sizes leading) {
  const DType acc = accumulator(p.dtype);
  require_tensor(op, "grad", grad, acc);
  require_sizes(op, "grad", grad, reduction == Reduction::none ? leading : Sizes{});
  const Tensor dense = torch::stable::contiguous(grad);
  const Tensor weights = empty_tensor(leading, acc);
  run_row_weights(p, reduction, dense.const_data_ptr(), weights.mutable_data_ptr());
  return weights;
}

std::tuple<Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& target,
                                         int64_t ignore_index, double label_smoothing,
                                         double z_loss, double softcap, int64_t reduction) {
  constexpr const char* op = "cross_entropy";
  const DeviceScope scope(logits);
  const LossOptions options =
      options_of(op, ignore_index, label_smoothing, z_loss, softcap, reduction);
  const DType dtype = dtype_of(op, "logits", logits), acc = accumulator(dtype);
  require_tensor(op, "logits", logits, dtype);
  const Rows rows = as_rows(op, "logits", logits);
  const Tensor targets = dense_targets(op, target, leading_sizes(logits));

  const Tensor losses = empty_tensor(leading_sizes(logits), acc);
  const Tensor lse = empty_tensor({&rows.rows, 1}, acc);
  CrossEntropyParams p = params_of(dtype, rows.rows, rows.cols, rows.data(), rows.stride,
                                   targets.const_data_ptr(), options);
  p.loss = losses.mutable_data_ptr();
  p.lse = lse.mutable_data_ptr();
  check_targets(op, p);
  run_forward(p);
  return {reduce_losses(losses, p, options.reduction), lse};
}

DType grad_dtype_of(const char* op, std::optional<ScalarType> wanted, DType dtype) {
  if (!wanted.has_value()) return dtype;
  const DType grad = dtype_of(op, "grad_dtype", *wanted);
  require(grad == dtype || writes_gradients(dtype, grad), op,
          "grad_dtype must be the dtype of the logits on this device, got scalar type ",
          static_cast<int>(*wanted));
  return grad;
}

// dlogits of `grad_dtype`, by default that of the logits.
Tensor cross_entropy_backward(const Tensor& grad, const Tensor& logits, const Tensor& target,
                              const Tensor& lse, int64_t ignore_index, double label_smoothing,
                              double z_loss, double softcap, int64_t reduction,
                              std::optional<ScalarType> grad_dtype) {
  constexpr const char* op = "cross_entropy_backward";
  const DeviceScope scope(logits);
  const LossOptions options =
      options_of(op, ignore_index, label_smoothing, z_loss, softcap, reduction);
  const DType dtype = dtype_of(op, "logits", logits), acc = accumulator(dtype);
  require_tensor(op, "logits", logits, dtype);
  const Rows rows = as_rows(op, "logits", logits);
  const Tensor targets = dense_targets(op, target, leading_sizes(logits));
  require_tensor(op, "lse", lse, acc);
  require_sizes(op, "lse", lse, {&rows.rows, 1});
  require(lse.is_contiguous(), op, "lse must be contiguous");

  CrossEntropyBackwardParams p{};
  p.forward = params_of(dtype, rows.rows, rows.cols, rows.data(), rows.stride,
                        targets.const_data_ptr(), options);
  p.forward.lse = lse.mutable_data_ptr();
  p.grad_dtype = grad_dtype_of(op, grad_dtype, dtype);
  check_targets(op, p.forward);
  const Tensor weights = row_weights(op, grad, p.forward, options.reduction, leading_sizes(logits));
  const Tensor dlogits = empty_tensor(logits.sizes(), p.grad_dtype);
  p.row_weight = weights.const_data_ptr();
  p.dlogits = dlogits.mutable_data_ptr();
  p.stream = rows.rows * rows.cols * size_of(dtype) > kLargeBytes;
  run_backward(p);
  return dlogits;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omniattn, OMNIATTN_DISPATCH_KEY, m) {
  OMNIATTN_IMPL(m, "cross_entropy", cross_entropy);
  m.impl("cross_entropy_backward", TORCH_BOX(&cross_entropy_backward));
}
