// Products of `linear` and glu_mlp, by this package's kernels or by torch's.
#pragma once

#include <tuple>

#include "ops/tensor.h"

namespace omniattn::ops::gemm {

// x (..., K), weight (N, K), bias (N), y (..., N), all of one dtype and checked by the callers.
// split_bf16: see gemm.h; torch's products have none.
struct LinearProducts {
  // y = x weight^T + bias
  Tensor (*forward)(const Tensor& x, const Tensor& weight, const OptTensor& bias,
                    int64_t split_bf16);
  // dx, dweight and dbias; an unwanted one has no elements.
  std::tuple<Tensor, Tensor, Tensor> (*backward)(const Tensor& grad_y, const Tensor& x,
                                                 const Tensor& weight, int64_t split_bf16,
                                                 bool x_grad, bool weight_grad, bool bias_grad);
  // Sum of the input gradients of two layers that share x; native kernels round it once.
  Tensor (*sum_of_input_gradients)(const Tensor& grad_a, const Tensor& weight_a,
                                   const Tensor& grad_b, const Tensor& weight_b,
                                   int64_t split_bf16);
};

extern const LinearProducts kTorchProducts;
// Products of this package; on CUDA they are torch's.
extern const LinearProducts kNativeProducts;

}  // namespace omniattn::ops::gemm
