// Causal depthwise convolution over time, forward and backward.
//
//   s[t] = bias + sum_k weight[k] x[t + k - (K - 1)]      y = act(s), act = silu or none
//
// The inputs that precede x are the rows `before`: inputs of an earlier call, or zeros. With
// g[t] = dy[t] act'(s[t]), where s is computed again and g = 0 outside of [0, T):
//
//   dx[t] = sum_k weight[k] g[t + (K - 1) - k]      dweight[k] = sum_t g[t] x[t + k - (K - 1)]
//
// Channels map to the lanes of vectors and to the threads of warps. On both devices `before` and x
// are the K - 1 + T rows of one sequence, whose last K - 1 are the state for the next call. Rows
// are numbered over the whole batch, so that even a single sequence is split over time.
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"
#include "runtime/stream.h"

namespace omniattn {

struct CausalConv {
  DType dtype;
  bool silu;
  int64_t batch, steps, channels, taps;              // B, T, D, K
  const void* x;                                     // (B, T, D)
  const void* before;                                // (B, K - 1, D)
  const void* weight;                                // (K, D) contiguous
  const void* bias;                                  // (D)
  int64_t x_batch, x_row, before_batch, before_row;  // elements between batch entries and rows
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
  // Item b (K - 1 + T) + i is the gradient of row i of sequence b, and the part of step i in
  // dweight and dbias. These, (K, D) and (D) in the accumulator type or null, are added to.
  // `memory` has (K - 1) D elements.
  void (*backward)(const CausalConvBackwardParams&, void* dweight, void* dbias, void* memory,
                   int64_t begin, int64_t end);
};

OMNIATTN_KERNEL_TABLE(CausalConvKernels, causal_conv_kernels)

Status launch_causal_conv(const CausalConvParams& p, Stream stream);

// The number of partial sums of dweight and dbias in the backward; depends on the shape only.
int64_t causal_conv_shards(const CausalConv& p);

struct CausalConvScratch {
  void* g;        // (B, T, D) in the accumulator type, see conv.h
  void* partial;  // (shards, K + 1, D) in the accumulator type
};

// dweight: (K, D), dbias: (D), or null.
Status launch_causal_conv_backward(const CausalConvBackwardParams& p,
                                   const CausalConvScratch& scratch, void* dweight, void* dbias,
                                   Stream stream);

}  // namespace omniattn
