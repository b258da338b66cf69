// linear: native on the CPU only (gemm_cpu.cpp); on CUDA Python composes it of torch's products.
#include "ops/registry.h"

namespace omniattn::ops::gemm {
namespace {

// y = x weight^T + bias with x (..., K), weight (N, K). pieces: see gemm.h.
const Registry registry([](Registry& ops) {
  ops.define("linear(Tensor x, Tensor weight, Tensor? bias, int pieces) -> Tensor", differentiable);
  ops.define(
      "linear_backward(Tensor grad_y, Tensor x, Tensor weight, int pieces, bool x_grad,"
      " bool weight_grad, bool bias_grad) -> (Tensor dx, Tensor dweight, Tensor dbias)");
});

}  // namespace
}  // namespace omniattn::ops::gemm
