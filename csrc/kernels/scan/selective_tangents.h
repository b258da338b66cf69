// Tangents of the selective scan (selective.h) and of its gradients on the CPU. The scan has real
// states, B and C that vary over time, no softplus, D, z or delta_bias, and all tensors are in the
// compute type.
#pragma once

#include "kernels/scan/selective.h"

namespace omniattn {

struct SelectiveTangentParams {
  Selective scan;
  // Tangents of the inputs; moved_initial_state may be null: 0.
  ScanView moved_u, moved_delta, moved_b, moved_c;
  const void *moved_decay, *moved_initial_state;
  // Gradients of y (B, T, D) and of the final states (N, D, N), and their tangents. Without grad_y
  // no gradient is wanted; gradients of the states may be null: 0.
  ScanView grad_y, moved_grad_y;
  const void *grad_final_state, *moved_grad_final_state;
  // Results: tangents of y and the final states, and of the gradients.
  void *moved_y, *moved_final_state;
  void *moved_du, *moved_ddelta;  // (B, T, D)
  void *moved_db, *moved_dc;      // (blocks, B, T, G, N), to be summed later
  void* moved_ddecay;             // (N, D, N), one part for each sequence
  void* moved_dinitial_state;     // (N, D, N)
};
static_assert(std::is_trivially_copyable_v<SelectiveTangentParams>);

OMNIATTN_FN bool has_gradients(const SelectiveTangentParams& x) { return x.grad_y.data != nullptr; }

// Kernels over the items of a scan; `memory` has bytes(params) bytes.
struct SelectiveTangentKernels {
  int64_t (*bytes)(const SelectiveTangentParams&);
  void (*tangents)(const SelectiveTangentParams&, void* memory, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(SelectiveTangentKernels, selective_tangent_kernels)

}  // namespace omniattn
