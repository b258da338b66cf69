// Attention over keys that each query selects: row i of softmax(f(scale q k^T)) v over
// the keys j of the blocks [n S, (n + 1) S) in a list, with j < Tk, and j <= i + Tk - Tq
// under a causal mask. A list belongs to a block of queries, and to all heads, to the
// heads of one kv head, or to one head.
//
// An item is a list with as many of its queries as fill a tile; its rows are (query, head), so
// that 16 heads that share a list multiply as 16 rows. On the CPU an item walks its keys in both
// passes, at most 128 at a time:
//
//   packed    keys of whole blocks are read in place, from memory packed once for all items
//   shared    as packed, for lists of few rows: an item has lists of several hundred rows, whose
//             results stay in L2, and walks the blocks in these lists, each with the rows that list
//             it, so that tiles are full
//   gathered  single keys, and lists of a small share of the keys, are copied, one tile at a time
//
// In the backward an owner, i.e. a kv head and every splits-th of its items, adds dK and dV to its
// own buffer, and finish sums the buffers in order; dQ needs no buffers. (On CUDA, with thousands
// of owners, the lists are inverted instead, see selected_attention_cuda.cu.)
#pragma once

#include "kernels/attention/attention_kernels_cpu.h"
#include "kernels/attention/attention_sizes_cpu.h"
#include "runtime/stream.h"

