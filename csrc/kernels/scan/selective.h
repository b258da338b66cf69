// The selective scan of Mamba, forward and backward. For each channel d of group g, with states n
// and dt = softplus(delta + delta_bias), or without softplus:
//
//   h_t[n] = e^(dt_t A[n]) h_{t-1}[n] + dt_t B_t[g, n] u_t
//   y_t = (sum_n C_t[g, n] h_t[n] + D u_t) silu(z_t)
//
// B and C may also be constants of each channel. The forward saves the states before each chunk of
// steps; the backward recomputes the others from them.
//
// Longhorn's rule has neither A nor softplus: with dt = 1 / (1 + |B_t|^2 + e^-(delta +
// delta_bias)), which is b / (1 + b |B_t|^2) for b = sigmoid(delta + delta_bias),
//
//   h_t[n] = (1 - dt_t B_t[g, n]^2) h_{t-1}[n] + dt_t B_t[g, n] u_t
//
// States may be paired: states 2 n and 2 n + 1, and their entries of A, are then the real and the
// imaginary part of one complex number, and e^(dt A) h is a complex product. For a complex scan, y
// = 2 Re sum_n C h, the caller passes the parts of B and of 2 conj(C).
#pragma once

#include <type_traits>

#include "kernels/scan/scan.h"
#include "runtime/cpu_isa.h"
#include "runtime/stream.h"

namespace omniattn {

// B or C: rows (G, N) for each step, in T, or in A if states are paired; or a
// constant (D, N) in A for all steps, which Longhorn's rule does not take.
struct SelectiveWeights {
  ScanView rows;
  bool constant;
};

enum class SelectiveRule : int { decay, pairs, longhorn };

// Arguments of forward and backward. A is the accumulator type of dtype.
struct Selective {
  DType dtype;  // of u, delta, z, y, of time-varying B and C, and of their gradients
  bool softplus;
  SelectiveRule rule;
  ScanRows rows;
  int64_t channels, groups, states;  // D, G, N; N is even for pairs
  int64_t block;                     // channels per item; an item lies in one group
  ScanView u, delta, z;              // (B, T, D); z may be null
  const void* decay;                 // A: (D, N) of A contiguous; null for Longhorn's rule
  SelectiveWeights b, c;
  const void *skip, *bias;    // D and delta_bias: (D) of A, or null
  const void* initial_state;  // (N, D, N) of A contiguous, or null

  OMNIATTN_FN int64_t group_channels() const { return groups > 0 ? channels / groups : 0; }
  OMNIATTN_FN int64_t blocks() const { return ceil_div(group_channels(), block); }
  OMNIATTN_FN int64_t items() const { return rows.sequences * groups * blocks(); }
};

struct SelectiveParams {
  Selective scan;
  void* y;            // (B, T, D) contiguous
  void* final_state;  // (N, D, N) of A
  void* states;       // (scan_slots, N, D) of A: states before each chunk; or null
};

// Rows of the partial sums of each sequence, (N, rows, D) of A: N of dA, one of dD, one of
// ddelta_bias, and N of dB and N of dC if these are constant.
inline constexpr int64_t kSelectiveVectors = 2;
OMNIATTN_FN int64_t selective_rows(const Selective& p) {
  return p.states * (1 + p.b.constant + p.c.constant) + kSelectiveVectors;
}
OMNIATTN_FN int64_t selective_row_of_b(const Selective& p) { return p.states + kSelectiveVectors; }
OMNIATTN_FN int64_t selective_row_of_c(const Selective& p) {
  return p.states * (1 + p.b.constant) + kSelectiveVectors;
}

struct SelectiveBackwardParams {
  Selective scan;
  ScanView grad_y;
  const void* grad_final_state;  // (N, D, N) of A contiguous, or null
  const void* states;            // from the forward
  void *du, *ddelta, *dz;        // (B, T, D) contiguous; dz may be null
  void *db, *dc;                 // (blocks, B, T, G, N) of A, to be summed
                                 // later; null if B or C is constant
  void* partial;                 // (N, selective_rows, D) of A
  void* dinitial_state;          // (N, D, N) of A
};
static_assert(std::is_trivially_copyable_v<SelectiveParams>);
static_assert(std::is_trivially_copyable_v<SelectiveBackwardParams>);

// An item: block k of the channels of group g of sequence n.
struct SelectiveItem {
  int64_t sequence, group, block, first, width;
  ScanSequence s;
};
OMNIATTN_FN SelectiveItem selective_item(const Selective& p, int64_t item) {
  const int64_t blocks = p.blocks(), of_group = p.group_channels(), k = item % blocks;
  const int64_t group = item / blocks % p.groups, n = item / blocks / p.groups;
  return {.sequence = n,
          .group = group,
          .block = k,
          .first = group * of_group + k * p.block,
          .width = smaller(p.block, of_group - k * p.block),
          .s = scan_sequence(p.rows, n)};
}

// Kernels over the items of a scan; `memory` has bytes(scan) bytes.
struct SelectiveKernels {
  int64_t (*bytes)(const Selective&);
  void (*forward)(const SelectiveParams&, void* memory, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(SelectiveKernels, selective_kernels)

struct SelectiveBackwardKernels {
  int64_t (*bytes)(const Selective&);
  void (*backward)(const SelectiveBackwardParams&, void* memory, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(SelectiveBackwardKernels, selective_backward_kernels)

// On CUDA: channels per item, the largest number of states, and the number of elements of A that a
// backward needs as working memory.
inline constexpr int64_t kSelectiveThreads = 64, kSelectiveStates = 256;
int64_t selective_backward_elements(const Selective& p);
Status launch_selective(const SelectiveParams& p, Stream stream);
Status launch_selective_backward(const SelectiveBackwardParams& p, void* memory, Stream stream);

}  // namespace omniattn
