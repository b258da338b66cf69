// gated_norm, gated_norm_backward: checks and allocation for either device. Included by
// gated_norm_cpu.cpp and gated_norm_cuda.cpp, each of which defines the two run functions.
#pragma once

#include "kernels/norm/gated_norm.h"

#include <tuple>

#include "ops/tensor.h"

namespace {

using namespace omniattn;
using namespace omniattn::ops;

void run_forward(const GatedNormParams& p);
// dweight, dbias: (groups * cols) or null.
void run_backward(const GatedNormBackwardParams& p, void* dweight, void* dbias);

// What both directions read of x, z, weight and bias, with copies where strides do not fit.
struct Inputs {
  Rows x;
  std::optional<Rows> z;
  OptTensor weight, bias;

  template <class Params>
  void fill(Params& p) const {
    p.rows = x.rows;
    p.x = x.data();
    p.x_stride = x.stride;
    p.z = z ? z->data() : nullptr;
    p.z_stride = z ? z->stride : 0;
    p.weight = data_or_null(weight);
    p.bias = data_or_null(bias);
  }
};

template <class Params>
Inputs prepare(const char* op, Params& p, const Tensor& x, const OptTensor& z,
               const OptTensor& weight, const OptTensor& bias, int64_t groups, int64_t gate,
               int64_t act, bool center) {
  p.dtype = dtype_of(op, "x", x);
  require_tensor(op, "x", x, p.dtype);
  require(gate >= 0 && gate < kGatePlaces, op, "gate must be in [0, ", kGatePlaces, "), got ",
          gate);
  p.place = static_cast<GatePlace>(gate);
  require(z.has_value() == (p.place != GatePlace::none), op,
          "z must be given where there is a gate and only there, got gate=", gate);
  p.act = static_cast<Activation>(act);
  require(p.act == Activation::silu || p.act == Activation::sigmoid, op,
          "act must be silu or sigmoid, got act=", act);
  Inputs in{as_rows(op, "x", x), std::nullopt, std::nullopt, std::nullopt};
  const int64_t width = in.x.cols;
  require(groups > 0 && width % groups == 0, op, "groups must divide the last dimension, got ",
          groups, " for ", width);
  p.groups = groups;
  p.cols = width / groups;
  p.center = center;
  if (z.has_value()) {
    require_tensor(op, "z", *z, p.dtype);
    require_sizes(op, "z", *z, x.sizes());
    in.z = as_rows(op, "z", *z);
  }
  in.weight = as_vector(op, "weight", weight, p.dtype, width);
  in.bias = as_vector(op, "bias", bias, p.dtype, width);
  in.fill(p);
  return in;
}

struct GatedNormResult {
  Tensor y;
  OptTensor stats;
};

GatedNormResult run(const Tensor& x, const OptTensor& z, const OptTensor& weight,
                    const OptTensor& bias, int64_t groups, int64_t gate, int64_t act, bool center,
                    double eps, bool cast_first, bool with_stats) {
  const DeviceScope scope(x);
  GatedNormParams p{};
  const Inputs in = prepare("gated_norm", p, x, z, weight, bias, groups, gate, act, center);
  GatedNormResult result{empty_tensor(x.sizes(), p.dtype), std::nullopt};
  p.y = result.y.mutable_data_ptr();
  p.eps = eps;
  p.cast_first = cast_first;
  if (with_stats) {
    const int64_t sizes[] = {p.rows, groups, 2};
    result.stats = empty_tensor({sizes, 3}, accumulator(p.dtype));
    p.stats = result.stats->mutable_data_ptr();
  }
  run_forward(p);
  return result;
}

std::tuple<Tensor, Tensor> gated_norm(const Tensor& x, const OptTensor& z, const OptTensor& weight,
                                      const OptTensor& bias, int64_t groups, int64_t gate,
                                      int64_t act, bool center, double eps, bool cast_first) {
  const GatedNormResult r =
      run(x, z, weight, bias, groups, gate, act, center, eps, cast_first, true);
  return {r.y, *r.stats};
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
  constexpr const char* op = "gated_norm_backward";
  const DeviceScope scope(x);
  GatedNormBackwardParams p{};
  const Inputs in = prepare(op, p, x, z, weight, bias, groups, gate, act, center);
  require_tensor(op, "grad_y", grad_y, p.dtype);
  require_sizes(op, "grad_y", grad_y, x.sizes());
  const Rows gy = as_rows(op, "grad_y", grad_y);
  const int64_t stats_sizes[] = {p.rows, groups, 2};
  require_tensor(op, "stats", stats, accumulator(p.dtype));
  require_sizes(op, "stats", stats, {stats_sizes, 3});
  require(stats.is_contiguous(), op, "stats must be contiguous");

  const int64_t none = 0, width = p.groups * p.cols;
  const Tensor dx = empty_tensor(x.sizes(), p.dtype);
  const Tensor dz = empty_tensor(z.has_value() ? x.sizes() : Sizes(&none, 1), p.dtype);
  const int64_t dw_cols = weight_grad ? width : 0, db_cols = bias_grad ? width : 0;
  const Tensor dweight = empty_tensor({&dw_cols, 1}, p.dtype);
  const Tensor dbias = empty_tensor({&db_cols, 1}, p.dtype);
  p.grad_y = gy.data();
  p.grad_y_stride = gy.stride;
  p.stats = stats.const_data_ptr();
  p.dx = dx.mutable_data_ptr();
  p.dz = z.has_value() ? dz.mutable_data_ptr() : nullptr;
  run_backward(p, weight_grad ? dweight.mutable_data_ptr() : nullptr,
               bias_grad ? dbias.mutable_data_ptr() : nullptr);
  return {dx, dz, dweight, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omniattn, OMNIATTN_DISPATCH_KEY, m) {
  OMNIATTN_IMPL(m, "gated_norm", gated_norm);
  m.impl("gated_norm_only", TORCH_BOX(&gated_norm_only));
  m.impl("gated_norm_backward", TORCH_BOX(&gated_norm_backward));
}
