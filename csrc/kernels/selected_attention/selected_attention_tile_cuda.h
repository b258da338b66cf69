// Tiles of up to 64 rows (query, head) and 64 selected keys, at any addresses, for the FMA kernels.
#pragma once

#include "kernels/attention/attention_fma_cuda.h"
#include "kernels/selected_attention/selected_attention_cuda.h"

namespace omniattn::gpu {

// Places of the rows and keys of a tile; -1 and null: none.
template <class T>
struct Picked {
  const T *q[kTile], *grad[kTile], *k[kTile], *v[kTile];
  int64_t query[kTile], head[kTile], key[kTile];
};
template <class T>
struct SelectedShared : GradientShared<compute_t<T>> {
  Picked<T> at;
};

// Each row or key is picked by one thread, between barriers. grad_out.data: null if not needed.
template <class T>
__device__ __forceinline__ void pick_row(const AttentionProblem& p, const HeadView& grad_out,
                                         int64_t b, int64_t query, int64_t head, bool exists, int r,
                                         Picked<T>& to) {
  to.query[r] = exists ? query : -1;
  to.head[r] = exists ? head : -1;
  to.q[r] = exists ? row_of<T>(p.q, b, query, head) : nullptr;
  to.grad[r] = exists && grad_out.data != nullptr ? row_of<T>(grad_out, b, query, head) : nullptr;
}
template <class T>
__device__ __forceinline__ void pick_key(const AttentionProblem& p, int64_t b, int64_t kv_head,
                                         int64_t key, bool exists, int n, Picked<T>& to) {
  to.key[n] = exists ? key : -1;
  to.k[n] = exists ? row_of<T>(p.k, b, key, kv_head) : nullptr;
  to.v[n] = exists ? row_of<T>(p.v, b, key, kv_head) : nullptr;
}

// Picks rows 64 n, 64 n + 1, ... of an item.
template <class T>
__device__ __forceinline__ void pick_rows(const AttentionProblem& p, const HeadView& grad_out,
                                          const SelectedItem& item, int64_t n, Picked<T>& to) {
  const int r = static_cast<int>(threadIdx.x);
  if (r >= kTile) return;
  const int64_t row = n * kTile + r, query = item.queries.begin + row / item.heads;
  pick_row(p, grad_out, item.b, query, item.first_head + row % item.heads, query < item.queries.end,
           r, to);
}
// Picks the keys 64 n, 64 n + 1, ... of an item's list.
template <class T>
__device__ __forceinline__ void pick_keys(const SelectedLists& s, const AttentionProblem& p,
                                          const SelectedItem& item, int64_t n, Picked<T>& to) {
  const int r = static_cast<int>(threadIdx.x);
  if (r >= kTile) return;
  const int64_t place = n * kTile + r, entry = place / s.block_size;
  const int64_t named = entry < s.count ? selected_block(s, p, item.list, entry) : -1;
  const int64_t key = named * s.block_size + place % s.block_size;
  // Keys that no query of the item sees are not read.
  pick_key(p, item.b, item.kv_head, key,
           named >= 0 && key < selected_end(s, p, item.queries.end - 1), r, to);
}

// True if a row sees a key.
template <class T>
__device__ __forceinline__ bool sees(const SelectedLists& s, const AttentionProblem& p,
                                     const Picked<T>& at, int r, int n) {
  return at.query[r] >= 0 && at.key[n] >= 0 && at.key[n] < selected_end(s, p, at.query[r]);
}

// Dropout factor of a pair that is seen: 0 or 1 / (1 - p).
template <class T>
__device__ __forceinline__ compute_t<T> kept(const AttentionProblem& p, int64_t b,
                                             const Picked<T>& at, int r, int n) {
  if (p.dropout.threshold == 0) return 1;
  const int64_t key = at.key[n];
  const uint64_t bits =
      keep_groups<1>(dropout_of(p), b * p.hq + at.head[r], at.query[r], key / 4 * 4);
  return (bits >> (key % 4) & 1) != 0 ? static_cast<compute_t<T>>(p.dropout.scale) : 0;
}

// Index of a row in lse.
template <class T>
__device__ __forceinline__ int64_t stat_of(const AttentionProblem& p, int64_t b,
                                           const Picked<T>& at, int r) {
  return (b * p.hq + at.head[r]) * p.lse_stride + at.query[r];
}

// Number of row tiles in an item of a call.
OMNIATTN_FN int64_t row_tiles(const SelectedLists& s, const AttentionProblem& p) {
  return ceil_div(queries_per_item(s, p) * list_heads(s, p), kTile);
}
// Number of key tiles that a list can have.
OMNIATTN_FN int64_t key_tiles(const SelectedLists& s) {
  return ceil_div(s.count * s.block_size, kTile);
}
// Item n of all batch entries and heads.
OMNIATTN_FN SelectedItem item_of_call(const SelectedLists& s, const AttentionProblem& p,
                                      int64_t n) {
  const int64_t heads = list_heads(s, p), groups = p.hq / heads, unit = n / items_per_head(s, p);
  return selected_item(s, p, unit / groups, unit % groups * heads, n % items_per_head(s, p));
}

// to(row)[first + tx + 16 j] = factor[i] * acc[i][j] for the rows r = 4 ty + i that exist.
template <class T, class F>
__device__ __forceinline__ void store_picked(
    const compute_t<T> (&acc)[4][kChunkColumns<compute_t<T>>], const compute_t<T> (&factor)[4],
    const Picked<T>& at, int64_t first, int64_t width, const F& to) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = 4 * thread_y() + i;
    if (at.query[r] < 0) continue;
    T* const row = to(at.query[r], at.head[r]);
#pragma unroll
    for (int j = 0; j < kChunkColumns<compute_t<T>>; ++j) {
      const int64_t c = first + thread_x() + 16 * j;
      if (c < width) row[c] = gpu::narrow<T>(factor[i] * acc[i][j]);
    }
  }
}

}  // namespace omniattn::gpu
