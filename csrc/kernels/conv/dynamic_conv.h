// Causal convolution over time by filters of each token and head, forward and backward, see conv.h:
//
//   s[t] = sum_k taps[t, h, k] x[t + k - (K - 1)]      y = act(s), or act(s) + x with a residual
//
// for the D / H channels of head h. With g[t] = dy[t] act'(s[t]), where s is recomputed,
//
//   dx[t] = sum_k taps[t + (K - 1) - k, h, k] g[t + (K - 1) - k]      (+ dy[t])
//   dtaps[t, h, k] = sum of g[t] x[t + k - (K - 1)] over the channels of h
#pragma once

#include "kernels/conv/conv.h"

namespace omniattn {

struct DynamicConv {
  CausalConv conv;   // without weight and bias
  int64_t heads;     // H, a divisor of D
  const void* taps;  // (B, T, H, K) contiguous
  bool residual;

  OMNIATTN_FN int64_t width() const { return heads > 0 ? conv.channels / heads : 0; }
};

struct DynamicConvParams {
  DynamicConv problem;
  void* y;           // (B, T, D) contiguous
  bool past_caches;  // y is too large for the caches
};

struct DynamicConvBackwardParams {
  DynamicConv problem;
  const void* grad_y;      // (B, T, D)
  const void* grad_final;  // (N, K - 1, D) contiguous, or null
  void* dx;                // (B, T, D) contiguous
  void* dtaps;             // (B, T, H, K) contiguous
  void* dbefore;           // (N, K - 1, D) contiguous, or null
  bool past_caches;        // dx is too large for the caches
  int64_t grad_y_batch, grad_y_row;
};
static_assert(std::is_trivially_copyable_v<DynamicConvParams>);
static_assert(std::is_trivially_copyable_v<DynamicConvBackwardParams>);

// `memory` has the bytes of the pass.
struct DynamicConvKernels {
  int64_t (*forward_bytes)(const DynamicConv&);
  // An item is a row of y.
  void (*forward)(const DynamicConvParams&, void* memory, int64_t begin, int64_t end);
  int64_t (*backward_bytes)(const DynamicConv&);
  // An item is a row of `before` or of x: it computes the gradient of that row, and of the taps of
  // a step. Rows of a sequence are adjacent items.
  void (*backward)(const DynamicConvBackwardParams&, void* memory, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(DynamicConvKernels, dynamic_conv_kernels)

}  // namespace omniattn
