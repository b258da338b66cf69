// Work around the attention kernels on the CPU: expands the table term to all
// pairs, copies pages and int8 into rows, sums the partial gradients of parameters, and fits
// the lse of few rows to the backward.
#pragma once

#include "kernels/attention/attention_kernels_cpu.h"
#include "kernels/attention/attention_sizes_cpu.h"

namespace omniattn {

// Size of the expanded term on the CPU. There is one plane per head, and per batch
// entry if entries have their own tables. A relative term has one element per distance,
// other terms have one row per query.
OMNIATTN_FN int64_t plane_elements(const AttentionProblem& p) {
  const int64_t keys = round_up(p.tk, kKeyPanel) + kKeyPanel;
  return is_relative(p.table.kind) ? p.tq + keys : p.tq * keys;
}
OMNIATTN_FN int64_t table_batches(const AttentionProblem& p) {
  return p.table.stride_b == 0 ? 1 : p.batch;
}
OMNIATTN_FN int64_t table_heads(const AttentionProblem& p) { return table_batches(p) * p.hq; }
constexpr int64_t kExpandedDistances = 256;  // per item
OMNIATTN_FN int64_t expand_items(const AttentionProblem& p) {
  return is_relative(p.table.kind) ? ceil_div(p.tq + p.tk - 1, kExpandedDistances) : p.tq;
}
// Memory for the sums of a plane and of the rows of the table, in fp64.
OMNIATTN_FN int64_t gather_scratch_bytes(const AttentionProblem& p) {
  return (plane_elements(p) + p.table.rows) * static_cast<int64_t>(sizeof(double));
}

// Gradient of the table of a call, from the planes of its problems, one per sequence.
struct AttentionTableGradient {
  const AttentionBackwardParams* whole;
  const AttentionBackwardParams* problems;
  int64_t count;
};

// Gradient of rows of distances of a call, from the parts of its problems.
struct AttentionDistanceGradient {
  const AttentionBackwardParams* whole;
  const AttentionBackwardParams* problems;
  int64_t count;
  DistanceRows AttentionProblem::* rows;
  void* AttentionBackwardParams::* parts;
  void* AttentionBackwardParams::* grad;
};

// Kernels for the table term and the gradients of parameters, which run before and
// after the main kernels of a call.
struct AttentionTermsKernels {
  // Items: expand_items. Writes the term of all pairs in the layout of `relative`.
  void (*expand_table)(const AttentionProblem&, void* out, int64_t begin, int64_t end);
  // Items: table_heads, the heads of a table. Sums the planes of all problems in order;
  // scratch: gather_scratch_bytes.
  AttentionKernel<AttentionTableGradient> gather_table;
  // Items: rows. Sums the parts of all problems in order.
  void (*gather_distances)(const AttentionDistanceGradient&, int64_t begin, int64_t end);
  // Items: heads. Sums parts (B, Hq, query blocks), in order, to a gradient (Hq,).
  void (*gather_heads)(const AttentionProblem&, const void* parts, void* grad, int64_t begin,
                       int64_t end);
  // Items: keys. Copies the rows (Tk, Hkv, width) of one sequence from its pages; rows of int8
  // become rows of dtype, multiplied by their factors.
  void (*gather_rows)(const AttentionProblem&, const HeadView& from, const HeadView& factors,
                      int64_t width, void* to, int64_t begin, int64_t end);
  // Few rows sum logits in an order other than that of the backward's blocks, which shows in the
  // backward's probabilities at large logits: lse_tail becomes the lse of the blocks minus theirs.
  bool (*has_large_lse)(const AttentionForwardParams&);
  void (*fit_tails)(const AttentionForwardParams& rows, const AttentionForwardParams& blocks);
};

OMNIATTN_KERNEL_TABLE(AttentionTermsKernels, attention_terms_kernels)

}  // namespace omniattn
