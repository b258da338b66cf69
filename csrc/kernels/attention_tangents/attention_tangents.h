// Tangents of attention and of its backward on the CPU: arguments, memory and kernels.
#pragma once

#include "kernels/attention/attention_kernels_cpu.h"
#include "kernels/attention/attention_sizes_cpu.h"

namespace omniattn {

// Views whose data is null stand for tangents of 0, or for results that are not wanted.
struct AttentionTangentParams {
  AttentionProblem problem;            // softmax without transform, program or rows of distances
  HeadView out;                        // (B, Tq, Hq, Dv)
  const void *lse, *lse_tail;          // (B, Hq, lse_stride) in the compute type
  HeadView moved_q, moved_k, moved_v;  // tangents of q, k and v
  // Gradients of out and lse, and their tangents; without grad_out no gradient is wanted.
  HeadView grad_out, moved_grad_out;
  const void *grad_lse, *moved_grad_lse;
  // Results: tangents of out and lse, and of the gradients of q, k and v.
  MutableHeadView moved_out;
  void* moved_lse;
  MutableHeadView moved_grad_q, moved_grad_k, moved_grad_v;
  int64_t splits;   // key splits, each with sums of its own for all queries
  void* workspace;  // tangent_workspace_elements
};
static_assert(std::is_trivially_copyable_v<AttentionTangentParams>);

OMNIATTN_FN bool has_gradients(const AttentionTangentParams& x) {
  return x.grad_out.data != nullptr;
}
// Width of one half of a row that holds a tensor and its tangent, and the stride of such rows.
OMNIATTN_FN int64_t half_row(int64_t width) { return round_up(width, 16); }
OMNIATTN_FN int64_t pair_row(int64_t width) { return padded_row(2 * half_row(width)); }

OMNIATTN_FN int64_t tangent_splits(const AttentionProblem& p, int64_t owners) {
  const int64_t wanted = ceil_div(kBackwardItems, owners), blocks = key_block_count(p);
  const int64_t limit = wanted < kBackwardSplits ? wanted : kBackwardSplits;
  return limit < blocks ? limit : blocks > 0 ? blocks : 1;
}
OMNIATTN_FN int64_t tangent_items(const AttentionTangentParams& x) {
  return kv_head_items(x.problem) * x.splits;
}
// Stride of the sums of a row: first the tangent of out, then the tangent of the gradient of q.
OMNIATTN_FN int64_t tangent_sums_row(const AttentionProblem& p) {
  return padded_row(p.d > p.dv ? p.d : p.dv);
}
// Memory for `rows` query rows: q and its tangent, dO and its tangent, sums and the mean of the
// tangents of logits for each split, and four statistics.
OMNIATTN_FN int64_t tangent_workspace_elements(const AttentionTangentParams& x, int64_t rows) {
  const AttentionProblem& p = x.problem;
  return rows * (pair_row(p.d) + (has_gradients(x) ? pair_row(p.dv) : 0) +
                 x.splits * (tangent_sums_row(p) + 1) + 4);
}
// Memory for k and v of a block with their tangents, as rows and as columns, the sums of their
// gradients, and four tiles.
OMNIATTN_FN int64_t tangent_scratch_elements(const AttentionProblem& p) {
  return kKeyBlock * (pair_row(p.d) + pair_row(p.dv) + 2 * half_row(p.d) + 2 * half_row(p.dv) +
                      padded_row(p.d) + padded_row(p.dv)) +
         4 * kQueryBlock * kKeyBlock;
}

struct AttentionTangentKernels {
  // In this order: forward_items, tangent_items, forward_items; then, if gradients are wanted,
  // tangent_items, forward_items. The second and fourth need tangent_scratch_elements.
  AttentionKernel<AttentionTangentParams> prepare, outputs, join, gradients, finish;
  // All steps, for one kv head at a time, if splits is 1: kv_head_items. The workspace is in
  // scratch: tangent_workspace_elements more, for the rows of a kv head.
  AttentionKernel<AttentionTangentParams> heads;
};
OMNIATTN_KERNEL_TABLE(AttentionTangentKernels, attention_tangent_kernels)

}  // namespace omniattn
