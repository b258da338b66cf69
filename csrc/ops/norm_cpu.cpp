// norm, add_norm, norm_backward on the CPU: checks, allocation, split over threads.
#include "kernels/norm/norm.h"

#include <tuple>

#include "ops/parallel.h"
#include "ops/tensor.h"

namespace {

using namespace omniattn;
using namespace omniattn::ops;

// Rows per task: about 16 KiB of work, so that a task costs more than handing it out.
int64_t grain_of(int64_t cols) { return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, cols)); }

// A per-column vector with unit stride: a copy where `v` has another one.
OptTensor as_vector(const char* op, const char* name, const OptTensor& v, DType dtype,
                    int64_t cols) {
  if (!v.has_value()) return v;
  require_cpu(op, name, *v, dtype);
  require_sizes(op, name, *v, {&cols, 1});
  return cols <= 1 || v->stride(0) == 1 ? v : torch::stable::contiguous(*v);
}

std::tuple<Tensor, std::optional<Tensor>, Tensor> run(const char* op, const Tensor& x,
                                                      const OptTensor& residual,
                                                      const OptTensor& weight,
                                                      const OptTensor& bias, bool center,
                                                      double eps, double offset) {
  const DType dtype = dtype_of(op, "x", x);
  require_cpu(op, "x", x, dtype);
  const Rows rows = as_rows(op, "x", x);
  const OptTensor scale = as_vector(op, "weight", weight, dtype, rows.cols);
  const OptTensor shift = as_vector(op, "bias", bias, dtype, rows.cols);
  const Tensor y = empty_cpu(x.sizes(), dtype);
  const int64_t stats_sizes[] = {rows.rows, 2};
  const Tensor stats = empty_cpu({stats_sizes, 2}, accumulator(dtype));

  NormParams p{};
  p.dtype = dtype;
  p.rows = rows.rows;
  p.cols = rows.cols;
  p.x = rows.data();
  p.x_stride = rows.stride;
  p.weight = data_or_null(scale);
  p.bias = data_or_null(shift);
  p.y = y.mutable_data_ptr();
  p.stats = stats.mutable_data_ptr();
  p.eps = eps;
  p.offset = offset;
  p.center = center;
  std::optional<Rows> residual_rows;
  std::optional<Tensor> h;
  if (residual.has_value()) {
    require_cpu(op, "residual", *residual, dtype);
    require_sizes(op, "residual", *residual, x.sizes());
    residual_rows = as_rows(op, "residual", *residual);
    h = empty_cpu(x.sizes(), dtype);
    p.residual = residual_rows->data();
    p.residual_stride = residual_rows->stride;
    p.h = h->mutable_data_ptr();
  }
  const auto forward = norm_kernels().forward;
  parallel_ranges(p.rows, grain_of(p.cols), [&](int64_t a, int64_t b) { forward(p, a, b); });
  return {y, h, stats};
}

std::tuple<Tensor, Tensor> norm(const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                                bool center, double eps, double offset) {
  auto [y, h, stats] = run("norm", x, std::nullopt, weight, bias, center, eps, offset);
  return {y, stats};
}

std::tuple<Tensor, Tensor, Tensor> add_norm(const Tensor& x, const Tensor& residual,
                                            const OptTensor& weight, const OptTensor& bias,
                                            bool center, double eps, double offset) {
  auto [y, h, stats] = run("add_norm", x, residual, weight, bias, center, eps, offset);
  return {y, *h, stats};
}

std::tuple<Tensor, Tensor, Tensor> norm_backward(const Tensor& grad_y, const OptTensor& grad_h,
                                                 const Tensor& h, const OptTensor& weight,
                                                 const Tensor& stats, bool center, double offset,
                                                 bool weight_grad, bool bias_grad) {
  constexpr const char* op = "norm_backward";
  const DType dtype = dtype_of(op, "h", h);
  const DType acc = accumulator(dtype);
  require_cpu(op, "h", h, dtype);
  require_cpu(op, "grad_y", grad_y, dtype);
  require_sizes(op, "grad_y", grad_y, h.sizes());
  const Rows h_rows = as_rows(op, "h", h), gy_rows = as_rows(op, "grad_y", grad_y);
  const int64_t rows = h_rows.rows, cols = h_rows.cols;
  const OptTensor scale = as_vector(op, "weight", weight, dtype, cols);
  const int64_t stats_sizes[] = {rows, 2};
  require_cpu(op, "stats", stats, acc);
  require_sizes(op, "stats", stats, {stats_sizes, 2});
  require(stats.is_contiguous(), op, "stats must be contiguous");

  const Tensor dx = empty_cpu(h.sizes(), dtype);
  NormBackwardParams p{};
  p.dtype = dtype;
  p.rows = rows;
  p.cols = cols;
  p.grad_y = gy_rows.data();
  p.grad_y_stride = gy_rows.stride;
  std::optional<Rows> gh_rows;
  if (grad_h.has_value()) {
    require_cpu(op, "grad_h", *grad_h, dtype);
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
  p.offset = offset;
  p.center = center;

  // One partial sum of dweight and dbias per shard of rows, added in order.
  const int64_t shards = std::clamp<int64_t>(rows / grain_of(cols), 1, 8);
  const int64_t dw_cols = weight_grad ? cols : 0, db_cols = bias_grad ? cols : 0;
  const int64_t width = dw_cols + db_cols;
  const int64_t partial_sizes[] = {shards, width};
  Tensor partial = empty_cpu({partial_sizes, 2}, acc);
  torch::stable::zero_(partial);
  char* const sums = static_cast<char*>(partial.mutable_data_ptr());
  const auto size = static_cast<int64_t>(size_of(acc));
  const auto backward = norm_kernels().backward;
  parallel_shards(rows, shards, [&](int64_t s, int64_t a, int64_t b) {
    char* const mine = sums + s * width * size;
    backward(p, weight_grad ? mine : nullptr, bias_grad ? mine + dw_cols * size : nullptr, a, b);
  });
  const Tensor dweight = empty_cpu({&dw_cols, 1}, dtype), dbias = empty_cpu({&db_cols, 1}, dtype);
  const auto reduce = norm_kernels().sum_shards;
  reduce(dtype, sums, shards, width, dw_cols, dweight.mutable_data_ptr());
  reduce(dtype, sums + dw_cols * size, shards, width, db_cols, dbias.mutable_data_ptr());
  return {dx, dweight, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omniattn, CPU, m) {
  OMNIATTN_IMPL(m, "norm", norm);
  OMNIATTN_IMPL(m, "add_norm", add_norm);
  m.impl("norm_backward", TORCH_BOX(&norm_backward));
}
