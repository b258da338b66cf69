// linear, and its products in other ops, by this package's kernels or by torch's.
#pragma once

#include "ops/fields.h"
#include "ops/tensor.h"

namespace omniattn::ops::gemm {

// x (..., K), weight (N, K), bias (N), y (..., N), all of one dtype. split_bf16: see gemm.h;
// torch's products have none.
OMNIATTN_FIELDS(Layer, Tensor x, weight; OptTensor bias);
OMNIATTN_FIELDS(LayerBackward, Tensor grad_y, x, weight);
OMNIATTN_FIELDS(LayerOptions, int64_t split_bf16);
OMNIATTN_FIELDS(Wanted, bool x_grad, weight_grad, bias_grad);
// An unwanted gradient has no elements.
OMNIATTN_FIELDS(LayerGradients, Tensor dx, dweight, dbias);

// y = x weight^T + bias
using Linear = Tensor(const OpCall& call, const Layer& in, const LayerOptions& options);
using LinearBackward = LayerGradients(const OpCall& call, const LayerBackward& in,
                                      const LayerOptions& options, const Wanted& wanted);

// Products of arguments that the callers have checked.
struct LinearProducts {
  Linear* forward;
  LinearBackward* backward;
  // Sum of the input gradients of two layers that share x; native kernels round it once.
  Tensor (*sum_of_input_gradients)(const Tensor& grad_a, const Tensor& weight_a,
                                   const Tensor& grad_b, const Tensor& weight_b,
                                   int64_t split_bf16);
};

extern const LinearProducts kTorchProducts;
// Products of this package; on CUDA they are torch's.
extern const LinearProducts kNativeProducts;

}  // namespace omniattn::ops::gemm
