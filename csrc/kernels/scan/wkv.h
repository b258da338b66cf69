// The weighted mean of RWKV-4 over time, forward and backward. For each channel
//
//   y_t = (sum_{i<t} e^(k_i - (t-1-i) w) v_i + e^(u + k_t) v_t) / (the same without v)
//
// with w > 0. A state is the numerator and the denominator, both times e^-max, and max; before the
// first step it is (0, 0, -1e38). The arithmetic is in scan_rules.h.
//
// A sequence with few channels is not split over time. One vector takes as long for a step
// as each of several do, so a split only helps idle threads, and its first pass, which
// finds the states at the splits, adds half of the work. With 64 channels, the fewest of an
// item, the scan takes an eighth of its layer's time (2 threads, Emerald Rapids); a split
// would save at most a third of that.
#pragma once

#include <type_traits>

#include "kernels/scan/scan.h"
#include "runtime/cpu_isa.h"
#include "runtime/stream.h"

namespace omniattn {

// Arguments of forward and backward. A is the accumulator type of dtype.
struct Wkv {
  DType dtype;  // of k, v, y and their gradients
  ScanRows rows;
  int64_t channels;           // C
  int64_t block;              // channels per item, on the CPU
  const void *w, *u;          // (C) of A
  ScanView k, v;              // (B, T, C)
  const void* initial_state;  // (N, 3, C) of A contiguous, or null
};

struct WkvParams {
  Wkv wkv;
  void* y;            // (B, T, C) contiguous
  void* final_state;  // (N, 3, C) of A
  void* states;       // (scan_slots, 4, C) of A, or null: num, den, top, age before each chunk
};

struct WkvBackwardParams {
  Wkv wkv;
  ScanView grad_y;
  const void* grad_final_state;  // (N, 3, C) of A contiguous, or null
  const void* states;            // from the forward
  void *dk, *dv;                 // (B, T, C) contiguous
  void* partial;                 // (N, 2, C) of A: dw and du of each sequence
  void* dinitial_state;          // (N, 3, C) of A, or null
};
static_assert(std::is_trivially_copyable_v<WkvParams>);
static_assert(std::is_trivially_copyable_v<WkvBackwardParams>);

inline constexpr double kWkvEmpty = -1e38;

struct WkvKernels {
  // Item n ceil(C / block) + i is block i of the channels of sequence n. `memory` has bytes(wkv).
  int64_t (*bytes)(const Wkv&);
  void (*forward)(const WkvParams&, void* memory, int64_t begin, int64_t end);
  int64_t (*backward_bytes)(const Wkv&);
  void (*backward)(const WkvBackwardParams&, void* memory, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(WkvKernels, wkv_kernels)

// On CUDA: number of elements of A that a backward needs as working memory.
int64_t wkv_backward_elements(const Wkv& p);
Status launch_wkv(const WkvParams& p, Stream stream);
Status launch_wkv_backward(const WkvBackwardParams& p, void* memory, Stream stream);

}  // namespace omniattn
