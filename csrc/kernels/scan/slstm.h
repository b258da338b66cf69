// The cell of sLSTM over time, forward and backward. For each head, with raw gates (i, f, z, o)_t =
// x_t + R h_{t-1}, ln F = ln sigmoid(f) or f, and m_t = max(ln F + m_{t-1}, i):
//
//   i' = e^(i - m_t)      f' = e^(ln F + m_{t-1} - m_t)
//   c_t = f' c_{t-1} + i' tanh(z)      n_t = f' n_{t-1} + i'      h_t = sigmoid(o) c_t / n_t
//
// The arithmetic is in scan_rules.h. The forward keeps a trace of each step for the backward: i',
// f', tanh(z), sigmoid(o), c, n and the derivative of ln F.
#pragma once

#include <type_traits>

#include "kernels/scan/scan.h"
#include "runtime/cpu_isa.h"
#include "runtime/stream.h"

namespace omniattn {

// A is the accumulator type of dtype.
struct Slstm {
  DType dtype;  // of x, r, y and their gradients
  bool exp_forget;
  ScanRows rows;
  int64_t heads, width;  // H, D
  ScanView x;            // (B, T, 4, H, D), gates i, f, z, o
  const void* r;         // (4, H, D, D) contiguous: from h of the row to the gate of the column
  const void* initial_state;  // (N, 4, H, D) of A contiguous, h, c, n, m; or null for zeros
};

inline constexpr int64_t kSlstmTrace = 7;

struct SlstmParams {
  Slstm slstm;
  void* y;            // (B, T, H, D) contiguous
  void* final_state;  // (N, 4, H, D) of A
  void* trace;        // (B, T, 7, H, D) of A, or null
};

struct SlstmBackwardParams {
  Slstm slstm;
  ScanView grad_y;               // (B, T, H, D)
  const void* grad_final_state;  // (N, 4, H, D) of A contiguous, or null
  const void* trace;             // from the forward
  void* dx;                      // (B, T, 4, H, D) contiguous
  void* dr;                      // on the CPU (slstm_groups, 4, H, D, D) of A, to be summed
                                 // later; on CUDA (4, H, D, D); or null
  void* dinitial_state;          // (N, 4, H, D) of A
};
static_assert(std::is_trivially_copyable_v<SlstmParams>);
static_assert(std::is_trivially_copyable_v<SlstmBackwardParams>);

// Number of sequences whose products with R form one matrix product, on the CPU.
inline constexpr int64_t kSlstmGroup = 8;
OMNIATTN_FN int64_t slstm_groups(const ScanRows& p) { return ceil_div(p.sequences, kSlstmGroup); }

struct SlstmKernels {
  // Item g H + h is head h of group g of sequences. `memory` has bytes() or backward_bytes() bytes.
  int64_t (*bytes)(const Slstm&);
  void (*forward)(const SlstmParams&, void* memory, int64_t begin, int64_t end);
  int64_t (*backward_bytes)(const Slstm&);
  void (*backward)(const SlstmBackwardParams&, void* memory, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(SlstmKernels, slstm_kernels)

// On CUDA: number of elements of A that a backward needs as working memory.
int64_t slstm_backward_elements(const Slstm& p);
Status launch_slstm(const SlstmParams& p, Stream stream);
Status launch_slstm_backward(const SlstmBackwardParams& p, void* memory, Stream stream);

}  // namespace omniattn
