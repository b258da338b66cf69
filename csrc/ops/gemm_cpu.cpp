// linear, linear_backward on the CPU: checks, allocation.
#include "ops/gemm.h"

#include <tuple>
#include <vector>

namespace {

using namespace omniattn;
using namespace omniattn::ops;

struct LinearArgs {
  DType dtype;
  Rows x, weight;
};

LinearArgs check(const char* op, const Tensor& x, const Tensor& weight) {
  const DType dtype = dtype_of(op, "x", x);
  require_tensor(op, "x", x, dtype);
  require_tensor(op, "weight", weight, dtype);
  require(weight.dim() == 2, op, "weight must have 2 dimensions, got ", weight.dim());
  LinearArgs args{dtype, as_rows(op, "x", x), as_rows(op, "weight", weight)};
  require(args.x.cols == args.weight.cols, op,
          "x and weight must have the same last size, got K=", args.x.cols, " and ",
          args.weight.cols);
  return args;
}

Tensor linear(const Tensor& x, const Tensor& weight, const OptTensor& bias) {
  constexpr const char* op = "linear";
  const auto [dtype, rows, matrix] = check(op, x, weight);
  const int64_t n = matrix.rows;
  if (bias.has_value()) {
    require_tensor(op, "bias", *bias, dtype);
    require_sizes(op, "bias", *bias, {&n, 1});
  }
  const OptTensor dense_bias = contiguous(bias);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = n;
  const Tensor y = empty_tensor({sizes.data(), sizes.size()}, dtype);
  multiply({rows.data(), dtype, rows.stride}, {matrix.data(), dtype, matrix.stride, true},
           data_or_null(dense_bias), y.mutable_data_ptr(), dtype, n, rows.rows, n, rows.cols);
  return y;
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(const Tensor& grad_y, const Tensor& x,
                                                   const Tensor& weight, bool x_grad,
                                                   bool weight_grad, bool bias_grad) {
  constexpr const char* op = "linear_backward";
  const auto [dtype, rows, matrix] = check(op, x, weight);
  const int64_t m = rows.rows, n = matrix.rows, k = rows.cols;
  require_tensor(op, "grad_y", grad_y, dtype);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = n;
  require_sizes(op, "grad_y", grad_y, {sizes.data(), sizes.size()});
  const Rows grad = as_rows(op, "grad_y", grad_y);

  constexpr int64_t kNone = 0;
  const Sizes none{&kNone, 1};
  const Tensor dx = empty_tensor(x_grad ? x.sizes() : none, dtype);
  const Tensor dweight = empty_tensor(weight_grad ? weight.sizes() : none, dtype);
  const Tensor dbias = empty_tensor({bias_grad ? &n : &kNone, 1}, dtype);
  if (x_grad) {
    multiply({grad.data(), dtype, grad.stride}, {matrix.data(), dtype, matrix.stride}, nullptr,
             dx.mutable_data_ptr(), dtype, k, m, k, n);
  }
  if (weight_grad) {
    multiply({grad.data(), dtype, grad.stride, true}, {rows.data(), dtype, rows.stride}, nullptr,
             dweight.mutable_data_ptr(), dtype, k, n, k, m);
  }
  if (bias_grad) sum_columns(grad, dtype, dbias.mutable_data_ptr());
  return {dx, dweight, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omniattn, CPU, m) {
  OMNIATTN_IMPL(m, "linear", linear);
  m.impl("linear_backward", TORCH_BOX(&linear_backward));
}
