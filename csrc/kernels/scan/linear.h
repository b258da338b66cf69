// A linear recurrence over time with one state per channel, forward and backward:
//
//   h_t = e^(g_t) h_{t-1} + x_t
//
// g <= 0 are logarithms of decays. The arithmetic is in scan_rules.h. A sequence with few channels
// is not split over time, see wkv.h.
#pragma once

#include <type_traits>

#include "kernels/scan/scan.h"
#include "runtime/cpu_isa.h"
#include "runtime/stream.h"

namespace omniattn {

// Arguments of forward and backward. A is the accumulator type of dtype.
struct LinearScan {
  DType dtype;  // of x, y and their gradients
  ScanRows rows;
  int64_t channels;           // C
  int64_t block;              // channels per item, on the CPU
  ScanView x;                 // (B, T, C)
  ScanView g;                 // (B, T, C) of A
  const void* initial_state;  // (N, C) of A contiguous, or null for zeros
};

struct LinearScanParams {
  LinearScan scan;
  void* y;            // (B, T, C) contiguous: h
  void* final_state;  // (N, C) of A
  void* states;       // (scan_slots, C) of A, or null: h before each chunk
};

struct LinearScanBackwardParams {
  LinearScan scan;
  ScanView grad_y;
  const void* grad_final_state;  // (N, C) of A contiguous, or null
  const void* states;            // from the forward
  void* dx;                      // (B, T, C) contiguous
  void* dg;                      // (B, T, C) of A contiguous, or null: then states are not read
  void* dinitial_state;          // (N, C) of A, or null
};
static_assert(std::is_trivially_copyable_v<LinearScanParams>);
static_assert(std::is_trivially_copyable_v<LinearScanBackwardParams>);

struct LinearScanKernels {
  // Item n ceil(C / block) + i is block i of the channels of sequence n. `memory` has bytes(scan).
  int64_t (*bytes)(const LinearScan&);
  void (*forward)(const LinearScanParams&, void* memory, int64_t begin, int64_t end);
  int64_t (*backward_bytes)(const LinearScan&);
  void (*backward)(const LinearScanBackwardParams&, void* memory, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(LinearScanKernels, linear_scan_kernels)

// On CUDA: number of elements of A that a backward needs as working memory.
int64_t linear_scan_backward_elements(const LinearScan& p);
Status launch_linear_scan(const LinearScanParams& p, Stream stream);
Status launch_linear_scan_backward(const LinearScanBackwardParams& p, void* memory, Stream stream);

}  // namespace omniattn
