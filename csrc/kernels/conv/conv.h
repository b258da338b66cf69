// Causal depthwise convolution over time, forward and backward.
//
//   s[t] = bias + sum_k weight[k] x[t + k - (K - 1)]      y = act(s), act = silu or none
//
// The inputs that precede x are the rows `before`: inputs of an earlier call, or zeros. With
// g[t] = dy[t] act'(s[t]), where s is recomputed and g = 0 outside [0, T):
//
//   dx[t] = sum_k weight[k] g[t + (K - 1) - k]      dweight[k] = sum_t g[t] x[t + k - (K - 1)]
//
// Channels map to the lanes of vectors and to the threads of warps. On both devices `before` and x
// form the K - 1 + T rows of a sequence, the last K - 1 of which are the state for the next call.
// Rows are numbered over all sequences, so that even a single sequence is split over time.
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"
#include "runtime/stream.h"
#include "semantics/macros.h"

namespace omniattn {

struct CausalConv {
  DType dtype;
  bool silu;
  int64_t sequences;              // N: B, or the number of packed sequences
  int64_t steps, channels, taps;  // T of each sequence, or of all packed sequences together; D, K
  const void* x;                  // (B, T, D)
  const void* before;             // (N, K - 1, D)
  const void* weight;             // (K, D) contiguous
  const void* bias;               // (D)
  int64_t x_batch, x_row, before_batch, before_row;  // elements between batch entries and rows
  const int64_t* boundaries;  // null, or (N + 1): then B = 1 and sequence n has the rows
                              // boundaries[n] .. boundaries[n + 1]
};

OMNIATTN_FN int64_t conv_rows(const CausalConv& p) {
  return p.boundaries != nullptr ? p.steps : p.sequences * p.steps;
}

// A sequence: its number, its first row over all batch entries, and its number of steps.
struct ConvSequence {
  int64_t n, first, steps;
  int64_t batch, row;  // batch entry, and first row in that entry
};
OMNIATTN_FN ConvSequence conv_sequence(const CausalConv& p, int64_t n) {
  if (p.boundaries == nullptr) return {n, n * p.steps, p.steps, n, 0};
  const int64_t begin = p.boundaries[n];
  return {n, begin, p.boundaries[n + 1] - begin, 0, begin};
}

// Every row of a batch is an item, and each sequence has `extra` items before its own.
OMNIATTN_FN int64_t first_item(const ConvSequence& s, int64_t extra) {
  return s.first + s.n * extra;
}
// Last sequence that begins at or before an item; 0 if there is none.
OMNIATTN_FN int64_t conv_sequence_of(const CausalConv& p, int64_t item, int64_t extra) {
  if (p.boundaries == nullptr) return item / (p.steps + extra);
  int64_t n = 0;
  for (int64_t end = p.sequences; end - n > 1;) {
    const int64_t middle = (n + end) / 2;
    (p.boundaries[middle] + middle * extra <= item ? n : end) = middle;
  }
  return n;
}

struct CausalConvParams {
  CausalConv conv;
  void* y;            // (B, T, D) contiguous
  bool past_caches;   // y is too large for the caches
  void* final_state;  // (N, K - 1, D) contiguous
};

// One token; shifts the inputs of earlier tokens in place.
struct CausalConvStep {
  DType dtype;
  bool silu;
  int64_t batch, channels, taps, kept;  // B, D, K, and W >= K - 1, the number of last inputs kept
  const void* x;                        // (B, D)
  int64_t x_batch;
  void* before;  // (B, D, W), with any strides
  int64_t before_batch, before_channel, before_tap;
  const void* weight;  // (D, K), with any strides
  int64_t weight_channel, weight_tap;
  const void* bias;  // (D), or null
  void* y;           // (B, D)
};

struct CausalConvBackwardParams {
  CausalConv conv;
  const void* grad_y;      // (B, T, D)
  const void* grad_final;  // (N, K - 1, D) contiguous, or null
  void* dx;                // (B, T, D) contiguous
  bool past_caches;        // dx is too large for the caches
  void* dbefore;           // (N, K - 1, D) contiguous, or null
  int64_t grad_y_batch, grad_y_row;
};
static_assert(std::is_trivially_copyable_v<CausalConvParams>);
static_assert(std::is_trivially_copyable_v<CausalConvBackwardParams>);
static_assert(std::is_trivially_copyable_v<CausalConvStep>);

struct CausalConvKernels {
  // An item is a row of y.
  void (*forward)(const CausalConvParams&, int64_t begin, int64_t end);
  // An item is a row of `before` or of x: it computes the gradient of that row, and a step's share
  // of dweight and dbias. Rows of a sequence are adjacent items. dweight (K, D) and dbias (D), in
  // the accumulator type or null, are added to. `memory` has (K - 1) D elements.
  void (*backward)(const CausalConvBackwardParams&, void* dweight, void* dbias, void* memory,
                   int64_t begin, int64_t end);
};

OMNIATTN_KERNEL_TABLE(CausalConvKernels, causal_conv_kernels)

struct CausalConvStepKernels {
  void (*run)(const CausalConvStep&, int64_t begin, int64_t end);  // an item is a batch entry
};
OMNIATTN_KERNEL_TABLE(CausalConvStepKernels, causal_conv_step_kernels)

Status launch_causal_conv(const CausalConvParams& p, Stream stream);

// Number of partial sums of dweight and dbias in the backward; depends on the shape only.
int64_t causal_conv_shards(const CausalConv& p);

struct CausalConvScratch {
  void* g;        // (B, T, D) in the accumulator type, see conv.h
  void* partial;  // (shards, K + 1, D) in the accumulator type
};

// dweight (K, D) and dbias (D), or null.
Status launch_causal_conv_backward(const CausalConvBackwardParams& p,
                                   const CausalConvScratch& scratch, void* dweight, void* dbias,
                                   Stream stream);

}  // namespace omniattn
