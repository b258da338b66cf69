// Attention on the CPU: O = Z . softmax(f(scale q k^T) + bias) v, where Z is dropout.
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
// 16-bit floats are widened when they are packed, and all arithmetic is in compute_t<T>. Only if
// the ISA multiplies 16-bit operands, blocks of queries are multiplied in their own type, and P
// and dS after rounding. Every number depends on shapes and values only, not on the number of
// threads or the order of items.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/attention/attention_problem.h"
#include "runtime/cpu_isa.h"
#include "semantics/block_schedule.h"

namespace omniattn {

// Rows are padded to a multiple of 16 elements, but not of 256 bytes, which would put the rows
// of a tile into few cache sets.
OMNIATTN_FN int64_t padded_row(int64_t width) {
  const int64_t padded = round_up(width, 16);
  return padded % 64 == 0 ? padded + 16 : padded;
}

constexpr int64_t kKeyPanel = 64;        // keys side by side in packed K^T
constexpr int64_t kKeyBlock = 128;       // keys of one tile
constexpr int64_t kKeyRow = 144;         // a row of kKeyBlock keys, padded
constexpr int64_t kQueryBlock = 96;      // queries of one tile
constexpr int64_t kSplitKeys = 256;      // keys of one decode work item
constexpr int64_t kTileSplitKeys = 512;  // as kSplitKeys, for decoding by register tiles
constexpr int64_t kDecodeRows = 16;      // most query rows per kv head that are decoded,
constexpr int64_t kDecodeQueries = 4;    // or, on the CPU, most queries with any number of heads
constexpr int64_t kDecodeTileRows = 32;  // from this many rows on, register tiles are well filled
constexpr int64_t kBackwardItems = 8;    // the backward splits keys to get this many work items,
constexpr int64_t kBackwardSplits = 8;   // with at most this many dQ buffers
constexpr int64_t kTablePlanes = 16;     // per head, for the gradient of a shared table

struct AttentionForwardParams {
  AttentionProblem problem;
  MutableHeadView out;  // (B, Tq, Hq, Dv)
  void* lse;            // (B, Hq, lse_stride) in the compute type
  void* lse_tail;       // same shape, for the backward (see Lse); or null
  void* workspace;      // forward_workspace_elements or decode_workspace_elements
};

// `at` is the index of the row in lse.
template <class A>
OMNIATTN_FN void store_lse(const AttentionForwardParams& params, int64_t at, Lse<A> lse) {
  static_cast<A*>(params.lse)[at] = lse.value;
  if (params.lse_tail != nullptr) static_cast<A*>(params.lse_tail)[at] = lse.tail;
}

// How pairs write the gradient of a bias: they add if many share an element; otherwise each stores
// its own, past the caches (stream) if the gradient does not fit in them.
enum class BiasWrite : int32_t { add, store, stream };

// Gradients of the tables of a program. Elements owned by one item are written in
// place. Others are written in parts: one per item or, if heads have elements of
// their own, one per batch of items.
struct ProgramGradients {
  struct Table {
    ProgramGradient whole;  // or its first part
    int64_t elements;       // in one part; 0: no parts
    bool has_heads;
  };
  Table tables[kMaxProgramTables];
  // True if elements written in place belong to all batch entries; true if to all heads.
  bool shares_batches, shares_heads;
};

struct AttentionBackwardParams {
  AttentionProblem problem;
  HeadView out;          // (B, Tq, Hq, Dv)
  HeadView grad_out;     // same shape as out
  const void* lse;       // (B, Hq, lse_stride) in the compute type
  const void* lse_tail;  // same shape as lse
  const void* grad_lse;  // same shape as lse, or null
  MutableHeadView grad_q, grad_k, grad_v;
  // Gradient of the bias in the compute type, contiguous, with zero strides where the bias is
  // broadcast; zero on entry if pairs add. Null: not wanted.
  void* grad_bias;
  int64_t grad_bias_stride_b, grad_bias_stride_h, grad_bias_stride_q;
  BiasWrite bias_write;
  // Gradients of (B | 1, rows, Hq), (Hq,) and (Hq,) in the compute type. Null: not wanted.
  void *grad_table, *grad_sinks, *grad_head_scale;
  // Gradients of (rows, Hq, D) in the compute type. Null: not wanted.
  void *grad_relative_keys, *grad_relative_queries;
  // Gradients of the tables of a program. Null: none is wanted.
  const ProgramGradients* grad_program;
  // Partial gradients, which the op sums. part_relative: planes of the relative view,
  // (splits, table_parts, Hq, plane), zero on entry. Other parts: (B, Hq, query blocks).
  // For CUDA see attention_cuda.h.
  void* part_relative;
  int64_t part_relative_plane;
  void *part_sinks, *part_head_scale;
  // (splits, distance_parts, Hq, rows of distance_range, D), zero on entry; on CUDA (Hq, distances,
  // D).
  void *part_relative_keys, *part_relative_queries;
  int64_t splits;   // key splits, each with a dQ buffer
  void* workspace;  // backward_workspace_elements
};

struct AttentionWeightsParams {
  AttentionProblem problem;  // v is not read
  const void* lse;           // (B, Hq, Tq) in the compute type
  // P (B, Hq, Tq, Tk) in dtype, or its sums in the compute type; zero on entry unless column_sums
  void* out;
  bool column_sums;  // sum over Tq
  bool group_sums;   // sum over the heads of a group: Hkv instead of Hq
};

struct AttentionSelectParams {
  AttentionProblem problem;  // v is not read
  int64_t* index;            // (B, Hq, Tq), -1 if no key is visible
  void* top;                 // (B, Hq, Tq) in the compute type
};

static_assert(std::is_trivially_copyable_v<AttentionForwardParams>);
static_assert(std::is_trivially_copyable_v<AttentionBackwardParams>);
static_assert(std::is_trivially_copyable_v<AttentionWeightsParams>);
static_assert(std::is_trivially_copyable_v<AttentionSelectParams>);

// Work items. Sizes of memory are in elements of the compute type.

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
// Memory for the registers of a program.
OMNIATTN_FN int64_t program_elements(const AttentionProblem& p) {
  return p.program == nullptr ? 0 : p.program->forward_registers * kProgramRow;
}
OMNIATTN_FN int64_t backward_program_elements(const AttentionProblem& p) {
  return p.program == nullptr ? 0 : p.program->backward_registers * kProgramRow;
}
// Memory for a tile's rows of distances, also transposed, their gradient, some rows of its scores,
// q or k as rows, and the transposed tile.
constexpr int64_t kBand = kQueryBlock + kKeyBlock;
constexpr int64_t kMostBandRows = 16;
OMNIATTN_FN int64_t distance_elements(const AttentionProblem& p) {
  if (!has_distance_rows(p)) return 0;
  return kBand * (2 * padded_row(p.d) + p.d + kMostBandRows) +
         kKeyBlock * (padded_row(p.d) + kQueryBlock);
}
// Memory for q, S and O tiles, m, and the lanes of l.
OMNIATTN_FN int64_t forward_scratch_elements(const AttentionProblem& p) {
  return kQueryBlock * (padded_row(p.d) + kKeyBlock + padded_row(p.dv) + 1 + 16) +
         program_elements(p) + distance_elements(p);
}

OMNIATTN_FN bool takes_decode_path(const AttentionProblem& p) {
  return p.tq * group_size(p) <= kDecodeRows && p.tk > 0 && !has_distance_rows(p);
}
// With few queries a head's register tiles would be nearly empty, even if its group is large
// (MLA: 128 heads on one latent).
OMNIATTN_FN bool takes_decode_path_cpu(const AttentionProblem& p) {
  return takes_decode_path(p) || (p.tq <= kDecodeQueries && p.tk > 0 && !has_distance_rows(p));
}
OMNIATTN_FN bool decodes_by_tiles(const AttentionProblem& p) {
  return group_size(p) * p.tq >= kDecodeTileRows;
}
// Queries and results of many rows fill L2, and every split reads and writes them once.
OMNIATTN_FN int64_t split_keys(const AttentionProblem& p) {
  return decodes_by_tiles(p) ? kTileSplitKeys : kSplitKeys;
}
OMNIATTN_FN int64_t decode_splits(const AttentionProblem& p) {
  return ceil_div(p.tk, split_keys(p));
}
// Kv heads become separate work items only if batch and splits give too few items.
OMNIATTN_FN int64_t decode_head_items(const AttentionProblem& p) {
  return p.batch * decode_splits(p) >= kBackwardItems ? 1 : p.hkv;
}
OMNIATTN_FN int64_t decode_items(const AttentionProblem& p) {
  return p.batch * decode_splits(p) * decode_head_items(p);
}
OMNIATTN_FN int64_t merge_items(const AttentionProblem& p) { return p.batch * p.hq * p.tq; }
// Size of a partial result, one per row and split: O (dv), m, l.
OMNIATTN_FN int64_t partial_elements(const AttentionProblem& p) { return padded_row(p.dv) + 16; }
OMNIATTN_FN int64_t decode_workspace_elements(const AttentionProblem& p) {
  return p.batch * decode_splits(p) * p.hq * p.tq * partial_elements(p);
}
// Size of the queries of one kv head: as rows, or as columns for register tiles.
OMNIATTN_FN int64_t decode_query_elements(const AttentionProblem& p) {
  const int64_t rows = group_size(p) * p.tq;
  return decodes_by_tiles(p) ? round_up(rows, kKeyPanel) * p.d : rows * padded_row(p.d);
}
// Memory for the queries of an item and the logits of one kv head for 64 keys; for register tiles
// also for the transposed logits, and the keys or their values as rows.
OMNIATTN_FN int64_t decode_scratch_elements(const AttentionProblem& p) {
  const int64_t rows = group_size(p) * p.tq, wide = padded_row(p.d > p.dv ? p.d : p.dv);
  return p.hkv * decode_query_elements(p) +
         kKeyPanel * (rows + (decodes_by_tiles(p) ? round_up(rows, kKeyPanel) + wide : 0)) +
         program_elements(p);
}

// Number of batch entries that add their table gradients to one plane, chosen so
// that a shared table has at most kTablePlanes per head. (A plane for each of
// 512 windows took twice as long.)
OMNIATTN_FN int64_t batches_per_plane(const AttentionBackwardParams& p) {
  return p.problem.table.stride_b == 0 ? ceil_div(p.problem.batch, kTablePlanes) : 1;
}
OMNIATTN_FN int64_t table_parts(const AttentionBackwardParams& p) {
  return ceil_div(p.problem.batch, batches_per_plane(p));
}
// An item of the backward owns everything it adds to. It processes in order the batch entries and
// kv heads that share a bias gradient, a plane of the table or rows of distances.
OMNIATTN_FN int64_t batches_per_item(const AttentionBackwardParams& p) {
  if (p.grad_bias != nullptr && p.grad_bias_stride_b == 0) return p.problem.batch;
  if (p.grad_program != nullptr) {
    return p.grad_program->shares_batches ? p.problem.batch
                                          : ceil_div(p.problem.batch, kTablePlanes);
  }
  const bool shares_rows = p.grad_relative_keys != nullptr || p.grad_relative_queries != nullptr;
  return p.grad_table != nullptr || shares_rows ? batches_per_plane(p) : 1;
}
// Number of partial sums of gradients of rows of distances; range of rows that a problem reads.
OMNIATTN_FN int64_t distance_parts(const AttentionBackwardParams& p) {
  return ceil_div(p.problem.batch, batches_per_item(p));
}
OMNIATTN_FN Range distance_range(const AttentionProblem& p, const DistanceRows& x) {
  return {row_of_distance(x, distance_of(p, p.tq - 1, 0)),
          row_of_distance(x, distance_of(p, 0, p.tk - 1)) + 1};
}
OMNIATTN_FN int64_t distance_part_elements(const AttentionProblem& p, const DistanceRows& x) {
  const Range rows = distance_range(p, x);
  return p.hq * (rows.end - rows.begin) * p.d;
}
// If there are many windows, an item takes all heads of each window; they are adjacent in memory.
OMNIATTN_FN int64_t heads_per_item(const AttentionBackwardParams& p) {
  const bool shares_bias = (p.grad_bias != nullptr && p.grad_bias_stride_h == 0) ||
                           (p.grad_program != nullptr && p.grad_program->shares_heads);
  const int64_t batches = batches_per_item(p);
  return shares_bias || (batches > 1 && batches < p.problem.batch) ? p.problem.hkv : 1;
}
OMNIATTN_FN int64_t backward_owners(const AttentionBackwardParams& p) {
  return ceil_div(p.problem.batch, batches_per_item(p)) * (p.problem.hkv / heads_per_item(p));
}
// `owners` is the sum of backward_owners over all problems of the call.
OMNIATTN_FN int64_t backward_splits(const AttentionBackwardParams& p, int64_t owners) {
  const int64_t wanted = ceil_div(kBackwardItems, owners);
  const int64_t limit = wanted < kBackwardSplits ? wanted : kBackwardSplits;
  const int64_t blocks = key_block_count(p.problem);
  return limit < blocks ? limit : blocks > 0 ? blocks : 1;
}
// Index of the part of a gradient that belongs to an item; `parts` of them exist for all items.
OMNIATTN_FN int64_t program_part(const AttentionBackwardParams& p, bool has_heads, int64_t b,
                                 int64_t kv_head, int64_t split) {
  const int64_t batch = b / batches_per_item(p), heads = p.problem.hkv / heads_per_item(p);
  return (has_heads ? batch : batch * heads + kv_head / heads_per_item(p)) * p.splits + split;
}
OMNIATTN_FN int64_t backward_items(const AttentionBackwardParams& p) {
  return backward_owners(p) * p.splits;
}
OMNIATTN_FN int64_t query_rows(const AttentionProblem& p) { return p.batch * p.hq * p.tq; }
// Size of 16-bit columns: the transpose of `rows` rows.
OMNIATTN_FN int64_t column_elements(const AttentionProblem& p, int64_t rows, int64_t width) {
  return size_of(p.dtype) == 2 ? round_up(rows * width, 32) / 2 : 0;
}
// Memory for `rows` query rows: pre * q and dO, both also as columns, one dQ per split, Delta, the
// shift of the exponent and the factor of the row.
OMNIATTN_FN int64_t backward_workspace_elements(const AttentionBackwardParams& p, int64_t rows) {
  const AttentionProblem& x = p.problem;
  return rows * (padded_row(x.d) * (1 + p.splits) + padded_row(x.dv) + 3) +
         column_elements(x, rows, x.d) + column_elements(x, rows, x.dv);
}
// Memory for packed K^T, V^T and K, the dK and dV of one key block, and the P and dS
// tiles, also as 16-bit numbers.
OMNIATTN_FN int64_t backward_scratch_elements(const AttentionBackwardParams& p) {
  const AttentionProblem& x = p.problem;
  return kKeyBlock * (x.d + x.dv + padded_row(x.d)) +
         kKeyRow * (padded_row(x.d) + padded_row(x.dv)) + 2 * kQueryBlock * kKeyBlock +
         3 * column_elements(x, kQueryBlock, kKeyRow) + backward_program_elements(x) +
         distance_elements(x);
}

// Number of heads of the result, and of query heads in each.
OMNIATTN_FN int64_t weights_heads(const AttentionWeightsParams& w) {
  return w.group_sums ? w.problem.hkv : w.problem.hq;
}
OMNIATTN_FN int64_t heads_summed(const AttentionWeightsParams& w) {
  return w.group_sums ? group_size(w.problem) : 1;
}
OMNIATTN_FN int64_t weights_items(const AttentionWeightsParams& w) {
  return w.problem.batch * weights_heads(w) * key_block_count(w.problem);
}
// Memory for packed K^T, q and S tiles, and the sums.
OMNIATTN_FN int64_t weights_scratch_elements(const AttentionProblem& p) {
  return kKeyBlock * p.d + kQueryBlock * (padded_row(p.d) + kKeyBlock) + kKeyBlock +
         program_elements(p) + distance_elements(p);
}
// Items and memory for few query rows, which share the keys of a kv head: queries, logits of
// 64 keys, and the sums of a head.
OMNIATTN_FN int64_t few_rows_items(const AttentionProblem& p) {
  return p.batch * p.hkv * decode_splits(p);
}
OMNIATTN_FN int64_t few_rows_scratch_elements(const AttentionProblem& p) {
  return group_size(p) * p.tq * (padded_row(p.d) + kKeyPanel) + kKeyPanel + program_elements(p);
}

// Memory for packed K^T, q and S tiles; the items are forward_items.
OMNIATTN_FN int64_t select_scratch_elements(const AttentionProblem& p) {
  return kKeyBlock * p.d + kQueryBlock * (padded_row(p.d) + kKeyBlock) + program_elements(p) +
         distance_elements(p);
}

// Kernel entries: one table per file and ISA.

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
