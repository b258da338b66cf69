// cross_entropy, cross_entropy_backward on CUDA. linear_cross_entropy is composed of them and
// cuBLAS, see python/omniattn/ops/loss.py.
#include "kernels/loss/loss_cuda.h"

#include "ops/cuda.h"
#include "ops/loss.h"

namespace {

bool writes_gradients(DType dtype, DType grad_dtype) {
  return dtype == DType::f32 && size_of(grad_dtype) == 2;
}

// The kernels check them: reading them here would wait for the GPU.
void check_targets(const char*, const CrossEntropyParams&) {}

void run_forward(const CrossEntropyParams& p) {
  require_launched("cross_entropy", launch_cross_entropy(p, stream()));
}

void run_backward(const CrossEntropyBackwardParams& p) {
  require_launched("cross_entropy_backward", launch_cross_entropy_backward(p, stream()));
}

void run_total(const CrossEntropyParams& p, Reduction reduction, void* total) {
  require_launched("cross_entropy",
                   launch_loss_total(p, reduction == Reduction::mean, total, stream()));
}

void run_row_weights(const CrossEntropyParams& p, Reduction reduction, const void* grad,
                     void* weights) {
  const bool mean = reduction == Reduction::mean, per_row = reduction == Reduction::none;
  require_launched("cross_entropy_backward",
                   launch_row_weights(p, mean, per_row, grad, weights, stream()));
}

}  // namespace
