// linear on CUDA: the products of torch.
#include "ops/layers/linear.h"
#include "ops/registry.h"

namespace omniattn::ops::gemm {
namespace {

// Checks x and weight here, since errors of torch's products would name other ops.
void check(const char* op, const Tensor& x, const Tensor& weight) {
  const DType dtype = dtype_of(op, "x", x);
  require_tensor(op, "x", x, dtype);
  require_tensor(op, "weight", weight, dtype);
  require(x.dim() >= 1, op, "x must have at least 1 dimension, got 0");
  require(weight.dim() == 2, op, "weight must have 2 dimensions, got ", weight.dim());
  const int64_t k = x.size(x.dim() - 1);
  require(k == weight.size(1), op, "x and weight must have the same last size, got K=", k, " and ",
          weight.size(1));
}

Tensor linear(const OpCall& call, const Layer& in, const LayerOptions& options) {
  const auto& [x, weight, bias] = in;
  const DeviceScope scope(x);
  check(call.op, x, weight);
  if (bias.has_value()) {
    require_tensor(call.op, "bias", *bias, dtype_of(call.op, "x", x));
    require_sizes(call.op, "bias", *bias, {weight.size(0)});
  }
  return kTorchProducts.forward(call, in, options);
}

LayerGradients linear_backward(const OpCall& call, const LayerBackward& in,
                               const LayerOptions& options, const Wanted& wanted) {
  const auto& [grad_y, x, weight] = in;
  const DeviceScope scope(x);
  check(call.op, x, weight);
  require_tensor(call.op, "grad_y", grad_y, dtype_of(call.op, "x", x));
  require_sizes(call.op, "grad_y", grad_y, sizes_with_last(x, weight.size(0)));
  return kTorchProducts.backward(call, in, options, wanted);
}

const Registry registry([](Registry& ops) {
  ops.implement<linear>("linear", differentiable);
  ops.implement<linear_backward>("linear_backward");
});

}  // namespace

constinit const LinearProducts kNativeProducts{
    linear, linear_backward,
    [](const Tensor& grad_a, const Tensor& weight_a, const Tensor& grad_b, const Tensor& weight_b,
       int64_t split_bf16) {
      return kTorchProducts.sum_of_input_gradients(grad_a, weight_a, grad_b, weight_b, split_bf16);
    }};

}  // namespace omniattn::ops::gemm
