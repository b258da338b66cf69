// Attention over keys that each query selects: row i of softmax(f(scale q k^T)) v over the keys j
// of the blocks [n S, (n + 1) S) that a list names, j < Tk, and j <= i + Tk - Tq under a causal
// mask. A list belongs to a block of queries and to all heads, to the heads of one kv head, or to
// one.
//
// An item is a list with as many of its queries as fill a tile; its rows are (query, head), so that
// 16 heads that share a list multiply as 16 rows. On the CPU an item walks its own list in both
// passes, 128 keys at a time:
//
//   packed    keys of whole blocks are read where they lie, packed once for all items
//   gathered  single keys, and lists that name few of the keys, are copied, a tile at a time
//
// In the backward an owner, a kv head and every splits-th of its items, adds dK and dV to a buffer
// of its own, and finish adds these up in order. So no list is inverted: with 16 rows for each key
// the additions to dK and dV are as cheap as any product, and dQ needs no buffers. (On CUDA, where
// owners are thousands, the lists are inverted, see selected_attention_cuda.cu.)
#pragma once

#include "kernels/attention/attention.h"
#include "runtime/stream.h"

namespace omniattn {

constexpr int64_t kGatheredBlock = 16;  // blocks of fewer keys are gathered

// (B | 1, heads, query blocks, count), unit stride over the entries of a list; -1: none.
struct SelectedLists {
  const void* indices;
  bool wide;  // int64, else int32
  int64_t stride_b, stride_h, stride_q;
  int64_t heads;  // with lists of their own: 1, Hkv or Hq
  int64_t count, query_block, block_size;
  bool causal;
  bool gathered;  // on the CPU
};

// The n-th block of a list that begins at `list`; -1 also for what lies outside of the keys.
OMNIATTN_FN int64_t selected_block(const SelectedLists& s, const AttentionProblem& p, int64_t list,
                                   int64_t n) {
  const int64_t block = s.wide ? static_cast<const int64_t*>(s.indices)[list + n]
                               : static_cast<const int32_t*>(s.indices)[list + n];
  return 0 <= block && block < ceil_div(p.tk, s.block_size) ? block : -1;
}

// Heads that share their lists and their keys.
OMNIATTN_FN int64_t list_heads(const SelectedLists& s, const AttentionProblem& p) {
  return p.hq / (s.heads > p.hkv ? s.heads : p.hkv);
}
OMNIATTN_FN int64_t queries_per_item(const SelectedLists& s, const AttentionProblem& p) {
  const int64_t fill = kQueryBlock / list_heads(s, p), limit = smaller(s.query_block, p.tq);
  return larger(1, smaller(fill, limit));
}
OMNIATTN_FN int64_t selected_rows(const SelectedLists& s, const AttentionProblem& p) {
  return round_up(queries_per_item(s, p) * list_heads(s, p), 2);
}
OMNIATTN_FN int64_t items_per_list(const SelectedLists& s, const AttentionProblem& p) {
  return ceil_div(smaller(s.query_block, p.tq), queries_per_item(s, p));
}
OMNIATTN_FN int64_t list_count(const SelectedLists& s, const AttentionProblem& p) {
  return ceil_div(p.tq, s.query_block);  // of a batch entry and head
}
// Of one head or group of heads; the last list may leave items without queries.
OMNIATTN_FN int64_t items_per_head(const SelectedLists& s, const AttentionProblem& p) {
  return list_count(s, p) * items_per_list(s, p);
}
OMNIATTN_FN int64_t selected_items(const SelectedLists& s, const AttentionProblem& p) {
  return p.batch * (p.hq / list_heads(s, p)) * items_per_head(s, p);
}

struct SelectedItem {
  int64_t b, kv_head, first_head, heads;
  Range queries;
  int64_t list;  // of its first entry in indices
};
// Item n of a batch entry and the heads from first_head on.
OMNIATTN_FN SelectedItem selected_item(const SelectedLists& s, const AttentionProblem& p, int64_t b,
                                       int64_t first_head, int64_t n) {
  const int64_t list = n / items_per_list(s, p), size = queries_per_item(s, p);
  const int64_t begin = list * s.query_block + n % items_per_list(s, p) * size;
  const int64_t end = smaller((list + 1) * s.query_block, p.tq);
  const int64_t head = s.heads == 1 ? 0 : first_head / (p.hq / s.heads);
  return {b,
          kv_head(first_head, p.hq, p.hkv),
          first_head,
          list_heads(s, p),
          {begin, smaller(begin + size, end)},
          b * s.stride_b + head * s.stride_h + list * s.stride_q};
}

// Keys from here on are hidden from a query.
OMNIATTN_FN int64_t selected_end(const SelectedLists& s, const AttentionProblem& p, int64_t query) {
  return s.causal ? larger(0, smaller(p.tk, query + 1 + bottom_right_offset(p.tq, p.tk))) : p.tk;
}

struct SelectedForwardParams {
  AttentionForwardParams attention;  // workspace: of its `pack`, if keys are packed
  SelectedLists lists;
};

struct SelectedBackwardParams {
  // workspace: selected_sums_elements. part_sinks: (B, Hq, Tq), or null.
  AttentionBackwardParams attention;
  SelectedLists lists;
  void* packed;  // selected_packed_elements, if keys are packed
};
static_assert(std::is_trivially_copyable_v<SelectedForwardParams>);
static_assert(std::is_trivially_copyable_v<SelectedBackwardParams>);

// Sizes of memory are in elements of the compute type.

// The keys and values of a tile, and their operands: K^T, V^T, and K or V as rows.
OMNIATTN_FN int64_t gathered_elements(const SelectedLists& s, const AttentionProblem& p) {
  return s.gathered ? kKeyBlock * (2 * (p.d + p.dv) + padded_row(larger(p.d, p.dv))) : 0;
}
// q, S and O tiles, m and the lanes of l, gathered keys.
OMNIATTN_FN int64_t selected_forward_scratch(const SelectedForwardParams& x) {
  const AttentionProblem& p = x.attention.problem;
  return selected_rows(x.lists, p) * (padded_row(p.d) + kKeyBlock + padded_row(p.dv) + 1 + 16) +
         gathered_elements(x.lists, p);
}
// q and dO, both also as pairs of rows, dQ, the P and dS tiles, Delta, shift, the factor of a row,
// gathered keys and their dK or dV.
OMNIATTN_FN int64_t selected_backward_scratch(const SelectedBackwardParams& x) {
  const AttentionProblem& p = x.attention.problem;
  return selected_rows(x.lists, p) *
             (3 * padded_row(p.d) + 2 * padded_row(p.dv) + 2 * kKeyBlock + 3) +
         gathered_elements(x.lists, p) +
         (x.lists.gathered ? kKeyBlock * padded_row(larger(p.d, p.dv)) : 0);
}
// K^T, V^T and K of all kv heads.
OMNIATTN_FN int64_t selected_packed_head(const AttentionProblem& p) {
  return packed_keys(p) * (p.d + p.dv + padded_row(p.d));
}
OMNIATTN_FN int64_t selected_packed_elements(const AttentionProblem& p) {
  return p.batch * p.hkv * selected_packed_head(p);
}
// dK and dV of all kv heads, of one split.
OMNIATTN_FN int64_t selected_sums_elements(const AttentionProblem& p) {
  return p.batch * p.hkv * p.tk * (padded_row(p.d) + padded_row(p.dv));
}
OMNIATTN_FN int64_t selected_splits(const SelectedLists& s, const AttentionProblem& p) {
  const int64_t wanted = ceil_div(kBackwardItems, larger(1, kv_head_items(p)));
  return larger(1, smaller(wanted, smaller(kBackwardSplits, items_per_head(s, p))));
}

struct SelectedForwardKernels {
  // selected_items, selected_forward_scratch
  AttentionKernel<SelectedForwardParams> forward;
};
struct SelectedBackwardKernels {
  // pack_items without scratch; kv_head_items times splits with selected_backward_scratch;
  // pack_items and Hq without scratch.
  AttentionKernel<SelectedBackwardParams> pack, backward, finish, sum_sinks;
};
OMNIATTN_PRODUCT_KERNEL_TABLE(SelectedForwardKernels, selected_forward_kernels)
OMNIATTN_PRODUCT_KERNEL_TABLE(SelectedBackwardKernels, selected_backward_kernels)

}  // namespace omniattn
