// Attention on the CPU (spec attention 1-3): O = Z . softmax(f(scale q k^T) + bias) v.
//
//   forward   pack (b, kv head, 64 keys), then tiles (b, head, query block), or both at once per
//             (b, kv head): online softmax after Dao et al., FlashAttention (arXiv 2205.14135) and
//             FlashAttention-2 (arXiv 2307.08691)
//   decode    few query rows: split (b, kv heads, key range), then merge (b, head, query), in key
//             order
//   backward  prepare (b, head, query block), gradients (b's, kv heads, key blocks) and finish (b,
//             head, query block), or all three per (b's, kv heads): dK, dV, dbias and the table's
//             plane are private to an item, dQ goes to one buffer per key split, which finish adds
//             up in order
//
// What is stored as 16-bit floats is widened when it is packed, and all arithmetic is in
// compute_t<T>. Only where the ISA has a dot product of bf16, forward and backward multiply bf16 by
// it, with P and dS rounded.
// Every number depends on shapes and values only, not on the number of threads or on the order of
// items.
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"
#include "semantics/block_schedule.h"
#include "semantics/mask.h"
#include "semantics/philox.h"
#include "semantics/score.h"
#include "semantics/seqlen.h"
#include "semantics/sequences.h"
#include "semantics/softmax.h"

