// Inputs of the recurrence that computes Mamba-3 (Lahoti et al. 2026, arXiv 2603.15569), forward
// and backward. For each sequence and head, with l_t = sigmoid(trap_t) and 0 after a last token:
//
//   theta_t = theta_{t-1} + pi tanh(angles_t) dt_t mod 2 pi
//   queries_{t,r} = R(theta_t) (q_{t,r} + q_bias_r)      keys_{t,r} alike
//   own_t = l_t dt_t      following_t = (1 - l_{t+1}) dt_{t+1}      weights_t = own_t + following_t
//   reads_{t,r,s} = queries_{t,r} . keys_{t,s} (s > r ? own_t : -following_t)
//
// The recurrence writes the R inputs of a token one after the other, with the factors of the token
// and of the next: its output r lacks the inputs after r and has the factors of the next token in
// the others, which is what reads adds to it. Angles are summed in fp64.
#pragma once

#include <type_traits>

#include "kernels/recurrence/recurrence.h"
#include "kernels/scan/scan.h"

namespace omniattn {

// A tensor (B, T, R, G, N) with unit stride over N.
struct RankView {
  const void* data;
  int64_t batch, step, rank, group;  // elements between batch entries, tokens, inputs and groups
};

// Arguments of forward and backward. A is the accumulator type of dtype.
struct Mamba3 {
  DType dtype;  // of q and k
  ScanRows rows;
  int64_t rank, groups, heads, width, pairs;  // R, G, H, N, number of rotated pairs
  int64_t block;                              // heads per item
  bool interleaved;                           // pairs (2 i, 2 i + 1); else (i, i + N / 2)
  RankView q, k;
  StepView angles;              // (B, T, H, pairs) of A
  const void *dt, *trap;        // (B, T, H) of A
  const void *q_bias, *k_bias;  // (H, R, N) of A
  const void* initial_state;    // theta (S, H, pairs) of A, or null for zeros

  OMNIATTN_FN int64_t items() const { return rows.sequences * ceil_div(heads, block); }
  OMNIATTN_FN int64_t group_heads() const { return groups > 0 ? heads / groups : 1; }
};

// All results are contiguous, of A.
struct Mamba3Params {
  Mamba3 problem;
  void *queries, *keys;  // (B, T, R, H, N)
  void* weights;         // (B, T, H)
  void* reads;           // (B, T, R, H, R)
  void* phases;          // theta (B, T, H, pairs)
};

struct Mamba3BackwardParams {
  Mamba3 problem;
  const void* phases;
  // Gradients of the forward's results, null for zeros.
  const void *grad_queries, *grad_keys, *grad_weights, *grad_reads, *grad_phases;
  DType row_dtype;          // of dq and dk
  void *dq, *dk;            // (H / G, B, T, R, G, N), a part for each head of a group
  void *ddt, *dtrap;        // (B, T, H) of A
  void *dq_bias, *dk_bias;  // (S, H, R, N) of A, a part for each sequence
  void* dangles;            // (B, T, H, pairs) of A
  void* dinitial_state;     // (S, H, pairs) of A, or null
};
static_assert(std::is_trivially_copyable_v<Mamba3Params>);
static_assert(std::is_trivially_copyable_v<Mamba3BackwardParams>);

struct Mamba3Kernels {
  // Item n ceil(H / block) + i is block i of the heads of sequence n. `memory` has the bytes of the
  // pass.
  int64_t (*bytes)(const Mamba3&);
  void (*forward)(const Mamba3Params&, void* memory, int64_t begin, int64_t end);
  int64_t (*backward_bytes)(const Mamba3&);
  void (*backward)(const Mamba3BackwardParams&, void* memory, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(Mamba3Kernels, mamba3_kernels)

}  // namespace omniattn
