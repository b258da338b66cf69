// Loss of the lightning indexer (see indexer.h) for each query t over the keys s that it sees,
// all of them or those of a list:
//
//   KL(p_t || softmax_s I_ts) = sum_s p_ts (ln p_ts - I_ts) + ln sum_s exp I_ts
//   p_ts = u_ts / sum_s u_ts     u_ts = sum_h exp(scale q_th . k_s - lse_th)   heads of attention
//
// and its gradients with respect to the indexer's q, k and w. Queries of an item share tiles of
// keys, which are copied, since each is read by few rows: u and I are in memory for one item's
// queries at most. With lists an item is one query, and u (B, Tq, n) is kept for the backward: its
// products can be nine times those of the indexer. Without lists the backward recomputes u.
//
// In the backward an owner, i.e. every splits-th item of a batch entry, adds dk to its own buffer,
// and finish sums the buffers in order. Products are in the compute type: rounded factors would
// not fit the lse of the attention.
#pragma once

#include "kernels/attention/attention_kernels_cpu.h"
#include "kernels/attention/attention_sizes_cpu.h"
#include "runtime/stream.h"

namespace omniattn {

constexpr int64_t kLossKeys = 64;     // keys of a tile
constexpr int64_t kLossQueries = 16;  // queries of an item without lists, at most
constexpr int64_t kLossKept = 2;      // numbers stored before the u of a query, see `kept`
constexpr int64_t kLossOwners = 8;    // owners in the backward

struct IndexerLossParams {
  DType dtype;
  int64_t batch, tq, tk, heads, d;  // of the indexer
  int64_t hq, hkv, attention_d;     // of the attention
  HeadView q;                       // (B, Tq, H, D)
  HeadView k;                       // (B, Tk, 1, D)
  const void* w;                    // (B, Tq, H) in the compute type; null: 1
  HeadView attention_q;             // (B, Tq, Hq, attention_d)
  HeadView attention_k;             // (B, Tk, Hkv, attention_d)
  const void* lse;                  // (B, Hq, Tq) in the compute type
  const int32_t* indices;           // (B, Tq, count), invalid entries are skipped; or null
  int64_t count;
  const uint8_t* real;  // (B, Tk), 0: no key; null: all are keys
  int64_t real_stride;
  double scale;
  bool causal, relu;
};

struct IndexerLossForwardParams {
  IndexerLossParams problem;
  void* loss;  // (B, Tq)
  // (B, Tq, kLossKept + count), or null: ln sum exp I, inf if all u are 0; 1 / sum u; u of the keys
  // that are seen, in the order of the list.
  void* kept;
};
struct IndexerLossBackwardParams {
  IndexerLossParams problem;
  const void* grad;        // (B, Tq)
  const void* kept;        // as above
  MutableHeadView q_grad;  // (B, Tq, H, D)
  MutableHeadView k_grad;  // (B, Tk, 1, D)
  void* w_grad;            // (B, Tq, H), or null
  int64_t splits;
  void* sums;  // sums of k_grad: (splits, B, Tk, padded_row(D))
};
static_assert(std::is_trivially_copyable_v<IndexerLossForwardParams>);
static_assert(std::is_trivially_copyable_v<IndexerLossBackwardParams>);

// First key that is hidden from a query by its position.
OMNIATTN_FN int64_t loss_end(const IndexerLossParams& p, int64_t query) {
  return p.causal ? larger(0, smaller(p.tk, query + 1 + bottom_right_offset(p.tq, p.tk))) : p.tk;
}
OMNIATTN_FN int64_t loss_queries(const IndexerLossParams& p) {
  return p.indices != nullptr ? 1 : larger(1, smaller(kLossQueries, p.tq));
}
OMNIATTN_FN int64_t loss_blocks(const IndexerLossParams& p) {
  return ceil_div(p.tq, loss_queries(p));
}
OMNIATTN_FN int64_t loss_splits(const IndexerLossParams& p) {
  return larger(1, smaller(ceil_div(kLossOwners, larger(1, p.batch)), loss_blocks(p)));
}

// Sizes of memory are in elements of the compute type.

OMNIATTN_FN int64_t loss_kept(const IndexerLossParams& p) { return kLossKept + p.count; }
// Row stride of I and u.
OMNIATTN_FN int64_t loss_columns(const IndexerLossParams& p) {
  return round_up(p.indices != nullptr ? p.count : p.tk, kLossKeys) + kLossKeys;
}
OMNIATTN_FN int64_t loss_sums(const IndexerLossParams& p) {
  return p.batch * p.tk * padded_row(p.d);
}
// Memory for both kinds of rows of q, the lse, a tile of keys as rows and columns, and products.
OMNIATTN_FN int64_t loss_operands(const IndexerLossParams& p) {
  const int64_t widest = larger(p.d, p.attention_d), group = p.hkv > 0 ? p.hq / p.hkv : 0;
  return loss_queries(p) * (p.heads * padded_row(p.d) + p.hq * padded_row(p.attention_d) +
                            round_up(p.hq, 16) + larger(p.heads, group) * kLossKeys) +
         kLossKeys * (padded_row(widest) + widest);
}
OMNIATTN_FN int64_t loss_forward_scratch(const IndexerLossParams& p) {
  return loss_operands(p) + 2 * loss_queries(p) * loss_columns(p);
}
// Memory for dq, dw, a tile of u, and dk of a tile.
OMNIATTN_FN int64_t loss_backward_scratch(const IndexerLossParams& p) {
  return loss_operands(p) + loss_queries(p) * (p.heads * (padded_row(p.d) + 1) + kLossKeys) +
         kLossKeys * padded_row(p.d);
}

struct IndexerLossKernels {
  // batch * blocks with loss_forward_scratch; batch * splits with
  // loss_backward_scratch; batch * tk without scratch.
  AttentionKernel<IndexerLossForwardParams> forward;
  AttentionKernel<IndexerLossBackwardParams> backward, finish;
};
OMNIATTN_KERNEL_TABLE(IndexerLossKernels, indexer_loss_kernels)

// On CUDA the products are torch's, for some queries at a time, and these kernels do the rest. A
// row is a query of a batch entry; its columns are all keys, or the keys in its list.
struct IndexerLossRows {
  IndexerLossParams problem;
  int64_t first, queries;  // queries [first, first + queries) of each batch entry
  int64_t columns;
  int64_t group;  // heads of queries for each head of keys of the attention
  // Products of the indexer (B, queries, H, columns); the backward overwrites them by their
  // gradients.
  void* products;
  const void* logits;      // of the attention, without the scale: (B, Hkv, queries, group, columns)
  void *scores, *weights;  // memory for I and u (B, queries, columns)
  void* loss;              // (B, Tq)
  void* kept;              // as above, but 1 and p instead of 1 / sum u and u; null: not wanted
};
struct IndexerLossRowsBackward {
  IndexerLossRows rows;  // with lists, without logits
  const void* grad;      // (B, Tq)
  void* w_grad;          // (B, Tq, H), or null
};

Status launch_indexer_loss(const IndexerLossRows& p, Stream stream);
Status launch_indexer_loss_backward(const IndexerLossRowsBackward& p, Stream stream);
// Copies the keys of lists: keys (B, heads, queries, columns, width) in the compute type, zeros
// where a query does not see the key; and if `places` is given, their rows (B, queries, columns)
// among B Tk, 0 for such keys.
Status launch_indexer_loss_gather(const IndexerLossRows& p, const HeadView& k, int64_t heads,
                                  int64_t width, void* keys, int64_t* places, Stream stream);

}  // namespace omniattn
