// Log-linear attention, forward and backward: linear attention whose queries weigh the blocks of a
// Fenwick tree. For each sequence and value head, with w_t = exp(g_t) and positions i, j:
//
//   o_i = sum_{j <= i} s_i[l(i, j)] w_{j+1} .. w_i (q_i . k_j) v_j
//
// where the level l(i, j) is the number of bits of i xor j (Guo et al. 2025, arXiv 2506.04761).
// At position t, slot b of a state is the matrix S = sum_j w_{j+1} .. w_{t-1} k_j v_j^T of the
// block of 2^b tokens that bit b of t names; a query reads it with scale s[b + 1].
//
// A sequence is split into chunks of 2^a <= 64 tokens, whose positions are multiples of 2^a. A
// chunk reads the slots of its position, all from a on, and its own tokens by a matrix of weights.
// Then its sum of k v^T joins the slots from a to below the lowest bit that is 0, and becomes the
// slot of that bit. So a state at any position is a state between chunks. Value head h reads key
// head h / (Hv / Hk).
//
// The backward goes through the chunks in reverse with the gradients of the slots; the states of
// all chunks, T K V / 64 elements, are recomputed first, in the memory of an item. Every factor of
// a decay is a product of w's, never the exponential of a difference of sums.
#pragma once

#include <type_traits>

#include "kernels/recurrence/recurrence.h"

namespace omniattn {

// Arguments of forward and backward. A is the accumulator type of dtype.
struct LogLinear {
  DType dtype;        // of q, k, v and their gradients
  int64_t sequences;  // N: B, or the number of packed sequences
  int64_t steps;      // T: of each sequence, or of all packed sequences together
  int64_t longest;    // no sequence has more tokens
  int64_t key_heads, value_heads, key_width, value_width, levels;  // Hk, Hv, K, V, L
  StepView q, k;                                                   // (B, T, Hk, K)
  StepView v;                                                      // (B, T, Hv, V)
  StepView g;                                                      // (B, T, Hv) of A
  StepView scales;                                                 // (B, T, Hv, L) of A
  const void* initial_state;  // (N, Hv, L, K, V) of A contiguous, or null without tokens
  const int64_t* positions;   // (N), tokens in the initial states; null: 0
  const int64_t* boundaries;  // null, or (N + 1): then B = 1 and sequence n has the rows
                              // boundaries[n] .. boundaries[n + 1]

  OMNIATTN_FN int64_t items() const { return sequences * value_heads; }
};

struct LogLinearParams {
  LogLinear problem;
  void* o;            // (B, T, Hv, V) contiguous
  void* final_state;  // (N, Hv, L, K, V) of A contiguous
};

// Gradients are contiguous and have the shapes of the tensors whose gradients they are. If key
// heads have several value heads, dq and dk are of A and hold the gradients of each, (Hv / Hk, B,
// T, Hk, K).
struct LogLinearBackwardParams {
  LogLinear problem;
  StepView grad_o;               // (B, T, Hv, V), or absent for zeros
  const void* grad_final_state;  // as initial_state, or null for zeros
  void *dq, *dk, *dv;
  void *dg, *dscales;    // of A
  void* dinitial_state;  // of A, or null
};
static_assert(std::is_trivially_copyable_v<LogLinearParams>);
static_assert(std::is_trivially_copyable_v<LogLinearBackwardParams>);

struct LogLinearKernels {
  // Item n Hv + h is value head h of sequence n. `memory` has the bytes of the pass.
  int64_t (*bytes)(const LogLinear&);
  void (*forward)(const LogLinearParams&, void* memory, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(LogLinearKernels, log_linear_kernels)

struct LogLinearBackwardKernels {
  int64_t (*bytes)(const LogLinear&);
  void (*backward)(const LogLinearBackwardParams&, void* memory, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(LogLinearBackwardKernels, log_linear_backward_kernels)

}  // namespace omniattn
