// cross_entropy on CUDA.
#include "kernels/loss/loss_cuda.h"
#include "ops/cuda.h"
#include "ops/loss.h"

namespace omniattn::ops::loss {

bool writes_gradients(DType dtype, DType grad_dtype) {
  return dtype == DType::f32 && size_of(grad_dtype) == 2;
}

// The kernels check them: reading them here would wait for the GPU.
void check_targets(const char*, const CrossEntropyParams&) {}

void run_forward(const char* op, const CrossEntropyParams& p) {
  require_launched(op, launch_cross_entropy(p, stream()));
}

void run_backward(const char* op, const CrossEntropyBackwardParams& p) {
  require_launched(op, launch_cross_entropy_backward(p, stream()));
}

void run_total(const char* op, const CrossEntropyParams& p, bool mean, void* total) {
  require_launched(op, launch_loss_total(p, mean, total, stream()));
}

void run_row_weights(const char* op, const CrossEntropyParams& p, bool mean, bool per_row,
                     const void* grad, void* weights) {
  require_launched(op, launch_row_weights(p, mean, per_row, grad, weights, stream()));
}

}  // namespace omniattn::ops::loss
