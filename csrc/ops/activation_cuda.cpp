// The gated activations on CUDA.
#include "kernels/activation/activation_cuda.h"
#include "ops/activation.h"
#include "ops/cuda.h"

namespace omniattn::ops::activation {

void run(const char* op, const GluParams& p, int64_t rows) {
  require_launched(op, launch_glu(p, rows, stream()));
}

void run(const char* op, const GluBackwardParams& p, int64_t rows) {
  require_launched(op, launch_glu_backward(p, rows, stream()));
}

}  // namespace omniattn::ops::activation
