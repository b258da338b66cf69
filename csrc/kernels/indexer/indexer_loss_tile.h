// Tiles of keys of the indexer's loss (see indexer_loss.h), and their products with an item's
// queries: scores I and weights u.
#pragma once

#include "kernels/attention/few_rows.h"
#include "kernels/indexer/indexer_loss.h"
#include "kernels/indexer/indexer_tile.h"
#include "semantics/score_rules.h"
#include "semantics/softmax.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Queries of an item, which see the same keys except for a causal mask.
struct LossItem {
  int64_t b;
  Range queries;
  OMNIATTN_INLINE int64_t size() const { return queries.end - queries.begin; }
};
// Item n of a batch entry. Later queries see more keys, so they come first.
inline LossItem loss_item(const IndexerLossParams& p, int64_t b, int64_t n) {
  return {b, block(loss_blocks(p) - 1 - n, loss_queries(p), p.tq)};
}

// Walks the keys that an item sees, one tile at a time.
struct LossTiles {
  const IndexerLossParams& p;
  const LossItem& item;
  int64_t end;        // of the keys
  int64_t next_ = 0;  // entry of the list, or key
  int64_t count = 0;
  int64_t key[kLossKeys];

  LossTiles(const IndexerLossParams& params, const LossItem& of)
      : p(params), item(of), end(loss_end(params, of.queries.end - 1)) {}

  bool next() {
    const int32_t* const list =
        p.indices != nullptr ? p.indices + (item.b * p.tq + item.queries.begin) * p.count : nullptr;
    const uint8_t* const real = p.real != nullptr ? p.real + item.b * p.real_stride : nullptr;
    const int64_t last = list != nullptr ? p.count : end;
    for (count = 0; count < kLossKeys && next_ < last; ++next_) {
      const int64_t j = list != nullptr ? list[next_] : next_;
      if (0 <= j && j < end && (real == nullptr || real[j] != 0)) key[count++] = j;
    }
    return count > 0;
  }
  // Offsets of the keys in rows with this stride.
  void offsets(int64_t stride, int64_t* at) const {
    for (int64_t n = 0; n < count; ++n) at[n] = key[n] * stride;
  }
  // Number of the tile's keys that a query sees: keys ascend, unless they are a list of one query.
  int64_t seen(int64_t query) const {
    const int64_t limit = loss_end(p, query);
    if (p.indices != nullptr || count == 0 || key[count - 1] < limit) return count;
    int64_t n = 0;
    while (key[n] < limit) ++n;
    return n;
  }
};

constexpr int64_t kLossAhead = 8;  // keys prefetched before they are read

template <class T>
OMNIATTN_INLINE void fetch_row(const T* row, int64_t cols) {
  for (int64_t c = 0; c < cols; c += 64 / static_cast<int64_t>(sizeof(T))) {
    __builtin_prefetch(row + c);
  }
}

// Packed queries of an item, and the operands of a tile.
template <class T>
struct LossOperands {
  using A = compute_t<T>;
  const IndexerLossParams& p;
  const LossItem& item;
  int64_t ldq, ld_attention, group;
  A *q, *attention_q, *lse, *products, *rows, *columns;

