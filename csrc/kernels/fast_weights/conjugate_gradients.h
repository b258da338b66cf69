// Solves (S + diag(lamb)) x = q for symmetric matrices S by conjugate gradients (Hestenes and
// Stiefel 1952), as MesaNet does for each token. Each system ends at a residual of rounding errors
// or after a number of iterations; a NaN in q never ends early.
#pragma once

#include <type_traits>

#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"

namespace omniattn {

// All tensors are contiguous, of dtype, f32 or f64.
struct ConjugateGradients {
  DType dtype;
  int64_t systems, width;        // N, K
  int64_t iterations;            // at most
  double tolerance;              // of residuals, relative to q
  const void *state, *lamb, *q;  // (N, K, K), (N, K), (N, K)
  void* x;                       // (N, K)

  OMNIATTN_FN int64_t bytes() const { return 3 * width * size_of(dtype); }
};
static_assert(std::is_trivially_copyable_v<ConjugateGradients>);

struct ConjugateGradientsKernels {
  // Item n is system n; memory has bytes().
  void (*solve)(const ConjugateGradients&, void* memory, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(ConjugateGradientsKernels, conjugate_gradients_kernels)

}  // namespace omniattn
