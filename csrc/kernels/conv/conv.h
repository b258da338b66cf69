// Causal depthwise convolution over time, forward and backward.
//
//   s[t] = bias + sum_k weight[k] x[t + k - (K - 1)]      y = act(s), act = silu or none
//
// The inputs that precede x are the rows `before`: those of an earlier call, or zeros. With g[t] =
// dy[t] act'(s[t]), s computed again, and g = 0 outside of [0, T):
//
//   dx[t] = sum_k weight[k] g[t + (K - 1) - k]      dweight[k] = sum_t g[t] x[t + k - (K - 1)]
//
// Channels lie in the lanes of vectors and in the threads of warps. Both devices see `before` and x
// as the K - 1 + T rows of one sequence, whose last K - 1 are the state that the next call begins
// with. Rows of a batch are numbered through, so that a single sequence is split over time.
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"

namespace omniattn {

struct CausalConv {
  DType dtype;
  bool silu;
  int64_t batch, steps, channels, taps;              // B, T, D, K
  const void* x;                                     // (B, T, D)
  const void* before;                                // (B, K - 1, D)
  const void* weight;                                // (K, D) contiguous
  const void* bias;                                  // (D)
  int64_t x_batch, x_row, before_batch, before_row;  // elements between them
};

struct CausalConvParams {
  CausalConv conv;
  void* y;            // (B, T, D) contiguous
  void* final_state;  // (B, K - 1, D) contiguous
};

struct CausalConvBackwardParams {
  CausalConv conv;
  const void* grad_y;      // (B, T, D)
  const void* grad_final;  // (B, K - 1, D) contiguous, or null
  void* dx;                // (B, T, D) contiguous
  void* dbefore;           // (B, K - 1, D) contiguous, or null
  int64_t grad_y_batch, grad_y_row;
};
static_assert(std::is_trivially_copyable_v<CausalConvParams>);
static_assert(std::is_trivially_copyable_v<CausalConvBackwardParams>);

struct CausalConvKernels {
  // Item b T + t is the result of step t of sequence b.
  void (*forward)(const CausalConvParams&, int64_t begin, int64_t end);
  // Item b (K - 1 + T) + i is the gradient of row i of sequence b, and step i in dweight and dbias.
  // Those, (K, D) and (D) in the accumulator type or null, are added to; `memory` holds (K - 1) D.
  void (*backward)(const CausalConvBackwardParams&, void* dweight, void* dbias, void* memory,
                   int64_t begin, int64_t end);
};

OMNIATTN_KERNEL_TABLE(CausalConvKernels, causal_conv_kernels)

}  // namespace omniattn
