// rms_norm_gated and group_norm.
#include "kernels/norm/gated_norm.h"

#include <algorithm>

#include "ops/device.h"
#include "ops/registry.h"
#include "ops/sum_over_rows.h"

namespace omniattn::ops::gated_norm {
namespace {

OMNIATTN_FIELDS(Inputs, Tensor x; OptTensor z, weight, bias);
OMNIATTN_FIELDS(Groups, int64_t groups, gate, act; bool center);

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

  Problem(const OpCall& call, const Inputs& in, const Groups& given)
      : op(call.op),
        dtype(dtype_of(op, "x", in.x)),
        x(as_rows(op, "x", in.x, dtype)),
        place(static_cast<GatePlace>(given.gate)),
        act(static_cast<Activation>(given.act)),
        groups(given.groups) {
    require(given.gate >= 0 && given.gate < kGatePlaces, op, "gate must be in [0, ", kGatePlaces,
            "), got ", given.gate);
    require(in.z.has_value() == (place != GatePlace::none), op,
            "z must be given where there is a gate and only there, got gate=", given.gate);
    require(act == Activation::silu || act == Activation::sigmoid, op,
            "act must be silu or sigmoid, got act=", given.act);
    // Every number divides an empty dimension, but only 1 group is valid: kernels count groups.
    require(groups > 0 && groups <= std::max<int64_t>(x.cols, 1) && x.cols % groups == 0, op,
            "groups must divide the last dimension, got groups=", groups, " for ", x.cols);
    cols = x.cols / groups;
    z = as_rows(op, "z", in.z, dtype, in.x.sizes());
    weight = as_vector(op, "weight", in.weight, dtype, x.cols);
    bias = as_vector(op, "bias", in.bias, dtype, x.cols);
  }
};

OMNIATTN_FIELDS(Rounding, double eps; bool cast_first);
// stats (rows, groups, 2) = mean, rstd.
OMNIATTN_FIELDS(Result, Tensor y; Output stats);

// For each of `groups` parts of the last dimension: (v - mean) * rstd * weight + bias. Gate 0:
// v = x; gate 1: v = x * act(z); gate 2: v = x, the result times act(z).
Result gated_norm(const OpCall& call, const Inputs& in, const Groups& groups,
                  const Rounding& rounding) {
  const DeviceScope scope(in.x);
  const Problem p(call, in, groups);
  Result r{empty_tensor(in.x.sizes(), p.dtype),
           {call.saves, {p.x.rows, p.groups, 2}, accumulator(p.dtype)}};
  const GatedNormParams params{.dtype = p.dtype,
                               .place = p.place,
                               .act = p.act,
                               .center = groups.center,
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
                               .eps = rounding.eps,
                               .cast_first = rounding.cast_first};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_gated_norm(params, stream()));
  } else {
    run_items(params, params.rows, p.x.cols, gated_norm_kernels(params.dtype).forward);
  }
  return r;
}

OMNIATTN_FIELDS(Incoming, Tensor grad_y);
OMNIATTN_FIELDS(Saved, Tensor stats);
OMNIATTN_FIELDS(Wanted, bool weight_grad, bias_grad);
OMNIATTN_FIELDS(Gradients, Tensor dx; Output dz, dweight, dbias);

Gradients gated_norm_backward(const OpCall& call, const Incoming& grads, const Inputs& in,
                              const Saved& saved, const Groups& groups, const Wanted& wanted) {
  const DeviceScope scope(in.x);
  const Problem p(call, in, groups);
  const Sizes sizes = in.x.sizes();
  const Rows gy = as_rows(p.op, "grad_y", grads.grad_y, p.dtype, sizes);
  require_dense(p.op, "stats", saved.stats, accumulator(p.dtype), {p.x.rows, p.groups, 2});
  const Tensor dx = empty_tensor(sizes, p.dtype);
  const Output dz(in.z.has_value(), sizes, p.dtype);
  const Output dweight(wanted.weight_grad, {p.x.cols}, p.dtype);
  const Output dbias(wanted.bias_grad, {p.x.cols}, p.dtype);
  const GatedNormBackwardParams params{.dtype = p.dtype,
                                       .place = p.place,
                                       .act = p.act,
                                       .center = groups.center,
                                       .rows = p.x.rows,
                                       .groups = p.groups,
                                       .cols = p.cols,
                                       .grad_y = gy.data(),
                                       .x = p.x.data(),
                                       .z = data_or_null(p.z),
                                       .weight = data_or_null(p.weight),
                                       .bias = data_or_null(p.bias),
                                       .stats = saved.stats.const_data_ptr(),
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
    sum_over_rows(params, p.x.rows, p.cols, {dweight, p.groups}, {dbias, p.groups},
                  gated_norm_kernels(params.dtype).backward);
  }
  return {dx, dz, dweight, dbias};
}

const Registry registry([](Registry& ops) {
  ops.name("gated_norm", {{"group_norm"}, {"rms_norm_gated", "z"}});
  ops.add<gated_norm>("gated_norm", saves_last);
  ops.add<gated_norm_backward>("gated_norm_backward");
});

}  // namespace
}  // namespace omniattn::ops::gated_norm
