// Linear models that are trained on past tokens, forward and backward: the state of TTT-Linear, of
// Titans and of ATLAS. For each sequence and head, with weights M and momentum S of shape (R, V), R
// = K, or R = K + 1 with a bias, whose q and k end with a 1, and q scaled by `scale`:
//
//   u_t = d/dz |f(z) - y_t|^2 / 2 at z = k_t N          y_t = v_t, or v_t - k_t with a residual
//   S_t = keep_t S_{t-1} + sum_j step_tj k_{t-j} u_{t-j}^T
//   M_t = gate_t M_{t-1} - share_t S_t                  o_t = q_t M_t
//   M_t = M_{t0} - gate_t S_t                           with descent
//
// f is the identity, or the norm w (z - mean) / deviation + b. N is M at the start t0 of the
// mini-batch of t, which begins at positions that are multiples of its size. With descent the
// momentum is 0 again after each mini-batch. The sum has a window of J tokens, 1 but for ATLAS; u
// of all of them is taken at the N of t.
//
// A chunk is a mini-batch, or up to 64 tokens of one, with the keys of the J - 1 tokens before it.
// Inside it u does not depend on u, so that with weights of pairs P, found from the gates by
// products only:
//
//   o = A q M + F' q S - (P o q k^T) u    M' = A_n M + F'_n S - (P_n k)^T u    S' = m_n S + ...
//
// The backward goes through the chunks in reverse; M and S at their starts are recomputed first, in
// the memory of an item.
#pragma once

#include <type_traits>

#include "kernels/recurrence/recurrence.h"

namespace omniattn {

// Arguments of forward and backward. A is the accumulator type of dtype.
struct FastWeights {
  DType dtype;        // of q, k, v and their gradients
  int64_t sequences;  // N: B, or the number of packed sequences
  int64_t steps;      // T: of each sequence, or of all packed sequences together
  int64_t longest;    // no sequence has more tokens
  int64_t heads, key_width, value_width;  // H, K, V
  int64_t mini_batch;                     // tokens whose u are taken at the same weights
  int64_t window;                         // J
  double eps, scale;                      // scale: factor of q, without the 1 of a bias
  bool descent, bias, residual;
  StepView q, k, v;            // (B, T, H, K) and (B, T, H, V)
  StepView step;               // (B, T, H, J) of A, unit stride; absent: 1, with J = 1
  StepView keep, gate, share;  // (B, T, H) of A; absent: 1
  const void *w, *b;           // (H, V) of A contiguous, or null without a norm
  // (N, H, R, V) of A contiguous: M and S, null for zeros, and N, null for M.
  const void *weights, *momentum, *anchor;
  // (N, J - 1, H, K or V) of A contiguous, of the tokens before the first ones; null for zeros.
  const void *keys, *values;
  const int64_t* positions;   // (N), tokens before the first ones; null: 0
  const int64_t* boundaries;  // null, or (N + 1): then B = 1 and sequence n has the rows
                              // boundaries[n] .. boundaries[n + 1]

  OMNIATTN_FN int64_t held() const { return window - 1; }
  OMNIATTN_FN int64_t rows() const { return key_width + bias; }
  OMNIATTN_FN int64_t items() const { return sequences * heads; }
};

struct FastWeightsParams {
  FastWeights problem;
  void* o;  // (B, T, H, V) of dtype, contiguous
  void *final_weights, *final_momentum, *final_anchor;
  void *final_keys, *final_values;  // null for J = 1
};

// Gradients are contiguous and have the shapes of the tensors whose gradients they are; those of
// absent tensors and of unwanted states are null.
struct FastWeightsBackwardParams {
  FastWeights problem;
  StepView grad_o;                                         // or absent for zeros
  const void *grad_weights, *grad_momentum, *grad_anchor;  // or null for zeros
  const void *grad_keys, *grad_values;                     // or null for zeros
  void *dq, *dk, *dv;
  void *dstep, *dkeep, *dgate, *dshare;  // of A
  void *dw, *db;                         // (N, H, V) of A, of each sequence
  void *dweights, *dmomentum, *danchor, *dkeys, *dvalues;
};
static_assert(std::is_trivially_copyable_v<FastWeightsParams>);
static_assert(std::is_trivially_copyable_v<FastWeightsBackwardParams>);

struct FastWeightsKernels {
  // Item n H + h is head h of sequence n. `memory` has the bytes of the pass.
  int64_t (*bytes)(const FastWeights&);
  void (*forward)(const FastWeightsParams&, void* memory, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(FastWeightsKernels, fast_weights_kernels)

struct FastWeightsBackwardKernels {
  int64_t (*bytes)(const FastWeights&);
  void (*backward)(const FastWeightsBackwardParams&, void* memory, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(FastWeightsBackwardKernels, fast_weights_backward_kernels)

}  // namespace omniattn
