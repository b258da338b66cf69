// linear: its schemas, and the products of torch (MKL, oneDNN, cuBLAS). gemm_cpu.cpp has the
// products of this package.
#include <numeric>

#include "ops/layers/linear.h"
#include "ops/registry.h"
#include "ops/torch_ops.h"

namespace omniattn::ops::gemm {
namespace {

// Returns t (..., cols) as (rows, cols). A size of -1 would be ambiguous without columns.
Tensor as_matrix(const Tensor& t) {
  const Sizes sizes = t.sizes();
  const int64_t rows =
      std::accumulate(sizes.begin(), sizes.end() - 1, int64_t{1}, std::multiplies<int64_t>());
  return torch::stable::reshape(t, {rows, sizes[sizes.size() - 1]});
}

Tensor forward(const OpCall&, const Layer& in, const LayerOptions&) {
  return call_torch("aten::linear", "", in.x, in.weight, in.bias);
}

LayerGradients backward(const OpCall& call, const LayerBackward& in, const LayerOptions&,
                        const Wanted& wanted) {
  const NoGrad scope;
  const auto& [grad_y, x, weight] = in;
  const DType dtype = dtype_of(call.op, "x", x);
  const Tensor rows = as_matrix(grad_y);
  const auto none = [dtype] { return empty_tensor({0}, dtype); };
  return {
      wanted.x_grad ? torch::stable::view(torch::stable::matmul(rows, weight), x.sizes()) : none(),
      wanted.weight_grad ? torch::stable::matmul(torch::stable::transpose(rows, 0, 1), as_matrix(x))
                         : none(),
      wanted.bias_grad ? torch::stable::sum(rows, Sizes{0}) : none()};
}

Tensor sum_of_input_gradients(const Tensor& grad_a, const Tensor& weight_a, const Tensor& grad_b,
                              const Tensor& weight_b, int64_t) {
  const NoGrad scope;
  const Tensor dx = empty_tensor(sizes_with_last(grad_a, weight_a.size(1)),
                                 dtype_of("linear_backward", "grad_y", grad_a));
  const Tensor out = as_matrix(dx), a = as_matrix(grad_a), b = as_matrix(grad_b);
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch__mm_plus_mm_out(out.get(), a.get(), weight_a.get(), b.get(), weight_b.get()));
  return dx;
}

const Registry registry([](Registry& ops) {
  ops.define<Linear>("linear", differentiable);
  ops.define<LinearBackward>("linear_backward");
});

}  // namespace

constinit const LinearProducts kTorchProducts{forward, backward, sum_of_input_gradients};

}  // namespace omniattn::ops::gemm
