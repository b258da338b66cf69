// Tables of the CPU kernels of attention, one per file and ISA. They compute
// O = Z . softmax(f(scale q k^T) + bias) v, where Z is dropout.
//
//   forward   pack (b, kv head, 64 keys), then tiles (b, head, query block), or both together per
//             (b, kv head): online softmax after Dao et al., FlashAttention (arXiv 2205.14135) and
//             FlashAttention-2 (arXiv 2307.08691)
//   decode    few query rows: split (b, kv heads, key range), then merge (b, head, query), in key
//             order
//   backward  prepare (b, head, query block), gradients (batch entries, kv heads, key blocks) and
//             finish (b, head, query block), or all three together per (batch entries, kv heads):
//             dK, dV, dbias and the table's plane are private to an item; dQ goes to one buffer per
//             key split, and finish adds these up in order
//
// Every number depends on shapes and values only, not on the number of threads or the order of
// items. attention_sizes_cpu.h has the numbers of items and the sizes of their memory.
#pragma once

#include <cstdint>

#include "kernels/attention/attention_params.h"
#include "runtime/cpu_isa.h"

namespace omniattn {

// Runs items [begin, end) of a problem. `scratch` is memory of the calling thread.
template <class Params>
using AttentionKernel = void (*)(const Params&, void* scratch, int64_t begin, int64_t end);
using AttentionForwardKernel = AttentionKernel<AttentionForwardParams>;
using AttentionBackwardKernel = AttentionKernel<AttentionBackwardParams>;

struct AttentionForwardKernels {
  // Keys are packed once for all threads, into the workspace: pack_items without scratch, then
  // forward_items with forward_scratch_elements ...
  AttentionForwardKernel pack, forward;
  // ... or by the item that needs them, into packed_head_elements of additional scratch:
  // kv_head_items. The results are bitwise equal.
  AttentionForwardKernel forward_heads;
};
struct AttentionDecodeKernels {
  // decode_items, decode_scratch_elements; merge_items, no scratch
  AttentionForwardKernel decode, merge;
};
struct AttentionBackwardKernels {
  // forward_items, backward_items, forward_items; only the second needs scratch,
  // backward_scratch_elements.
  AttentionBackwardKernel prepare, backward, finish;
  // All three steps, for one kv head at a time, if splits is 1: backward_owners. The workspace is
  // in scratch: backward_workspace_elements more, for the rows of a kv head.
  AttentionBackwardKernel backward_heads;
};

struct AttentionWeightsKernels {
  // weights_items, weights_scratch_elements
  AttentionKernel<AttentionWeightsParams> weights;
};
struct AttentionFewWeightsKernels {
  // few_rows_items, few_rows_scratch_elements; for problems that take the decode path
  AttentionKernel<AttentionWeightsParams> weights;
};

struct AttentionSelectKernels {
  // forward_items, select_scratch_elements
  AttentionKernel<AttentionSelectParams> select;
};

OMNIATTN_PRODUCT_KERNEL_TABLE(AttentionForwardKernels, attention_forward_kernels)
OMNIATTN_KERNEL_TABLE(AttentionDecodeKernels, attention_decode_kernels)
OMNIATTN_PRODUCT_KERNEL_TABLE(AttentionBackwardKernels, attention_backward_kernels)
OMNIATTN_PRODUCT_KERNEL_TABLE(AttentionWeightsKernels, attention_weights_kernels)
OMNIATTN_KERNEL_TABLE(AttentionFewWeightsKernels, attention_few_weights_kernels)
OMNIATTN_PRODUCT_KERNEL_TABLE(AttentionSelectKernels, attention_select_kernels)

}  // namespace omniattn
