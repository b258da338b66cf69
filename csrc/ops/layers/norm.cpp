// rms_norm and layer_norm, with or without a residual.
#include "kernels/norm/norm.h"

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

  Problem(const OpCall& call, const char* x_name, const Tensor& x_, const char* h_name,
          const OptTensor& h_, const OptTensor& weight_)
      : op(call.op), dtype(dtype_of(op, x_name, x_)), x(as_rows(op, x_name, x_, dtype)) {
    h_dtype = h_.has_value() ? dtype_of(op, h_name, *h_) : dtype;
    require(h_dtype == dtype || (h_dtype == DType::f32 && size_of(dtype) == 2), op, h_name,
            " must have the dtype of ", x_name, ", or be float32 with a 16-bit ", x_name, ", got ",
            name_of(h_dtype), " with ", name_of(dtype));
    h = as_rows(op, h_name, h_, h_dtype, x_.sizes());
    weight = as_vector(op, "weight", weight_, dtype, x.cols);
  }
};

OMNIATTN_FIELDS(Input, Tensor x);
OMNIATTN_FIELDS(Summands, Tensor x, residual);
// cast_first rounds to x's dtype before the weight.
OMNIATTN_FIELDS(Options, OptTensor weight, bias; bool center; double eps, offset; bool cast_first);
// stats (rows, 2) = mean, rstd.
OMNIATTN_FIELDS(Result, Tensor y; Output stats);
OMNIATTN_FIELDS(SumResult, Tensor y; Output h, stats);

// y = (x - mean) * rstd * (weight + offset) + bias over the last dimension, of x or of
// h = x + residual, in the dtype of the residual.
SumResult run(const OpCall& call, const Tensor& x, const OptTensor& residual,
              const Options& options) {
  const DeviceScope scope(x);
  const Problem p(call, "x", x, "residual", residual, options.weight);
  const OptTensor shift = as_vector(p.op, "bias", options.bias, p.dtype, p.x.cols);
  SumResult r{empty_tensor(x.sizes(), p.dtype),
              {residual.has_value(), x.sizes(), p.h_dtype},
              {call.saves, {p.x.rows, 2}, accumulator(p.dtype)}};
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
                          .eps = options.eps,
                          .offset = options.offset,
                          .center = options.center,
                          .cast_first = options.cast_first};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_norm(params, stream()));
  } else {
    run_items(params, params.rows, params.cols, norm_kernels(params.dtype).forward);
  }
  return r;
}

Result norm(const OpCall& call, const Input& in, const Options& options) {
  const SumResult r = run(call, in.x, std::nullopt, options);
  return {r.y, r.stats};
}

SumResult add_norm(const OpCall& call, const Summands& in, const Options& options) {
  return run(call, in.x, in.residual, options);
}

OMNIATTN_FIELDS(Backward, Tensor grad_y; OptTensor grad_h; Tensor h; OptTensor weight; Tensor stats;
                bool center; double offset; bool weight_grad, bias_grad);
// dx has the dtype of grad_y; dh is the same gradient in the dtype of h, and empty if the two
// dtypes are equal.
OMNIATTN_FIELDS(Gradients, Tensor dx; Output dh, dweight, dbias);

Gradients norm_backward(const OpCall& call, const Backward& x) {
  const DeviceScope scope(x.h);
  const Problem p(call, "grad_y", x.grad_y, "h", x.h, x.weight);
  const Sizes sizes = x.h.sizes();
  const OptRows gh = as_rows(p.op, "grad_h", x.grad_h, p.h_dtype, sizes);
  require_dense(p.op, "stats", x.stats, accumulator(p.dtype), {p.x.rows, 2});
  const Tensor dx = empty_tensor(sizes, p.dtype);
  const Output dh(p.h_dtype != p.dtype, sizes, p.h_dtype);
  const Output dweight(x.weight_grad, {p.x.cols}, p.dtype), dbias(x.bias_grad, {p.x.cols}, p.dtype);
  const NormBackwardParams params{.dtype = p.dtype,
                                  .h_dtype = p.h_dtype,
                                  .rows = p.x.rows,
                                  .cols = p.x.cols,
                                  .grad_y = p.x.data(),
                                  .grad_h = data_or_null(gh),
                                  .h = p.h->data(),
                                  .weight = data_or_null(p.weight),
                                  .stats = x.stats.const_data_ptr(),
                                  .dx = dx.mutable_data_ptr(),
                                  .dh = dh.data(),
                                  .grad_y_stride = p.x.stride,
                                  .grad_h_stride = stride_or_zero(gh),
                                  .h_stride = p.h->stride,
                                  .offset = x.offset,
                                  .center = x.center};
  if constexpr (kOnCuda) {
    const Tensor partial = partial_sums(dweight, dbias, norm_backward_shards(params), p.x.cols);
    const WeightGradients weights{partial.mutable_data_ptr(), dweight.data(), dbias.data()};
    require_launched(p.op, launch_norm_backward(params, weights, stream()));
  } else {
    sum_over_rows(params, p.x.rows, p.x.cols, {dweight, 1}, {dbias, 1},
                  norm_kernels(params.dtype).backward);
  }
  return {dx, dh, dweight, dbias};
}

const Registry registry([](Registry& ops) {
  ops.name("norm", {{"rms_norm"}, {"layer_norm", "center"}});
  ops.add<norm>("norm", saves_last);
  ops.add<norm_backward>("norm_backward");
  ops.name("add_norm", {{"rms_norm"}, {"layer_norm", "center"}});
  ops.add<add_norm>("add_norm", saves_last);
});

}  // namespace
}  // namespace omniattn::ops::norm
