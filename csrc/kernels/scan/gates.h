// Gates of mLSTM (and of any recurrence with exponential input gates) over time, stabilised. For
// each channel, with g_t the logarithm of the forget gate and i_t that of the input gate,
//
//   m_t = max(g_t + m_{t-1}, i_t)      decay_t = g_t + m_{t-1} - m_t      factor_t = e^(i_t - m_t)
//
// so that decay <= 0 and factor <= 1. The gradient of the maximum goes to the larger of the two; if
// they are equal, half of it to each.
#pragma once

#include <type_traits>

#include "kernels/scan/scan.h"
#include "runtime/cpu_isa.h"
#include "runtime/stream.h"

namespace omniattn {

// All tensors are of dtype, f32 or f64.
struct Gates {
  DType dtype;
  ScanRows rows;
  int64_t channels;           // C
  int64_t block;              // channels per item, on the CPU
  ScanView g, i;              // (B, T, C)
  const void* initial_state;  // (N, C) contiguous, or null for zeros
};

struct GatesParams {
  Gates gates;
  void *decay, *factor, *m;  // (B, T, C) contiguous
  void* final_state;         // (N, C)
};

struct GatesBackwardParams {
  Gates gates;
  ScanView decay, factor;                    // from the forward
  ScanView grad_decay, grad_factor, grad_m;  // (B, T, C)
  const void* grad_final_state;              // (N, C) contiguous, or null
  void *dg, *di;                             // (B, T, C) contiguous
  void* dinitial_state;                      // (N, C)
};
static_assert(std::is_trivially_copyable_v<GatesParams>);
static_assert(std::is_trivially_copyable_v<GatesBackwardParams>);

struct GatesKernels {
  // Item n ceil(C / block) + i is block i of the channels of sequence n.
  void (*forward)(const GatesParams&, void*, int64_t begin, int64_t end);
  void (*backward)(const GatesBackwardParams&, void*, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(GatesKernels, gates_kernels)

Status launch_gates(const GatesParams& p, Stream stream);
Status launch_gates_backward(const GatesBackwardParams& p, Stream stream);

}  // namespace omniattn
