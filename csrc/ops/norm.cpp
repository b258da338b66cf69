// rms_norm and layer_norm, with or without a residual.
#include "kernels/norm/norm.h"

#include <tuple>

#include "ops/device.h"
#include "ops/registry.h"
#include "ops/sum_over_rows.h"

namespace omniattn::ops::norm {
namespace {

// Checked arguments of forward and backward: x and the residual, or grad_y and h. The second tensor
// has the dtype of the first, or is fp32 if the first has 16 bits.
struct Problem {
  const char* op;
  DType dtype, h_dtype;
  Rows x;
  OptRows h;
  OptTensor weight;

  Problem(const char* op_, const char* x_name, const Tensor& x_, const char* h_name,
          const OptTensor& h_, const OptTensor& weight_)
      : op(op_), dtype(dtype_of(op, x_name, x_)), x(as_rows(op, x_name, x_, dtype)) {
    h_dtype = h_.has_value() ? dtype_of(op, h_name, *h_) : dtype;
    require(h_dtype == dtype || (h_dtype == DType::f32 && size_of(dtype) == 2), op, h_name,
            " must have the dtype of ", x_name, ", or be float32 with a 16-bit ", x_name, ", got ",
            name_of(h_dtype), " with ", name_of(dtype));
    h = as_rows(op, h_name, h_, h_dtype, x_.sizes());
    weight = as_vector(op, "weight", weight_, dtype, x.cols);
  }
};

struct Result {
  Tensor y;
  Output h, stats;
};

Result run(const Tensor& x, const OptTensor& residual, const OptTensor& weight,
           const OptTensor& bias, bool center, double eps, double offset, bool cast_first,
           bool with_stats) {
  const DeviceScope scope(x);
  const Problem p(center ? "layer_norm" : "rms_norm", "x", x, "residual", residual, weight);
  const OptTensor shift = as_vector(p.op, "bias", bias, p.dtype, p.x.cols);
  Result r{empty_tensor(x.sizes(), p.dtype),
           {residual.has_value(), x.sizes(), p.h_dtype},
           {with_stats, {p.x.rows, 2}, accumulator(p.dtype)}};
  const NormParams params{.dtype = p.dtype,
                          .h_dtype = p.h_dtype,
                          .rows = p.x.rows,
                          .cols = p.x.cols,
                          .x = p.x.data(),
                          .residual = data_or_null(p.h),
                          .weight = data_or_null(p.weight),
                          .bias = data_or_null(shift),
                          .y = r.y.mutable_data_ptr(),
                          .h = r.h.data(),
                          .stats = r.stats.data(),
                          .x_stride = p.x.stride,
                          .residual_stride = stride_or_zero(p.h),
                          .eps = eps,
                          .offset = offset,
                          .center = center,
                          .cast_first = cast_first};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_norm(params, stream()));
  } else {
    run_items(params, params.rows, params.cols, norm_kernels().forward);
  }
  return r;
}

std::tuple<Tensor, Tensor> norm(const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                                bool center, double eps, double offset, bool cast_first) {
  const Result r = run(x, std::nullopt, weight, bias, center, eps, offset, cast_first, true);
  return {r.y, r.stats.tensor()};
}

Tensor norm_only(const Tensor& x, const OptTensor& weight, const OptTensor& bias, bool center,
                 double eps, double offset, bool cast_first) {
  return run(x, std::nullopt, weight, bias, center, eps, offset, cast_first, false).y;
}

std::tuple<Tensor, Tensor, Tensor> add_norm(const Tensor& x, const Tensor& residual,
                                            const OptTensor& weight, const OptTensor& bias,
                                            bool center, double eps, double offset,
                                            bool cast_first) {
  const Result r = run(x, residual, weight, bias, center, eps, offset, cast_first, true);
  return {r.y, r.h.tensor(), r.stats.tensor()};
}

std::tuple<Tensor, Tensor> add_norm_only(const Tensor& x, const Tensor& residual,
                                         const OptTensor& weight, const OptTensor& bias,
                                         bool center, double eps, double offset, bool cast_first) {
  const Result r = run(x, residual, weight, bias, center, eps, offset, cast_first, false);
  return {r.y, r.h.tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_backward(
    const Tensor& grad_y, const OptTensor& grad_h, const Tensor& h, const OptTensor& weight,
    const Tensor& stats, bool center, double offset, bool weight_grad, bool bias_grad) {
  const DeviceScope scope(h);
  const Problem p(center ? "layer_norm_backward" : "rms_norm_backward", "grad_y", grad_y, "h", h,
                  weight);
  const OptRows gh = as_rows(p.op, "grad_h", grad_h, p.h_dtype, h.sizes());
  require_dense(p.op, "stats", stats, accumulator(p.dtype), {p.x.rows, 2});
  const Tensor dx = empty_tensor(h.sizes(), p.dtype);
  const Output dh(p.h_dtype != p.dtype, h.sizes(), p.h_dtype);
  const Output dweight(weight_grad, {p.x.cols}, p.dtype), dbias(bias_grad, {p.x.cols}, p.dtype);
  const NormBackwardParams params{.dtype = p.dtype,
                                  .h_dtype = p.h_dtype,
                                  .rows = p.x.rows,
                                  .cols = p.x.cols,
                                  .grad_y = p.x.data(),
                                  .grad_h = data_or_null(gh),
                                  .h = p.h->data(),
                                  .weight = data_or_null(p.weight),
                                  .stats = stats.const_data_ptr(),
                                  .dx = dx.mutable_data_ptr(),
                                  .dh = dh.data(),
                                  .grad_y_stride = p.x.stride,
                                  .grad_h_stride = stride_or_zero(gh),
                                  .h_stride = p.h->stride,
                                  .offset = offset,
                                  .center = center};
  if constexpr (kOnCuda) {
    const Tensor partial = partial_sums(dweight, dbias, norm_backward_shards(params), p.x.cols);
    const WeightGradients weights{partial.mutable_data_ptr(), dweight.data(), dbias.data()};
    require_launched(p.op, launch_norm_backward(params, weights, stream()));
  } else {
    sum_over_rows(params, p.x.rows, p.x.cols, {dweight, 1}, {dbias, 1}, norm_kernels().backward);
  }
  return {dx, dh.tensor(), dweight.tensor(), dbias.tensor()};
}

// y = (x - mean) * rstd * (weight + offset) + bias over the last dimension. cast_first rounds to
// x's dtype before the weight. stats (rows, 2) = mean, rstd. add_norm: norm of h = x + residual, in
// the dtype of the residual. In the backward, dx has the dtype of grad_y; dh is the same gradient
// in the dtype of h, and empty if the two dtypes are equal.
const Registry registry([](Registry& ops) {
  ops.add<norm, norm_only>(
      "norm(Tensor x, Tensor? weight, Tensor? bias, bool center, float eps, float offset,"
      " bool cast_first) -> (Tensor y, Tensor stats)",
      differentiable);
  ops.add<add_norm, add_norm_only>(
      "add_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, bool center, float eps,"
      " float offset, bool cast_first) -> (Tensor y, Tensor h, Tensor stats)",
      differentiable);
  ops.add<norm_backward>(
      "norm_backward(Tensor grad_y, Tensor? grad_h, Tensor h, Tensor? weight, Tensor stats,"
      " bool center, float offset, bool weight_grad, bool bias_grad)"
      " -> (Tensor dx, Tensor dh, Tensor dweight, Tensor dbias)");
});

}  // namespace
}  // namespace omniattn::ops::norm
