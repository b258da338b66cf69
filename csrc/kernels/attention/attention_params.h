// Arguments of attention kernels, shared by the CPU and CUDA, and sizes that both use.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/attention/attention_problem.h"

namespace omniattn {

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

constexpr int64_t kSplitKeys = 256;  // keys of one decode work item
constexpr int64_t kDecodeRows = 16;  // most query rows per kv head that are decoded

OMNIATTN_FN int64_t group_size(const AttentionProblem& p) { return p.hq / p.hkv; }
OMNIATTN_FN int64_t query_rows(const AttentionProblem& p) { return p.batch * p.hq * p.tq; }
// Items of the step of decoding that merges the splits of each row.
OMNIATTN_FN int64_t merge_items(const AttentionProblem& p) { return query_rows(p); }

OMNIATTN_FN bool takes_decode_path(const AttentionProblem& p) {
  return p.tq * group_size(p) <= kDecodeRows && p.tk > 0 && !has_distance_rows(p);
}

// Number of heads of the result, and of query heads in each.
OMNIATTN_FN int64_t weights_heads(const AttentionWeightsParams& w) {
  return w.group_sums ? w.problem.hkv : w.problem.hq;
}
OMNIATTN_FN int64_t heads_summed(const AttentionWeightsParams& w) {
  return w.group_sums ? group_size(w.problem) : 1;
}

}  // namespace omniattn