  LossOperands(const IndexerLossParams& params, const LossItem& of, Arena<A>& arena)
      : p(params),
        item(of),
        ldq(padded_row(params.d)),
        ld_attention(padded_row(params.attention_d)),
        group(params.hkv > 0 ? params.hq / params.hkv : 0) {
    const int64_t queries = loss_queries(p), widest = larger(p.d, p.attention_d);
    q = arena.take(queries * p.heads * ldq);
    attention_q = arena.take(queries * p.hq * ld_attention);
    lse = arena.take(queries * round_up(p.hq, 16));
    products = arena.take(queries * larger(p.heads, group) * kLossKeys);
    rows = arena.take(kLossKeys * padded_row(widest));
    columns = arena.take(kLossKeys * widest);
  }
  void pack_queries() const {
    for (int64_t n = 0; n < item.size(); ++n) {
      const int64_t t = item.queries.begin + n;
      pack_rows<T>(row_of<T>(p.q, item.b, t, 0), p.q.stride_h, p.heads, p.d, A(1),
                   q + n * p.heads * ldq);
    }
  }
  // Packs attention's q and lse in units of ln 2, ordered (kv head, query, head of its group).
  void pack_attention() const {
    const A unit = static_cast<A>(p.scale * kLog2E);
    for (int64_t h = 0; h < p.hq; ++h) {
      const A* const all = static_cast<const A*>(p.lse) + (item.b * p.hq + h) * p.tq;
      for (int64_t n = 0; n < item.size(); ++n) {
        const int64_t t = item.queries.begin + n, row = attention_row(h / group, n) + h % group;
        pack_rows<T>(row_of<T>(p.attention_q, item.b, t, h), 0, 1, p.attention_d, unit,
                     attention_q + row * ld_attention);
        // A head that saw no key has lse -inf.
        lse[row] = all[t] == negative_infinity<A>() ? A(0) : all[t] * static_cast<A>(kLog2E);
      }
    }
  }
  OMNIATTN_INLINE int64_t attention_row(int64_t kv_head, int64_t n) const {
    return (kv_head * item.size() + n) * group;
  }
  // Loads the keys of a tile as rows, with zeros up to a whole tile, and as columns.
  void load_keys(const HeadView& k, int64_t head, int64_t d, const LossTiles& tile) const {
    const int64_t ld = padded_row(d);
    for (int64_t n = 0; n < tile.count; ++n) {
      if (n + kLossAhead < tile.count) {
        fetch_row(row_of<T>(k, item.b, tile.key[n + kLossAhead], head), d);
      }
      pack_rows<T>(row_of<T>(k, item.b, tile.key[n], head), 0, 1, d, A(1), rows + n * ld);
    }
    fill_zero(rows + tile.count * ld, (kLossKeys - tile.count) * ld);
    pack_bt(rows, ld, d, kLossKeys, columns);
  }
  // products = rows of x times the columns of a tile.
  void multiply_columns(const A* x, int64_t ld, int64_t count, int64_t d) const {
    gemm_tile<A>(x, ld, packed_panels(static_cast<const A*>(columns), d), products, kLossKeys,
                 count, kLossKeys, d, false);
  }
  // products = rows of x times keys; few rows of one query read keys in place.
  bool reads_in_place(int64_t count) const { return p.indices != nullptr && count <= kRowsInPlace; }
  void multiply(const A* x, int64_t ld, int64_t count, const HeadView& k, int64_t head, int64_t d,
                const LossTiles& tile) const {
    if (!reads_in_place(count)) {
      load_keys(k, head, d, tile);
      return multiply_columns(x, ld, count, d);
    }
    int64_t at[kLossKeys];
    tile.offsets(k.stride_t, at);
    const T* const first = row_of<T>(k, item.b, 0, head);
    dot_rows_at(x, ld, count, first, at, tile.count, d, products, kLossKeys, [&](int64_t n) {
      for (int64_t i = n + kLossAhead; i < smaller(n + kLossAhead + kKeys, tile.count); ++i) {
        fetch_row(first + at[i], d);
      }
    });
  }
  // Multiplies the indexer's queries of the item with a tile.
  void multiply_index(const LossTiles& tile) const {
    multiply(q, ldq, item.size() * p.heads, p.k, 0, p.d, tile);
  }
  OMNIATTN_INLINE A* index_products(int64_t n) const { return products + n * p.heads * kLossKeys; }
  OMNIATTN_INLINE const A* weights(int64_t n) const {
    const int64_t row = item.b * p.tq + item.queries.begin + n;
    return p.w != nullptr ? static_cast<const A*>(p.w) + row * p.heads : nullptr;
  }
  // Scores I of the n-th query.
  OMNIATTN_INLINE void scores(int64_t n, A* s) const {
    const A *const x = index_products(n), *const w = weights(n);
    p.relu ? add_heads<A, true>(x, w, p.heads, s) : add_heads<A, false>(x, w, p.heads, s);
  }
  // Weights u of the n-th query for a tile, to u[n * ldu ..].
  void attention_weights(const LossTiles& tile, A* u, int64_t ldu) const {
    using V = Vec<A>;
    for (int64_t n = 0; n < item.size(); ++n) fill_zero(u + n * ldu, kLossKeys);
    for (int64_t head = 0; head < p.hkv; ++head) {
      const int64_t first = attention_row(head, 0);
      multiply(attention_q + first * ld_attention, ld_attention, item.size() * group, p.attention_k,
               head, p.attention_d, tile);
      for (int64_t row = 0; row < item.size() * group; ++row) {
        A *const to = u + row / group * ldu, *const x = products + row * kLossKeys;
        const V shift(lse[first + row]);
        for (int64_t c = 0; c < kLossKeys; c += V::kWidth) {
          store(to + c, load(to + c) + exp2(load(x + c) - shift));
        }
      }
    }
  }
};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