namespace omniattn {

// (B, T, H, D), unit stride over D; strides in elements.
struct HeadView {
  const void* data;
  int64_t stride_b, stride_t, stride_h;
};
struct MutableHeadView {
  void* data;
  int64_t stride_b, stride_t, stride_h;
};

// (B, Hq, Tq, Tk) by strides (0: broadcast), unit stride over keys. data == nullptr: none.
struct ScoreView {
  const void* data;
  DType dtype;
  int64_t stride_b, stride_h, stride_q;
};

// The table's term of all pairs, expanded by the op, in the compute type: element
//   origin + b stride_b + h stride_h + q stride_q + k
// On the CPU 64 keys past Tk can be read.
struct RelativeView {
  const void* data;  // null: none
  int64_t origin, stride_b, stride_h, stride_q;
};

struct AttentionProblem {
  DType dtype;
  int64_t batch, tq, tk, hq, hkv, d, dv;
  HeadView q;  // (B, Tq, Hq, D)
  HeadView k;  // (B, Tk, Hkv, D)
  HeadView v;  // (B, Tk, Hkv, Dv)
  PageView pages;
  AttentionMask mask;
  uint32_t terms;  // the score's rules, see ScoreKind
  Score score;
  ScoreView bias;
  TableTerm table;
  RelativeView relative;   // of the table; kernels read only this
  int64_t relative_shift;  // of k - i in the whole problem (see Part) against that in this one
  const void* sinks;       // (Hq,) in the compute type, or null
  const void* head_scale;  // (Hq,) in the compute type, or null
  Dropout dropout;
  const int64_t* seed;     // (2,) for kernels that read it themselves (CUDA); null: in dropout
  int64_t first_batch;     // of the whole call, for dropout: packed sequences are problems of B = 1
  int64_t lse_stride;      // elements of lse between heads; Tq, or the rows of all packed sequences
  SequenceRows sequences;  // then tq and tk are the longest, and batch is the number of sequences
};

// Factor of q, pre and that of its head.
template <class A>
OMNIATTN_FN A head_factor(const AttentionProblem& p, int64_t h) {
  return p.head_scale == nullptr ? A(1) : static_cast<const A*>(p.head_scale)[h];
}
template <class A>
OMNIATTN_FN A query_factor(const AttentionProblem& p, int64_t h) {
  return static_cast<A>(p.score.pre) * head_factor<A>(p, h);
}

// Running maximum of a row before its first key: the sink, if there is one.
template <class A>
OMNIATTN_FN A initial_maximum(const AttentionProblem& p, int64_t h) {
  if (!is_softmax(p.score)) return A(0);
  if (p.sinks == nullptr) return negative_infinity<A>();
  return static_cast<const A*>(p.sinks)[h];
}

// Rows are padded to a multiple of 16 elements, and off multiples of 256 bytes, which would put the
// rows of one tile into few cache sets.
OMNIATTN_FN int64_t padded_row(int64_t width) {
  const int64_t padded = round_up(width, 16);
  return padded % 64 == 0 ? padded + 16 : padded;
}

constexpr int64_t kKeyPanel = 64;        // keys side by side in packed K^T
constexpr int64_t kKeyBlock = 128;       // keys of one tile
constexpr int64_t kQueryBlock = 96;      // queries of one tile
constexpr int64_t kSplitKeys = 256;      // keys of one decode work item
constexpr int64_t kTileSplitKeys = 512;  // the same where it multiplies by register tiles
constexpr int64_t kDecodeRows = 16;      // most query rows of one kv head that take the decode path
constexpr int64_t kDecodeQueries = 4;    // or on the CPU, however many heads, most queries
constexpr int64_t kDecodeTileRows = 32;  // from so many rows on tiles are full enough
constexpr int64_t kBackwardItems = 8;    // work items the backward splits keys for, and
constexpr int64_t kBackwardSplits = 8;   // the most dQ buffers it pays for that
constexpr int64_t kTablePlanes = 16;     // of each head that collect the gradient of a shared table

struct AttentionForwardParams {
  AttentionProblem problem;
  MutableHeadView out;  // (B, Tq, Hq, Dv)
  void* lse;            // (B, Hq, lse_stride) in the compute type
  void* lse_tail;       // the same, for the backward (see Lse), or null
  void* workspace;      // forward_workspace_elements or decode_workspace_elements
};

// `at`: the row's number in lse.
template <class A>
OMNIATTN_FN void store_lse(const AttentionForwardParams& params, int64_t at, Lse<A> lse) {
  static_cast<A*>(params.lse)[at] = lse.value;
  if (params.lse_tail != nullptr) static_cast<A*>(params.lse_tail)[at] = lse.tail;
}

// How pairs reach the gradient of a bias: added where many share an element; else each writes its
// own, past the caches if these cannot hold them.
enum class BiasWrite : int32_t { add, store, stream };

struct AttentionBackwardParams {
  AttentionProblem problem;
  HeadView out;          // (B, Tq, Hq, Dv)
  HeadView grad_out;     // the same shape
  const void* lse;       // (B, Hq, lse_stride) in the compute type
  const void* lse_tail;  // the same
  const void* grad_lse;  // the same, or null
  MutableHeadView grad_q, grad_k, grad_v;
  // Gradient of the bias in the compute type, contiguous, with zero strides where the bias is
  // broadcast; zero on entry where pairs are added. Null: not wanted.
  void* grad_bias;
  int64_t grad_bias_stride_b, grad_bias_stride_h, grad_bias_stride_q;
  BiasWrite bias_write;
  // Gradients of (B | 1, rows, Hq), (Hq,) and (Hq,) in the compute type. Null: not wanted.
  void *grad_table, *grad_sinks, *grad_head_scale;
  // Their parts, which the op adds up: the relative view's planes (splits, table_parts, Hq, plane),
  // zero on entry; the others (B, Hq, query blocks). On CUDA see attention_cuda.h.
  void* part_relative;
  int64_t part_relative_plane;
  void *part_sinks, *part_head_scale;
  int64_t splits;   // key splits = dQ buffers
  void* workspace;  // backward_workspace_elements
};

struct AttentionWeightsParams {
  AttentionProblem problem;  // v is not read
  const void* lse;           // (B, Hq, Tq) in the compute type
  void* weights;             // (B, Hq, Tq, Tk), zero on entry, or null
  void* sums;                // (B, Hq, Tk) in the compute type, or null
};

struct AttentionSelectParams {
  AttentionProblem problem;  // v is not read
  int64_t* index;            // (B, Hq, Tq), -1 where no key is visible
  void* top;                 // (B, Hq, Tq) in the compute type
};

static_assert(std::is_trivially_copyable_v<AttentionForwardParams>);
static_assert(std::is_trivially_copyable_v<AttentionBackwardParams>);
static_assert(std::is_trivially_copyable_v<AttentionWeightsParams>);
static_assert(std::is_trivially_copyable_v<AttentionSelectParams>);

// ---- work items; memory in elements of the compute type -----------------------------------------

OMNIATTN_FN int64_t group_size(const AttentionProblem& p) { return p.hq / p.hkv; }
OMNIATTN_FN int64_t query_block_count(const AttentionProblem& p) {
  return ceil_div(p.tq, kQueryBlock);
}
OMNIATTN_FN int64_t key_block_count(const AttentionProblem& p) { return ceil_div(p.tk, kKeyBlock); }

// Packed K^T [key panel][d][64] and V [key][padded_row(dv)] of one kv head.
OMNIATTN_FN int64_t packed_keys(const AttentionProblem& p) { return round_up(p.tk, kKeyPanel); }
OMNIATTN_FN int64_t packed_head_elements(const AttentionProblem& p) {
  return packed_keys(p) * (p.d + padded_row(p.dv));
}

OMNIATTN_FN int64_t pack_items(const AttentionProblem& p) {
  return p.batch * p.hkv * ceil_div(p.tk, kKeyPanel);
}
OMNIATTN_FN int64_t forward_items(const AttentionProblem& p) {
  return p.batch * p.hq * query_block_count(p);
}
OMNIATTN_FN int64_t kv_head_items(const AttentionProblem& p) { return p.batch * p.hkv; }
OMNIATTN_FN int64_t forward_workspace_elements(const AttentionProblem& p) {
  return p.batch * p.hkv * packed_head_elements(p);
}
// q, S and O tiles, m and the lanes of l.
OMNIATTN_FN int64_t forward_scratch_elements(const AttentionProblem& p) {
  return kQueryBlock * (padded_row(p.d) + kKeyBlock + padded_row(p.dv) + 1 + 16);
}

OMNIATTN_FN bool takes_decode_path(const AttentionProblem& p) {
  return p.tq * group_size(p) <= kDecodeRows && p.tk > 0;
}
// Tiles of the heads of a large group (MLA's 128 on one latent) would be nearly empty.
OMNIATTN_FN bool takes_decode_path_cpu(const AttentionProblem& p) {
  return takes_decode_path(p) || (p.tq <= kDecodeQueries && p.tk > 0);
}
OMNIATTN_FN bool decodes_by_tiles(const AttentionProblem& p) {
  return group_size(p) * p.tq >= kDecodeTileRows;
}
// Many rows fill L2 with their queries and results, which each split moves once.
OMNIATTN_FN int64_t split_keys(const AttentionProblem& p) {
  return decodes_by_tiles(p) ? kTileSplitKeys : kSplitKeys;
}
OMNIATTN_FN int64_t decode_splits(const AttentionProblem& p) {
  return ceil_div(p.tk, split_keys(p));
}
// Kv heads are work items of their own only where batch and splits give few.
OMNIATTN_FN int64_t decode_head_items(const AttentionProblem& p) {
  return p.batch * decode_splits(p) >= kBackwardItems ? 1 : p.hkv;
}
OMNIATTN_FN int64_t decode_items(const AttentionProblem& p) {
  return p.batch * decode_splits(p) * decode_head_items(p);
}
OMNIATTN_FN int64_t merge_items(const AttentionProblem& p) { return p.batch * p.hq * p.tq; }
// One partial result per row and split: O (dv), m, l.
OMNIATTN_FN int64_t partial_elements(const AttentionProblem& p) { return padded_row(p.dv) + 16; }
OMNIATTN_FN int64_t decode_workspace_elements(const AttentionProblem& p) {
  return p.batch * decode_splits(p) * p.hq * p.tq * partial_elements(p);
}
// The queries of one kv head: as rows, or for tiles as columns.
OMNIATTN_FN int64_t decode_query_elements(const AttentionProblem& p) {
  const int64_t rows = group_size(p) * p.tq;
  return decodes_by_tiles(p) ? round_up(rows, kKeyPanel) * p.d : rows * padded_row(p.d);
}
// The queries of an item, the logits of one kv head for 64 keys, and where tiles are used these
// logits transposed, and the keys or their values as rows.
OMNIATTN_FN int64_t decode_scratch_elements(const AttentionProblem& p) {
  const int64_t rows = group_size(p) * p.tq, wide = padded_row(p.d > p.dv ? p.d : p.dv);
  return p.hkv * decode_query_elements(p) +
         kKeyPanel * (rows + (decodes_by_tiles(p) ? round_up(rows, kKeyPanel) + wide : 0));
}

// Batch entries whose table gradients go to one plane, so that a shared table has at most
// kTablePlanes for each head. (One for each of 512 windows took twice the time.)
OMNIATTN_FN int64_t batches_per_plane(const AttentionBackwardParams& p) {
  return p.problem.table.stride_b == 0 ? ceil_div(p.problem.batch, kTablePlanes) : 1;
}
OMNIATTN_FN int64_t table_parts(const AttentionBackwardParams& p) {
  return ceil_div(p.problem.batch, batches_per_plane(p));
}
// Items of the backward own everything they add to, and walk the batch entries and kv heads that do
// so in order: all that share the gradient of a bias, and those that share a table's plane.
OMNIATTN_FN int64_t batches_per_item(const AttentionBackwardParams& p) {
  if (p.grad_bias != nullptr && p.grad_bias_stride_b == 0) return p.problem.batch;
  return p.grad_table != nullptr ? batches_per_plane(p) : 1;
}
// An item of many windows takes all heads of each, which lie side by side in memory.
OMNIATTN_FN int64_t heads_per_item(const AttentionBackwardParams& p) {
  const bool shares_bias = p.grad_bias != nullptr && p.grad_bias_stride_h == 0;
  const int64_t batches = batches_per_item(p);
  return shares_bias || (batches > 1 && batches < p.problem.batch) ? p.problem.hkv : 1;
}
OMNIATTN_FN int64_t backward_owners(const AttentionBackwardParams& p) {
  return ceil_div(p.problem.batch, batches_per_item(p)) * (p.problem.hkv / heads_per_item(p));
}
// `owners` of all problems of the call.
OMNIATTN_FN int64_t backward_splits(const AttentionBackwardParams& p, int64_t owners) {
  const int64_t wanted = ceil_div(kBackwardItems, owners);
  const int64_t limit = wanted < kBackwardSplits ? wanted : kBackwardSplits;
  const int64_t blocks = key_block_count(p.problem);
  return limit < blocks ? limit : blocks > 0 ? blocks : 1;
}
OMNIATTN_FN int64_t backward_items(const AttentionBackwardParams& p) {
  return backward_owners(p) * p.splits;
}
OMNIATTN_FN int64_t query_rows(const AttentionProblem& p) { return p.batch * p.hq * p.tq; }
// For `rows` query rows: pre * q, dO, one dQ per split, Delta and the exponent's shift.
OMNIATTN_FN int64_t backward_workspace_elements(const AttentionBackwardParams& p, int64_t rows) {
  return rows * (padded_row(p.problem.d) * (1 + p.splits) + padded_row(p.problem.dv) + 2);
}
// Packed K^T, V^T and K, the dK and dV of one key block, and the P and dS tiles.
OMNIATTN_FN int64_t backward_scratch_elements(const AttentionBackwardParams& p) {
  const AttentionProblem& x = p.problem;
  return kKeyBlock * (x.d + x.dv + 2 * padded_row(x.d) + padded_row(x.dv)) +
         2 * kQueryBlock * kKeyBlock;
}

OMNIATTN_FN int64_t weights_items(const AttentionProblem& p) {
  return p.batch * p.hq * key_block_count(p);
}
// Packed K^T, q and S tiles, the sums.
OMNIATTN_FN int64_t weights_scratch_elements(const AttentionProblem& p) {
  return kKeyBlock * p.d + kQueryBlock * (padded_row(p.d) + kKeyBlock) + kKeyBlock;
}

// Packed K^T, q and S tiles; items are those of the forward.
OMNIATTN_FN int64_t select_scratch_elements(const AttentionProblem& p) {
  return kKeyBlock * p.d + kQueryBlock * (padded_row(p.d) + kKeyBlock);
}

// ---- entries: one table per file and ISA --------------------------------------------------------

// Items begin to end of a problem, with memory of the calling thread's own: `scratch` elements.
template <class Params>
using AttentionKernel = void (*)(const Params&, void* scratch, int64_t begin, int64_t end);
using AttentionForwardKernel = AttentionKernel<AttentionForwardParams>;
using AttentionBackwardKernel = AttentionKernel<AttentionBackwardParams>;

struct AttentionForwardKernels {
  // Keys packed once for all threads, into the workspace: pack_items, no scratch; forward_items,
  // forward_scratch_elements ...
  AttentionForwardKernel pack, forward;
  // ... or by the item that needs them, into packed_head_elements more of scratch: kv_head_items.
  // The results are the same to the bit.
  AttentionForwardKernel forward_heads;
};
struct AttentionDecodeKernels {
  // decode_items, decode_scratch_elements; merge_items, no scratch
  AttentionForwardKernel decode, merge;
};
struct AttentionBackwardKernels {
  // forward_items, backward_items, forward_items; only the second has scratch,
  // backward_scratch_elements
  AttentionBackwardKernel prepare, backward, finish;
  // All three for one kv head after the other, where splits is 1: backward_owners. The workspace is
  // in scratch, backward_workspace_elements more for the rows of a kv head.
  AttentionBackwardKernel backward_heads;
};

struct AttentionWeightsKernels {
  // weights_items, weights_scratch_elements
  AttentionKernel<AttentionWeightsParams> weights;
};

struct AttentionSelectKernels {
  // forward_items, select_scratch_elements
  AttentionKernel<AttentionSelectParams> select;
};

OMNIATTN_PRODUCT_KERNEL_TABLE(AttentionForwardKernels, attention_forward_kernels)
OMNIATTN_KERNEL_TABLE(AttentionDecodeKernels, attention_decode_kernels)
OMNIATTN_PRODUCT_KERNEL_TABLE(AttentionBackwardKernels, attention_backward_kernels)
OMNIATTN_KERNEL_TABLE(AttentionWeightsKernels, attention_weights_kernels)
OMNIATTN_KERNEL_TABLE(AttentionSelectKernels, attention_select_kernels)

}  // namespace omniattn
