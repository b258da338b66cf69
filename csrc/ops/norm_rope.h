// norm_rope, norm_rope_backward: checks and allocation for either device. Included by rope_cpu.cpp
// and rope_cuda.cpp, each of which defines the two run functions.
#pragma once
#include "kernels/rope/norm_rope.h"

#include "ops/rope.h"

namespace {

void run_forward(const NormRopeParams& p, int64_t batch);
// dweight: (dim) in the compute type, or null.
void run_backward(const NormRopeBackwardParams& p, int64_t batch, void* dweight);

OptTensor head_weight(const char* op, const OptTensor& weight, const RopeParams& p) {
  return as_vector(op, "weight", weight, p.dtype, p.dim);
}

std::tuple<Tensor, Tensor> norm_rope(const Tensor& x, const OptTensor& weight, const Tensor& cos,
                                     const Tensor& sin, const OptTensor& positions, int64_t start,
                                     bool interleaved, double eps, double offset, bool cast_first) {
  constexpr const char* op = "qk_norm_rotary";
  const DeviceScope scope(x);
  std::array<Tensor, 2> tables;
  NormRopeParams p{};
  p.rope = common(op, x, cos, sin, positions, start, interleaved, false, tables);
  check_like_q(op, "x", x, x, p.rope.dtype);
  const OptTensor scale = head_weight(op, weight, p.rope);
  const Tensor in = with_unit_last_stride(x);
  const Tensor y = empty_tensor(x.sizes(), p.rope.dtype);
  const int64_t rstd_sizes[] = {x.size(0), x.size(1), x.size(2)};
  const Tensor rstd = empty_tensor({rstd_sizes, 3}, accumulator(p.rope.dtype));
  add_tensor(p.rope, in, y);
  p.weight = data_or_null(scale);
  p.rstd = rstd.mutable_data_ptr();
  p.eps = eps;
  p.offset = offset;
  p.cast_first = cast_first;
  run_forward(p, x.size(0));
  return {y, rstd};
}

// dweight is in the accumulator type, and empty if not wanted.
std::tuple<Tensor, Tensor> norm_rope_backward(const Tensor& grad_y, const Tensor& x,
                                              const OptTensor& weight, const Tensor& cos,
                                              const Tensor& sin, const OptTensor& positions,
                                              const Tensor& rstd, int64_t start, bool interleaved,
                                              double offset, bool weight_grad) {
  constexpr const char* op = "norm_rope_backward";
  const DeviceScope scope(x);
  std::array<Tensor, 2> tables;
  NormRopeBackwardParams p{};
  p.rope = common(op, grad_y, cos, sin, positions, start, interleaved, true, tables);
  const DType dtype = p.rope.dtype, acc = accumulator(dtype);
  require_tensor(op, "grad_y", grad_y, dtype);
  require_tensor(op, "x", x, dtype);
  require_sizes(op, "x", x, grad_y.sizes());
  const int64_t rstd_sizes[] = {x.size(0), x.size(1), x.size(2)};
  require_tensor(op, "rstd", rstd, acc);
  require_sizes(op, "rstd", rstd, {rstd_sizes, 3});
  require(rstd.is_contiguous(), op, "rstd must be contiguous");
  const OptTensor scale = head_weight(op, weight, p.rope);
  const Tensor grad = with_unit_last_stride(grad_y), in = with_unit_last_stride(x);
  const Tensor dx = empty_tensor(x.sizes(), dtype);
  const int64_t dw_cols = weight_grad ? p.rope.dim : 0;
  const Tensor dweight = empty_tensor({&dw_cols, 1}, acc);
  add_tensor(p.rope, grad, dx);
  p.x = in.const_data_ptr();
  p.x_batch = in.stride(0);
  p.x_token = in.stride(1);
  p.x_head = in.stride(2);
  p.weight = data_or_null(scale);
  p.rstd = rstd.const_data_ptr();
  p.offset = offset;
  run_backward(p, x.size(0), weight_grad ? dweight.mutable_data_ptr() : nullptr);
  return {dx, dweight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omniattn, OMNIATTN_DISPATCH_KEY, m) {
  OMNIATTN_IMPL(m, "norm_rope", norm_rope);
  m.impl("norm_rope_backward", TORCH_BOX(&norm_rope_backward));
}
