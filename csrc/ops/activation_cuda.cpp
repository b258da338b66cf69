// glu, glu_backward on CUDA.
#include "kernels/activation/activation_cuda.h"

#include "ops/activation.h"
#include "ops/cuda.h"

namespace {

void run_glu(const GluParams& p, int64_t rows) {
  require_launched("glu", launch_glu(p, rows, stream()));
}

void run_glu_backward(const GluBackwardParams& p, int64_t rows) {
  require_launched("glu_backward", launch_glu_backward(p, rows, stream()));
}

}  // namespace
