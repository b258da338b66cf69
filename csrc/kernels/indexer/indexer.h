// Lightning indexer of DeepSeek sparse attention (DeepSeek-AI 2025, arXiv 2512.02556). Selects for
// each query t the `count` keys s with the largest
//
//   I_ts = sum_h w_th relu(q_th . k_s)      s < Tk, and s <= t + Tk - Tq under a causal mask
//
// in descending order; at equal scores the first key, or if `recent` the last, comes first. -0
// equals +0, NaN is less than -inf; short lists end in -1. Scores are sums in the compute type.
//
// An item is a block of queries and a range of keys. It walks the keys once, from those preferred
// at equal scores to the others, so a later key can enter a list only with a score larger than the
// count-th so far. Each query collects such keys, and drops all but the best `count` when its
// memory is full. Few queries split their keys over items, whose candidates are then merged; the
// order of candidates is total, so splits do not change the result.
#pragma once

#include "kernels/attention/attention_kernels_cpu.h"
#include "kernels/attention/attention_sizes_cpu.h"
#include "runtime/stream.h"

namespace omniattn {

struct IndexerParams {
  DType dtype;
  int64_t batch, tq, tk, heads, d;
  int64_t count;        // entries of a list
  HeadView q;           // (B, Tq, H, D)
  HeadView k;           // (B, Tk, 1, D)
  const void* w;        // (B, Tq, H) in the compute type; null: 1
  const uint8_t* real;  // (B, Tk), 0: never chosen; null: all may be
  int64_t real_stride;
  bool causal, relu, recent;
  int32_t* index;  // (B, Tq, count)
  void* scores;    // (B, Tq, count) in the compute type, or null
  // On the CPU k as column panels (indexer_packed), or null: items pack their own tiles. On
  // CUDA the candidates of each block.
  void* workspace;
  int64_t splits;  // of the keys, on the CPU
  void* parts;     // candidates of each split (indexer_parts), or null
};
static_assert(std::is_trivially_copyable_v<IndexerParams>);

constexpr int64_t kIndexerKeys = 64;        // keys of a tile
constexpr int64_t kIndexerRows = 512;       // rows (query, head) of an item
constexpr int64_t kIndexerQueries = 32;     // queries of an item, at most
constexpr int64_t kIndexerItems = 64;       // keys are split to get this many items,
constexpr int64_t kIndexerSplitKeys = 512;  // with at least this many keys each

// First key that is hidden from a query by its position.
OMNIATTN_FN int64_t indexer_end(const IndexerParams& p, int64_t query) {
  return p.causal ? larger(0, smaller(p.tk, query + 1 + bottom_right_offset(p.tq, p.tk))) : p.tk;
}
// Number of entries of a list that can be keys.
OMNIATTN_FN int64_t indexer_kept(const IndexerParams& p) { return smaller(p.count, p.tk); }

// CPU only. Sizes of memory are in elements of the compute type.

OMNIATTN_FN int64_t indexer_queries(const IndexerParams& p) {
  const int64_t fill = kIndexerRows / larger(p.heads, 1);
  return larger(1, smaller(smaller(fill, kIndexerQueries), p.tq));
}
OMNIATTN_FN int64_t indexer_blocks(const IndexerParams& p) {
  return ceil_div(p.tq, indexer_queries(p));
}
OMNIATTN_FN int64_t indexer_tiles(const IndexerParams& p) { return ceil_div(p.tk, kIndexerKeys); }
OMNIATTN_FN int64_t indexer_splits(const IndexerParams& p) {
  const int64_t wanted = ceil_div(kIndexerItems, larger(1, p.batch * indexer_blocks(p)));
  return larger(1, smaller(wanted, p.tk / kIndexerSplitKeys));
}
// Number of queries whose products one call computes, so that it has enough rows.
OMNIATTN_FN int64_t indexer_group(const IndexerParams& p) {
  return larger(1, smaller(64 / larger(p.heads, 1), indexer_queries(p)));
}
// Candidates of a query: twice the kept ones, so that dropping others is rare, plus a tile.
OMNIATTN_FN int64_t indexer_capacity(const IndexerParams& p) {
  return smaller(larger(2 * indexer_kept(p), 256), indexer_tiles(p) * kIndexerKeys) + kIndexerKeys;
}
// Size of one packed tile, and of all packed keys.
OMNIATTN_FN int64_t indexer_packed_tile(const IndexerParams& p) { return kIndexerKeys * p.d; }
OMNIATTN_FN int64_t indexer_packed(const IndexerParams& p) {
  return p.batch * indexer_tiles(p) * indexer_packed_tile(p);
}
// Candidates of a query that a split leaves: scores, keys, and their number.
OMNIATTN_FN int64_t indexer_part_capacity(const IndexerParams& p) {
  return smaller(indexer_kept(p), ceil_div(indexer_tiles(p), p.splits) * kIndexerKeys);
}
OMNIATTN_FN int64_t indexer_part(const IndexerParams& p) {
  return 2 * indexer_part_capacity(p) + 1;
}
OMNIATTN_FN int64_t indexer_parts(const IndexerParams& p) {
  return p.batch * p.tq * p.splits * indexer_part(p);
}
// Memory for rows of q, products, a tile of k, candidates of each query, and lists being sorted.
OMNIATTN_FN int64_t indexer_scratch(const IndexerParams& p) {
  const int64_t queries = indexer_queries(p);
  return queries * larger(p.heads, 1) * padded_row(p.d) +
         indexer_group(p) * larger(p.heads, 1) * kIndexerKeys + indexer_packed_tile(p) +
         2 * queries * indexer_capacity(p) + 2 * indexer_kept(p);
}
OMNIATTN_FN int64_t indexer_merge_scratch(const IndexerParams& p) {
  return 2 * p.splits * indexer_part_capacity(p) + 2 * indexer_kept(p);
}

struct IndexerKernels {
  // batch * tiles without scratch; batch * blocks * splits with indexer_scratch; if keys are split,
  // batch * tq with indexer_merge_scratch.
  AttentionKernel<IndexerParams> pack, choose, merge;
};
OMNIATTN_PRODUCT_KERNEL_TABLE(IndexerKernels, indexer_kernels)

// CUDA only: a block processes one query after another.
constexpr int64_t kIndexerThreads = 256;
constexpr int64_t kIndexerBlocks = 1024;
OMNIATTN_FN int64_t indexer_cuda_blocks(const IndexerParams& p) {
  return smaller(p.batch * p.tq, kIndexerBlocks);
}
OMNIATTN_FN int64_t indexer_cuda_capacity(const IndexerParams& p) {
  return smaller(larger(2 * indexer_kept(p), 1024), round_up(p.tk, kIndexerThreads)) +
         kIndexerThreads;
}
// Workspace: scores as integers, then keys.
OMNIATTN_FN int64_t indexer_cuda_workspace(const IndexerParams& p) {
  return 2 * indexer_cuda_blocks(p) * indexer_cuda_capacity(p);
}
Status launch_dsa_indexer(const IndexerParams& p, Stream stream);

// Maps scores to unsigned integers in the same order; NaN maps to 0.
OMNIATTN_FN uint32_t order_of_score(float x) {
  const auto bits = __builtin_bit_cast(uint32_t, x + 0.0f);
  return x != x ? 0 : bits >> 31 != 0 ? ~bits : bits | uint32_t{1} << 31;
}
OMNIATTN_FN uint64_t order_of_score(double x) {
  const auto bits = __builtin_bit_cast(uint64_t, x + 0.0);
  return x != x ? 0 : bits >> 63 != 0 ? ~bits : bits | uint64_t{1} << 63;
}
OMNIATTN_FN float score_of_order(uint32_t order) {
  const uint32_t sign = uint32_t{1} << 31;
  return __builtin_bit_cast(float, order >= sign ? order ^ sign : ~order);
}
OMNIATTN_FN double score_of_order(uint64_t order) {
  const uint64_t sign = uint64_t{1} << 63;
  return __builtin_bit_cast(double, order >= sign ? order ^ sign : ~order);
}
template <class A>
using order_t = decltype(order_of_score(A{}));

}  // namespace omniattn