namespace omniattn {

constexpr int64_t kGatheredBlock = 16;  // blocks of fewer keys are gathered
constexpr int64_t kSharedRows = 512;    // rows of an item of several lists, at most
constexpr int64_t kSharedItems = 32;    // items that a call keeps, with fewer rows if need be

// (B | 1, heads, query blocks, count), unit stride over the entries of a list; -1: none.
struct SelectedLists {
  const void* indices;
  bool wide;  // int64, else int32
  int64_t stride_b, stride_h, stride_q;
  int64_t heads;  // heads with lists of their own: 1, Hkv or Hq
  int64_t count, query_block, block_size;
  bool causal;
  bool gathered, shared;  // CPU only
};

// The n-th block of a list that begins at `list`; -1 for blocks outside the keys, too.
OMNIATTN_FN int64_t selected_block(const SelectedLists& s, const AttentionProblem& p, int64_t list,
                                   int64_t n) {
  const int64_t block = s.wide ? static_cast<const int64_t*>(s.indices)[list + n]
                               : static_cast<const int32_t*>(s.indices)[list + n];
  return 0 <= block && block < ceil_div(p.tk, s.block_size) ? block : -1;
}

// Number of heads that share their lists and their keys.
OMNIATTN_FN int64_t list_heads(const SelectedLists& s, const AttentionProblem& p) {
  return p.hq / (s.heads > p.hkv ? s.heads : p.hkv);
}
// True if items of several lists fill tiles better. With one list per item, rows meet
// several blocks in a tile of 128 keys.
OMNIATTN_FN bool shares_items(const SelectedLists& s, const AttentionProblem& p) {
  const int64_t rows = smaller(s.query_block, p.tq) * list_heads(s, p);
  return !s.gathered && rows <= s.block_size / 4;
}
OMNIATTN_FN int64_t item_heads(const SelectedLists& s, const AttentionProblem& p) {
  return s.shared ? group_size(p) : list_heads(s, p);
}
// Number of queries that fill an item.
OMNIATTN_FN int64_t item_fill(const SelectedLists& s, const AttentionProblem& p) {
  const int64_t share = p.batch * p.hq * p.tq / kSharedItems;
  const int64_t shared = smaller(larger(share, kQueryBlock), kSharedRows);
  return larger(1, (s.shared ? shared : kQueryBlock) / item_heads(s, p));
}
// Number of lists of consecutive queries in an item. A list may also be cut into several items.
OMNIATTN_FN int64_t lists_per_item(const SelectedLists& s, const AttentionProblem& p) {
  return s.shared ? larger(1, item_fill(s, p) / s.query_block) : 1;
}
// Number of consecutive queries that are cut into items.
OMNIATTN_FN int64_t item_span(const SelectedLists& s, const AttentionProblem& p) {
  return s.query_block * lists_per_item(s, p);
}
OMNIATTN_FN int64_t queries_per_item(const SelectedLists& s, const AttentionProblem& p) {
  return larger(1, smaller(item_fill(s, p), smaller(item_span(s, p), p.tq)));
}
OMNIATTN_FN int64_t selected_rows(const SelectedLists& s, const AttentionProblem& p) {
  return round_up(queries_per_item(s, p) * item_heads(s, p), 2);
}
// Number of rows of a tile: all rows of an item, unless it has several lists.
OMNIATTN_FN int64_t selected_tile_rows(const SelectedLists& s, const AttentionProblem& p) {
  return s.shared ? smaller(selected_rows(s, p), kQueryBlock) : selected_rows(s, p);
}
OMNIATTN_FN int64_t items_per_span(const SelectedLists& s, const AttentionProblem& p) {
  return ceil_div(smaller(item_span(s, p), p.tq), queries_per_item(s, p));
}
OMNIATTN_FN int64_t list_count(const SelectedLists& s, const AttentionProblem& p) {
  return ceil_div(p.tq, s.query_block);  // for one batch entry and head
}
// Items per head or group of heads; the last span may leave items without queries.
OMNIATTN_FN int64_t items_per_head(const SelectedLists& s, const AttentionProblem& p) {
  return ceil_div(p.tq, item_span(s, p)) * items_per_span(s, p);
}
OMNIATTN_FN int64_t selected_items(const SelectedLists& s, const AttentionProblem& p) {
  return p.batch * (p.hq / item_heads(s, p)) * items_per_head(s, p);
}

// Index of the first entry of a list.
OMNIATTN_FN int64_t list_of(const SelectedLists& s, const AttentionProblem& p, int64_t b,
                            int64_t head, int64_t query) {
  const int64_t own = s.heads == 1 ? 0 : head / (p.hq / s.heads);
  return b * s.stride_b + own * s.stride_h + query / s.query_block * s.stride_q;
}

struct SelectedItem {
  int64_t b, kv_head, first_head, heads;
  Range queries;
  int64_t list;  // list of its first query and head
};
// Item n of a batch entry and of the heads from first_head on.
OMNIATTN_FN SelectedItem selected_item(const SelectedLists& s, const AttentionProblem& p, int64_t b,
                                       int64_t first_head, int64_t n) {
  const int64_t span = n / items_per_span(s, p), size = queries_per_item(s, p);
  const int64_t begin = span * item_span(s, p) + n % items_per_span(s, p) * size;
  const int64_t end = smaller((span + 1) * item_span(s, p), p.tq);
  return {b,
          kv_head(first_head, p.hq, p.hkv),
          first_head,
          item_heads(s, p),
          {begin, smaller(begin + size, end)},
          list_of(s, p, b, first_head, begin)};
}

// First key that is hidden from a query by its position.
OMNIATTN_FN int64_t selected_end(const SelectedLists& s, const AttentionProblem& p, int64_t query) {
  return s.causal ? larger(0, smaller(p.tk, query + 1 + bottom_right_offset(p.tq, p.tk))) : p.tk;
}

struct SelectedForwardParams {
  AttentionForwardParams attention;  // workspace: for `pack`, if keys are packed
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

// Gathered: memory for the keys and values of a tile, and their operands: K^T, V^T, and K or V as
// rows. Shared: memory for the lists of an item, sorted by block.
OMNIATTN_FN int64_t tile_key_elements(const SelectedLists& s, const AttentionProblem& p) {
  if (s.gathered) return kKeyBlock * (2 * (p.d + p.dv) + padded_row(larger(p.d, p.dv)));
  if (!s.shared) return 0;
  const int64_t lists = lists_per_item(s, p) * (group_size(p) / list_heads(s, p));
  return ceil_div(p.tk, s.block_size) + 1 + lists * s.count;
}
// Memory for q and O, m and the lanes of l; S, and q and O of a tile; its keys.
OMNIATTN_FN int64_t selected_forward_scratch(const SelectedForwardParams& x) {
  const AttentionProblem& p = x.attention.problem;
  const int64_t row = padded_row(p.d) + padded_row(p.dv);
  return selected_rows(x.lists, p) * (row + 1 + 16) +
         selected_tile_rows(x.lists, p) * (row + kKeyBlock) + tile_key_elements(x.lists, p);
}
// Memory for q and dO, both also as pairs of rows, and dQ, of an item and of a tile; Delta, shift
// and factor of a row; P and dS; the keys of a tile and their dK or dV.
OMNIATTN_FN int64_t selected_backward_scratch(const SelectedBackwardParams& x) {
  const AttentionProblem& p = x.attention.problem;
  const int64_t row = 3 * padded_row(p.d) + 2 * padded_row(p.dv);
  return selected_rows(x.lists, p) * (row + 3) +
         selected_tile_rows(x.lists, p) * (row + 2 * kKeyBlock) + tile_key_elements(x.lists, p) +
         (x.lists.gathered ? kKeyBlock * padded_row(larger(p.d, p.dv)) : 0);
}
// Memory for K^T, V^T and K of one kv head, and of all kv heads.
OMNIATTN_FN int64_t selected_packed_head(const AttentionProblem& p) {
  return packed_keys(p) * (p.d + p.dv + padded_row(p.d));
}
OMNIATTN_FN int64_t selected_packed_elements(const AttentionProblem& p) {
  return p.batch * p.hkv * selected_packed_head(p);
}
// Memory for dK and dV of all kv heads, of one split.
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
