// rms_norm_gated and group_norm.
#include "kernels/norm/gated_norm.h"

#include <algorithm>
#include <tuple>

#include "ops/device.h"
#include "ops/registry.h"
#include "ops/sum_over_rows.h"

namespace omniattn::ops::gated_norm {
namespace {

// Checked arguments of forward and backward.
struct Problem {
  const char* op;
  DType dtype;
  Rows x;
  GatePlace place;
  Activation act;
  int64_t groups, cols;
  OptRows z;
  OptTensor weight, bias;

  Problem(const char* op_, const Tensor& x_, const OptTensor& z_, const OptTensor& weight_,
          const OptTensor& bias_, int64_t groups_, int64_t gate, int64_t act_)
      : op(op_),
        dtype(dtype_of(op, "x", x_)),
        x(as_rows(op, "x", x_, dtype)),
        place(static_cast<GatePlace>(gate)),
        act(static_cast<Activation>(act_)),
        groups(groups_) {
    require(gate >= 0 && gate < kGatePlaces, op, "gate must be in [0, ", kGatePlaces, "), got ",
            gate);
    require(z_.has_value() == (place != GatePlace::none), op,
            "z must be given where there is a gate and only there, got gate=", gate);
    require(act == Activation::silu || act == Activation::sigmoid, op,
            "act must be silu or sigmoid, got act=", act_);
    // All divide an empty dimension, which is one group: kernels count groups, not columns.
    require(groups > 0 && groups <= std::max<int64_t>(x.cols, 1) && x.cols % groups == 0, op,
            "groups must divide the last dimension, got groups=", groups, " for ", x.cols);
    cols = x.cols / groups;
    z = as_rows(op, "z", z_, dtype, x_.sizes());
    weight = as_vector(op, "weight", weight_, dtype, x.cols);
    bias = as_vector(op, "bias", bias_, dtype, x.cols);
  }
};

struct Result {
  Tensor y;
  Output stats;
};

Result run(const Tensor& x, const OptTensor& z, const OptTensor& weight, const OptTensor& bias,
           int64_t groups, int64_t gate, int64_t act, bool center, double eps, bool cast_first,
           bool with_stats) {
  const DeviceScope scope(x);
  const Problem p(z.has_value() ? "rms_norm_gated" : "group_norm", x, z, weight, bias, groups, gate,
                  act);
  Result r{empty_tensor(x.sizes(), p.dtype),
           {with_stats, {p.x.rows, groups, 2}, accumulator(p.dtype)}};
  const GatedNormParams params{.dtype = p.dtype,
                               .place = p.place,
                               .act = p.act,
                               .center = center,
                               .rows = p.x.rows,
                               .groups = p.groups,
                               .cols = p.cols,
                               .x = p.x.data(),
                               .z = data_or_null(p.z),
                               .weight = data_or_null(p.weight),
                               .bias = data_or_null(p.bias),
                               .y = r.y.mutable_data_ptr(),
                               .stats = r.stats.data(),
                               .x_stride = p.x.stride,
                               .z_stride = stride_or_zero(p.z),
                               .eps = eps,
                               .cast_first = cast_first};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_gated_norm(params, stream()));
  } else {
    run_items(params, params.rows, p.x.cols, gated_norm_kernels().forward);
  }
  return r;
}

std::tuple<Tensor, Tensor> gated_norm(const Tensor& x, const OptTensor& z, const OptTensor& weight,
                                      const OptTensor& bias, int64_t groups, int64_t gate,
                                      int64_t act, bool center, double eps, bool cast_first) {
  const Result r = run(x, z, weight, bias, groups, gate, act, center, eps, cast_first, true);
  return {r.y, r.stats.tensor()};
}

Tensor gated_norm_only(const Tensor& x, const OptTensor& z, const OptTensor& weight,
                       const OptTensor& bias, int64_t groups, int64_t gate, int64_t act,
                       bool center, double eps, bool cast_first) {
  return run(x, z, weight, bias, groups, gate, act, center, eps, cast_first, false).y;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> gated_norm_backward(
    const Tensor& grad_y, const Tensor& x, const OptTensor& z, const OptTensor& weight,
    const OptTensor& bias, const Tensor& stats, int64_t groups, int64_t gate, int64_t act,
    bool center, bool weight_grad, bool bias_grad) {
  const DeviceScope scope(x);
  const Problem p(z.has_value() ? "rms_norm_gated_backward" : "group_norm_backward", x, z, weight,
                  bias, groups, gate, act);
  const Rows gy = as_rows(p.op, "grad_y", grad_y, p.dtype, x.sizes());
  require_dense(p.op, "stats", stats, accumulator(p.dtype), {p.x.rows, groups, 2});
  const Tensor dx = empty_tensor(x.sizes(), p.dtype);
  const Output dz(z.has_value(), x.sizes(), p.dtype);
  const Output dweight(weight_grad, {p.x.cols}, p.dtype), dbias(bias_grad, {p.x.cols}, p.dtype);
  const GatedNormBackwardParams params{.dtype = p.dtype,
                                       .place = p.place,
                                       .act = p.act,
                                       .center = center,
                                       .rows = p.x.rows,
                                       .groups = p.groups,
                                       .cols = p.cols,
                                       .grad_y = gy.data(),
                                       .x = p.x.data(),
                                       .z = data_or_null(p.z),
                                       .weight = data_or_null(p.weight),
                                       .bias = data_or_null(p.bias),
                                       .stats = stats.const_data_ptr(),
                                       .dx = dx.mutable_data_ptr(),
                                       .dz = dz.data(),
                                       .grad_y_stride = gy.stride,
                                       .x_stride = p.x.stride,
                                       .z_stride = stride_or_zero(p.z)};
  if constexpr (kOnCuda) {
    const Tensor partial =
        partial_sums(dweight, dbias, gated_norm_backward_shards(params), p.x.cols);
    const WeightGradients weights{partial.mutable_data_ptr(), dweight.data(), dbias.data()};
    require_launched(p.op, launch_gated_norm_backward(params, weights, stream()));
  } else {
    sum_over_rows(params, p.x.rows, p.cols, {dweight, groups}, {dbias, groups},
                  gated_norm_kernels().backward);
  }
  return {dx, dz.tensor(), dweight.tensor(), dbias.tensor()};
}

// For each of `groups` parts of the last dimension: (v - mean) * rstd * weight + bias. Gate 0:
// v = x; gate 1: v = x * act(z); gate 2: v = x, the result times act(z). stats (rows, groups, 2).
const Registry registry([](Registry& ops) {
  ops.add<gated_norm, gated_norm_only>(
      "gated_norm(Tensor x, Tensor? z, Tensor? weight, Tensor? bias, int groups, int gate, int act,"
      " bool center, float eps, bool cast_first) -> (Tensor y, Tensor stats)",
      differentiable);
  ops.add<gated_norm_backward>(
      "gated_norm_backward(Tensor grad_y, Tensor x, Tensor? z, Tensor? weight, Tensor? bias,"
      " Tensor stats, int groups, int gate, int act, bool center, bool weight_grad,"
      " bool bias_grad) -> (Tensor dx, Tensor dz, Tensor dweight, Tensor dbias)");
});

}  // namespace
}  // namespace omniattn::ops::gated_norm
