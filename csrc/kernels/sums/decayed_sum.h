// Sums of decayed products over the tokens of each sequence and value head, the states of plain
// recurrences (recurrence.h) without their outputs. With w_t = exp(g_t) and x_t = exp(gv_t),
//
//   S = sum_t diag(a_t) phi(k_t) (beta_t v_t)^T diag(b_t)
//
// where a_t and b_t are the products of w and x over the tokens after t. With from_start these are
// the tokens from the first one through t, or with before_own through the one before t: so the
// gradient of an initial state is the sum for q and the gradient of the outputs. The products over
// all tokens are results, too.
//
// A head goes through its tokens from the end that no decay precedes, with products a and b so far,
// so that its sum never decays. Once a product is 0 in all channels, earlier (later) tokens are not
// read.
#pragma once

#include <type_traits>

#include "kernels/recurrence/recurrence.h"

namespace omniattn {

// A is the accumulator type of dtype.
struct DecayedSum {
  DType dtype;         // of k
  DType v_dtype;       // dtype, or the dtype of A
  bool channel_decay;  // true: g is (B, T, Hv, K), false: (B, T, Hv, 1)
  bool from_start, before_own;
  int64_t batch, steps;                                    // B, T
  int64_t key_heads, value_heads, key_width, value_width;  // Hk, Hv, K, V
  StepView k;                                              // (B, T, Hk, K)
  StepView v;                                              // (B, T, Hv, V)
  StepView g, beta;                                        // of A; absent: no decay, ones
  StepView gv;                                             // (B, T, Hv, V) of A, or absent
  FeatureMap features;                                     // of k
  int64_t heads;                                           // value heads per item

  OMNIATTN_FN int64_t items() const { return batch * ceil_div(value_heads, heads); }
};

struct DecayedSumParams {
  DecayedSum problem;
  void* sum;          // (B, Hv, K, V) of A contiguous
  void* decay;        // (B, Hv, K) of A contiguous
  void* value_decay;  // (B, Hv, V) of A contiguous if there is a gv
};
static_assert(std::is_trivially_copyable_v<DecayedSumParams>);

struct DecayedSumKernels {
  // Item b ceil(Hv / heads) + i is part i of the value heads of batch entry b.
  int64_t (*bytes)(const DecayedSum&);
  void (*run)(const DecayedSumParams&, void* memory, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(DecayedSumKernels, decayed_sum_kernels)

}  // namespace omniattn
