// Places of a call's sequences in its tensors. On the CPU csrc/ops turns a layout into one
// problem per sequence; CUDA kernels read SequenceRows.
#pragma once

#include <cstdint>

#include "semantics/macros.h"

namespace omniattn {

// A layout is encoded in place of the first mask rule; its numbers differ from those of MaskKind.
enum class LayoutKind : int32_t {
  packed = 13,  // B = 1; sequence n has the rows cu_q[n] .. cu_q[n + 1] of q, at most a, and the
                // rows cu_k[n] .. cu_k[n + 1] of k and v, at most b
  cached = 14,  // sequence n has the first lengths[n] rows of k and v
  paged = 15,   // as cached, in pages of k and v; row n of a table lists the pages of sequence n
};

// A call may be a part of a larger one. Its entries then come first, in place of a layout. Masks,
// side tensors, table term and dropout refer to the larger call, as does a bias whose size is not
// that of the part. merge_attention combines parts of the keys.
enum class PartKind : int32_t {
  queries = 17,  // q has the rows a .. a + Tq of b
  keys = 18,     // k and v have the rows a .. a + Tk of b; with dropout, a is a multiple of 4
};

OMNIATTN_FN bool is_part(int64_t code) {
  return code == static_cast<int64_t>(PartKind::queries) ||
         code == static_cast<int64_t>(PartKind::keys);
}

// Places of a batch's sequences, for CUDA kernels. Packed: sequence n has the rows
// q[n] .. q[n + 1] of q and k[n] .. k[n + 1] of k and v. Cached (q == nullptr): sequence n has
// entry n of q and the first k[n] rows of entry n of k and v. Plain (k == nullptr): an ordinary
// batch.
struct SequenceRows {
  const int64_t *q, *k;
  int64_t rows_q, rows_k;  // of the tensors; for a paged batch rows_k is the number of pages
};

// The pages of a paged batch. k and v are (pages, size, Hkv, D), and key t of batch entry b is row
// t % size of page table[b * stride_b + t / size].
struct PageView {
  const int64_t* table;  // null: k and v are (B, Tk, Hkv, D)
  int64_t stride_b, size;
};

OMNIATTN_FN bool is_layout(int64_t code) {
  return code >= static_cast<int64_t>(LayoutKind::packed) &&
         code <= static_cast<int64_t>(LayoutKind::paged);
}

}  // namespace omniattn
