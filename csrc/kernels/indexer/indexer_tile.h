// Scores of the indexer (see indexer.h) for a block of queries and a tile of keys.
#pragma once

#include "kernels/attention/attention_pack.h"
#include "kernels/attention/few_rows.h"
#include "kernels/indexer/indexer.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// s[j] = sum_h w[h] act(x[h][j]) for the columns of a tile; w null: 1.
template <class A, bool kRelu>
void add_heads(const A* x, const A* w, int64_t heads, A* s) {
  using V = Vec<A>;
  constexpr int kVecs = kIndexerKeys / V::kWidth < 8 ? kIndexerKeys / V::kWidth : 8;
  for (int64_t first = 0; first < kIndexerKeys; first += kVecs * V::kWidth) {
    V sum[kVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) sum[v] = zero<A>();
    for (int64_t h = 0; h < heads; ++h) {
      const V factor(w != nullptr ? w[h] : A(1));
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) {
        const V product = load(x + h * kIndexerKeys + first + v * V::kWidth);
        sum[v] = fma(factor, kRelu ? max(zero<A>(), product) : product, sum[v]);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) store(s + first + v * V::kWidth, sum[v]);
  }
}

// Packed queries of an item, and memory for a tile of keys and its products.
template <class T>
struct IndexerRows {
  using A = compute_t<T>;
  using M = operand_t<T>;
  const IndexerParams& p;
  int64_t b;
  Range queries;
  int64_t ldq;
  M* q;
  A* products;  // (group, heads, keys)
  M* keys;

  IndexerRows(const IndexerParams& params, int64_t entry, Range of, Arena<A>& arena)
      : p(params), b(entry), queries(of), ldq(operand_row<M>(p.d)) {
    q = reinterpret_cast<M*>(arena.take(indexer_queries(p) * larger(p.heads, 1) * padded_row(p.d)));
    products = arena.take(indexer_group(p) * larger(p.heads, 1) * kIndexerKeys);
    keys = reinterpret_cast<M*>(arena.take(indexer_packed_tile(p)));
    for (int64_t t = queries.begin; t < queries.end; ++t) {
      pack_rows<T>(row_of<T>(p.q, b, t, 0), p.q.stride_h, p.heads, p.d, A(1),
                   q + (t - queries.begin) * p.heads * ldq);
    }
  }
  // Keys of a tile as column panels.
  Panels<M> panels(Range tile) const {
    if (p.workspace != nullptr) {
      const int64_t n = b * indexer_tiles(p) + tile.begin / kIndexerKeys;
      const A* const packed = static_cast<const A*>(p.workspace) + n * indexer_packed_tile(p);
      return packed_panels(reinterpret_cast<const M*>(packed), p.d);
    }
    pack_bt(row_of<T>(p.k, b, tile.begin, 0), p.k.stride_t, p.d, tile.end - tile.begin, keys);
    return packed_panels(static_cast<const M*>(keys), p.d);
  }
  // q . k for `count` queries from t on and the keys of a tile.
  void multiply(int64_t t, int64_t count, const Panels<M>& columns, int64_t tile_keys) const {
    gemm_tile<M>(q + (t - queries.begin) * p.heads * ldq, ldq, columns, products, kIndexerKeys,
                 count * p.heads, tile_keys, p.d, false);
  }
  // multiply for all queries, if their rows are few: keys are read once, in place. Packing them
  // took twice as long as everything else for a query of four heads.
  bool multiply_in_place(Range tile) const {
    if constexpr (kKeepsQueries<T>) {
      return false;
    } else {
      const int64_t count = queries.end - queries.begin;
      if (p.workspace != nullptr || count > indexer_group(p) || count * p.heads > kRowsInPlace) {
        return false;
      }
      int64_t at[kIndexerKeys];
      for (int64_t n = 0; n < kIndexerKeys; ++n) at[n] = n * p.k.stride_t;
      const T* const first = row_of<T>(p.k, b, tile.begin, 0);
      dot_rows_at(q, ldq, count * p.heads, first, at, tile.end - tile.begin, p.d, products,
                  kIndexerKeys, [&](int64_t n) {
                    // Waiting for keys took a quarter of the time.
                    constexpr int64_t kAhead = 16, kLine = 64 / static_cast<int64_t>(sizeof(T));
                    const int64_t last = smaller(n + kAhead + kKeys, p.tk - tile.begin);
                    for (int64_t i = n + kAhead; i < last; ++i) {
                      const T* const later = first + i * p.k.stride_t;
                      for (int64_t c = 0; c < p.d; c += kLine) __builtin_prefetch(later + c);
                    }
                  });
      return true;
    }
  }
  // Scores I of query t, the n-th of the multiplied queries.
  OMNIATTN_INLINE void scores(int64_t t, int64_t n, A* s) const {
    const A* const x = products + n * p.heads * kIndexerKeys;
    const A* const w =
        p.w != nullptr ? static_cast<const A*>(p.w) + (b * p.tq + t) * p.heads : nullptr;
    p.relu ? add_heads<A, true>(x, w, p.heads, s) : add_heads<A, false>(x, w, p.heads, s);
  }
};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
