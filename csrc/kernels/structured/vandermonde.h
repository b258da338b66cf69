// Sums of powers, the convolution kernels of diagonal state-space models, forward and backward:
//
//   y_l = 2 Re sum_n c_n e^(l x_n),   l = 0 .. L - 1
//
// For l = b B + j the power is e^(b B x) e^(j x): y is a matrix product of B powers of each term
// and one power for each block of B. Both are exponentials in double, or at most a few products
// away from one, so the error does not grow with L. The backward is the transposed product,
//
//   dc = 2 conj(sum_l g_l e^(l x))      dx = 2 conj(c sum_l l g_l e^(l x)).
//
// Complex numbers are pairs of (real, imaginary).
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"
#include "runtime/stream.h"

namespace omniattn {

// All tensors are contiguous and of dtype, f32 or f64.
struct Vandermonde {
  DType dtype;
  int64_t rows, terms, length;  // H, N, L
  const void *c, *x;            // (H, N, 2)
};

struct VandermondeParams {
  Vandermonde sums;
  void* y;  // (H, L)
};

struct VandermondeBackwardParams {
  Vandermonde sums;
  const void* grad_y;  // (H, L)
  void *dc, *dx;       // (H, N, 2)
};
static_assert(std::is_trivially_copyable_v<VandermondeParams>);
static_assert(std::is_trivially_copyable_v<VandermondeBackwardParams>);

struct VandermondeKernels {
  // An item is a row. `memory` has bytes(sums).
  int64_t (*bytes)(const Vandermonde&);
  void (*forward)(const VandermondeParams&, void* memory, int64_t begin, int64_t end);
  void (*backward)(const VandermondeBackwardParams&, void* memory, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(VandermondeKernels, vandermonde_kernels)

Status launch_vandermonde(const VandermondeParams& p, Stream stream);
Status launch_vandermonde_backward(const VandermondeBackwardParams& p, Stream stream);

}  // namespace omniattn
