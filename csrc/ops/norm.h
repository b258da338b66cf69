// norm, add_norm, norm_backward: checks and allocation for either device. Included by norm_cpu.cpp
// and norm_cuda.cpp, each of which defines the two run functions.
#pragma once

#include "kernels/norm/norm.h"

#include <tuple>

#include "ops/tensor.h"

namespace {

using namespace omniattn;
using namespace omniattn::ops;

void run_forward(const NormParams& p);
// dweight, dbias: (cols) or null.
void run_backward(const NormBackwardParams& p, void* dweight, void* dbias);

// The dtype of a residual stream beside values of `dtype`: the same, or fp32 beside 16 bits.
DType stream_dtype(const char* op, const char* name, const Tensor& t, DType dtype) {
  const DType found = dtype_of(op, name, t);
  require(found == dtype || (found == DType::f32 && size_of(dtype) == 2), op, name,
          " must have scalar type ", static_cast<int>(scalar_type(dtype)),
          ", or that of float32 beside 16 bits, got ", static_cast<int>(scalar_type(found)));
  return found;
}

struct NormResult {
  Tensor y;
  OptTensor h, stats;
};

NormResult run(const char* op, const Tensor& x, const OptTensor& residual, const OptTensor& weight,
               const OptTensor& bias, bool center, double eps, double offset, bool cast_first,
               bool with_stats) {
  const DeviceScope scope(x);
  const DType dtype = dtype_of(op, "x", x);
  require_tensor(op, "x", x, dtype);
  const Rows rows = as_rows(op, "x", x);
  const OptTensor scale = as_vector(op, "weight", weight, dtype, rows.cols);
  const OptTensor shift = as_vector(op, "bias", bias, dtype, rows.cols);
  NormResult result{empty_tensor(x.sizes(), dtype), std::nullopt, std::nullopt};

  NormParams p{};
  p.dtype = p.h_dtype = dtype;
  p.rows = rows.rows;
  p.cols = rows.cols;
  p.x = rows.data();
  p.x_stride = rows.stride;
  p.weight = data_or_null(scale);
  p.bias = data_or_null(shift);
  p.y = result.y.mutable_data_ptr();
  p.eps = eps;
  p.offset = offset;
  p.center = center;
  p.cast_first = cast_first;
  if (with_stats) {
    const int64_t stats_sizes[] = {rows.rows, 2};
    result.stats = empty_tensor({stats_sizes, 2}, accumulator(dtype));
    p.stats = result.stats->mutable_data_ptr();
  }
  std::optional<Rows> residual_rows;
  if (residual.has_value()) {
    p.h_dtype = stream_dtype(op, "residual", *residual, dtype);
    require_tensor(op, "residual", *residual, p.h_dtype);
    require_sizes(op, "residual", *residual, x.sizes());
    residual_rows = as_rows(op, "residual", *residual);
    result.h = empty_tensor(x.sizes(), p.h_dtype);
    p.residual = residual_rows->data();
    p.residual_stride = residual_rows->stride;
    p.h = result.h->mutable_data_ptr();
  }
  run_forward(p);
  return result;
}

std::tuple<Tensor, Tensor> norm(const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                                bool center, double eps, double offset, bool cast_first) {
  const NormResult r =
      run("norm", x, std::nullopt, weight, bias, center, eps, offset, cast_first, true);
  return {r.y, *r.stats};
}

std::tuple<Tensor, Tensor, Tensor> add_norm(const Tensor& x, const Tensor& residual,
                                            const OptTensor& weight, const OptTensor& bias,
                                            bool center, double eps, double offset,
                                            bool cast_first) {
  const NormResult r =
      run("add_norm", x, residual, weight, bias, center, eps, offset, cast_first, true);
  return {r.y, *r.h, *r.stats};
}

Tensor norm_only(const Tensor& x, const OptTensor& weight, const OptTensor& bias, bool center,
                 double eps, double offset, bool cast_first) {
  return run("norm", x, std::nullopt, weight, bias, center, eps, offset, cast_first, false).y;
}

std::tuple<Tensor, Tensor> add_norm_only(const Tensor& x, const Tensor& residual,
                                         const OptTensor& weight, const OptTensor& bias,
                                         bool center, double eps, double offset, bool cast_first) {
  const NormResult r =
      run("add_norm", x, residual, weight, bias, center, eps, offset, cast_first, false);
  return {r.y, *r.h};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_backward(
    const Tensor& grad_y, const OptTensor& grad_h, const Tensor& h, const OptTensor& weight,
    const Tensor& stats, bool center, double offset, bool weight_grad, bool bias_grad) {
  constexpr const char* op = "norm_backward";
  const DeviceScope scope(h);
  const DType dtype = dtype_of(op, "grad_y", grad_y);
  const DType h_dtype = stream_dtype(op, "h", h, dtype);
  require_tensor(op, "grad_y", grad_y, dtype);
  require_tensor(op, "h", h, h_dtype);
  require_sizes(op, "grad_y", grad_y, h.sizes());
  const Rows h_rows = as_rows(op, "h", h), gy_rows = as_rows(op, "grad_y", grad_y);
  const int64_t rows = h_rows.rows, cols = h_rows.cols;
  const OptTensor scale = as_vector(op, "weight", weight, dtype, cols);
  const int64_t stats_sizes[] = {rows, 2};
  require_tensor(op, "stats", stats, accumulator(dtype));
  require_sizes(op, "stats", stats, {stats_sizes, 2});
  require(stats.is_contiguous(), op, "stats must be contiguous");

  const bool mixed = h_dtype != dtype;
  const int64_t nothing = 0;
  const Tensor dx = empty_tensor(h.sizes(), dtype);
  const Tensor dh = empty_tensor(mixed ? h.sizes() : Sizes(&nothing, 1), h_dtype);
  NormBackwardParams p{};
  p.dtype = dtype;
  p.h_dtype = h_dtype;
  p.rows = rows;
  p.cols = cols;
  p.grad_y = gy_rows.data();
  p.grad_y_stride = gy_rows.stride;
  std::optional<Rows> gh_rows;
  if (grad_h.has_value()) {
    require_tensor(op, "grad_h", *grad_h, h_dtype);
    require_sizes(op, "grad_h", *grad_h, h.sizes());
    gh_rows = as_rows(op, "grad_h", *grad_h);
    p.grad_h = gh_rows->data();
    p.grad_h_stride = gh_rows->stride;
  }
  p.h = h_rows.data();
  p.h_stride = h_rows.stride;
  p.weight = data_or_null(scale);
  p.stats = stats.const_data_ptr();
  p.dx = dx.mutable_data_ptr();
  p.dh = mixed ? dh.mutable_data_ptr() : nullptr;
  p.offset = offset;
  p.center = center;

  const int64_t dw_cols = weight_grad ? cols : 0, db_cols = bias_grad ? cols : 0;
  const Tensor dweight = empty_tensor({&dw_cols, 1}, dtype);
  const Tensor dbias = empty_tensor({&db_cols, 1}, dtype);
  run_backward(p, weight_grad ? dweight.mutable_data_ptr() : nullptr,
               bias_grad ? dbias.mutable_data_ptr() : nullptr);
  return {dx, dh, dweight, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omniattn, OMNIATTN_DISPATCH_KEY, m) {
  OMNIATTN_IMPL(m, "norm", norm);
  OMNIATTN_IMPL(m, "add_norm", add_norm);
  m.impl("norm_only", TORCH_BOX(&norm_only));
  m.impl("add_norm_only", TORCH_BOX(&add_norm_only));
  m.impl("norm_backward", TORCH_BOX(&norm_backward));
}
