// Where the sequences of a call lie in its tensors. csrc/ops resolves a layout: kernels get one
// problem per sequence, each with lengths of its own.
#pragma once

#include <cstdint>

#include "semantics/macros.h"

namespace omniattn {

// A layout is encoded in place of the first mask rule; the numbers are none of MaskKind's.
enum class LayoutKind : int32_t {
  packed = 13,  // B = 1; sequence n has the rows cu_q[n] .. cu_q[n + 1] of q, at most a, and the
                // rows cu_k[n] .. cu_k[n + 1] of k and v, at most b
  cached = 14,  // sequence n has the first lengths[n] rows of k and v
  paged = 15,   // the same of pages of k and v; row n of a table lists those of sequence n
};

OMNIATTN_FN bool is_layout(int64_t code) {
  return code >= static_cast<int64_t>(LayoutKind::packed) &&
         code <= static_cast<int64_t>(LayoutKind::paged);
}

}  // namespace omniattn
