// GLU family (Shazeer 2020, arXiv 2002.05202): y = act(gate) * up, forward and backward.
//
//   dgate = dy * up * act'(gate)      dup = dy * act(gate)
//
// Without up (null) y = act(gate) and dgate = dy * act'(gate). Gradients may overwrite dy. The
// backward recomputes act from the gate, so that only the inputs are saved. Gate and up are two
// tensors or the two halves of one packed row; only their strides differ. A work item is a block of
// kGluBlock columns of one row.
//
// Clamped (gpt-oss, arXiv 2508.10925): y = g sigmoid(alpha g) (u + 1), g = min(gate, limit), u = up
// within [-limit, limit]; a clamped input has no gradient.
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"
#include "runtime/stream.h"
#include "semantics/activation_rules.h"

namespace omniattn {

inline constexpr int64_t kGluBlock = 4096;

struct GluParams {
  DType dtype;
  Activation act;  // used unless clamped
  Clamp clamp;     // requires up
  int64_t cols;
  const void *gate, *up;            // (rows, cols); up may be null
  void* y;                          // (rows, cols)
  int64_t gate_row, up_row, y_row;  // elements between rows
};

struct GluBackwardParams {
  DType dtype;
  Activation act;
  Clamp clamp;
  int64_t cols;
  const void *grad_y, *gate, *up;  // (rows, cols); up may be null
  void *dgate, *dup;               // (rows, cols); dup is null without up
  int64_t grad_y_row, gate_row, up_row, dgate_row, dup_row;
};
static_assert(std::is_trivially_copyable_v<GluParams>);
static_assert(std::is_trivially_copyable_v<GluBackwardParams>);

struct ActivationKernels {
  // Item i is block i % blocks of row i / blocks, with blocks = ceil(cols / kGluBlock).
  void (*glu)(const GluParams&, int64_t begin, int64_t end);
  void (*glu_backward)(const GluBackwardParams&, int64_t begin, int64_t end);
};

OMNIATTN_KERNEL_TABLE(ActivationKernels, activation_kernels)

Status launch_glu(const GluParams& p, int64_t rows, Stream stream);
Status launch_glu_backward(const GluBackwardParams& p, int64_t rows, Stream stream);

}  // namespace omniattn
