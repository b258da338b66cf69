// Few query rows against many keys (see attention_kernels_cpu.h). Keys are split at fixed places.
// Each work item reads its rows of K and V once, in memory order, for all query rows that share
// them, and leaves one partial (O, m, l) per row; merge adds the partials in key order. K
// and V are read in place, through a table of row offsets, which also serves pages. Many
// rows of one kv head (MLA: 128 heads on one latent) are multiplied by register tiles:
// S^T = K Q^T, with Q packed once per item. Rows of int8 are read as they are stored: their
// factors multiply the products q.k, and the weights of the values.
#include "kernels/attention/attention_decode_tile.h"
#include "kernels/attention/attention_kernels_cpu.h"
#include "kernels/attention/attention_softpick.h"
#include "kernels/attention/attention_stick.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "semantics/softmax.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Rows of one kv head: (head of the group, query).
struct Rows {
  int64_t b, kv_head, count;
  int64_t first_head, queries;
  Range heads;  // the kv heads of the work item
  OMNIATTN_INLINE int64_t head(int64_t r) const { return first_head + r / queries; }
  OMNIATTN_INLINE int64_t query(int64_t r) const { return r % queries; }
};

// Places of the rows of a split's keys: offsets from head 0 of k, v and their factors, in elements.
struct KeyRows {
  int64_t first;                          // the first key
  int64_t k[kTileSplitKeys + kKeyPanel];  // includes the next panel, which is prefetched
  int64_t v[kTileSplitKeys + kKeyPanel];
  int64_t k_scale[kTileSplitKeys + kKeyPanel];
  int64_t v_scale[kTileSplitKeys + kKeyPanel];
};

inline void locate_keys(const AttentionProblem& p, int64_t b, int64_t first, KeyRows& rows) {
  rows.first = first;
  const bool paged = p.pages.table != nullptr;
  const Range keys = intersect({first, first + split_keys(p) + kKeyPanel}, {0, p.tk});
  for (int64_t t = keys.begin; t < keys.end;) {
    const int64_t page = paged ? p.pages.table[b * p.pages.stride_b + t / p.pages.size] : b;
    const int64_t begin = paged ? t / p.pages.size * p.pages.size : 0;
    const int64_t end = paged ? intersect(keys, {0, begin + p.pages.size}).end : keys.end;
    for (; t < end; ++t) {
      rows.k[t - first] = page * p.k.stride_b + (t - begin) * p.k.stride_t;
      rows.v[t - first] = page * p.v.stride_b + (t - begin) * p.v.stride_t;
      if (!p.is_int8) continue;
      rows.k_scale[t - first] = page * p.k_scale.stride_b + (t - begin) * p.k_scale.stride_t;
      rows.v_scale[t - first] = page * p.v_scale.stride_b + (t - begin) * p.v_scale.stride_t;
    }
  }
}

// Number of keys processed together; their prefetched successors must stay in L2.
OMNIATTN_INLINE int64_t decode_panel(const AttentionProblem& p, int64_t heads, int64_t size) {
  constexpr int64_t kAhead = 256 << 10;
  int64_t panel = kKeyPanel;
  if (decodes_by_tiles(p)) return panel;
  while (panel > 16 && panel * heads * (p.d + p.dv) * size > kAhead) panel /= 2;
  return panel;
}

// Prefetches kKeys rows of the next panel in memory order: all heads of a key, then the next key.
// The rows of one head are too far apart for the hardware to prefetch; without this, decoding took
// 1.7 times as long (bf16, 8 heads of 128).
template <class T>
OMNIATTN_INLINE void fetch_ahead(const AttentionProblem& p, const Rows& rows, const KeyRows& at,
                                 int64_t key, int64_t first) {
  const auto fetch = [](const T* row, int64_t cols) {
    for (int64_t c = 0; c < cols; c += int64_t{64 / sizeof(T)}) __builtin_prefetch(row + c, 0, 2);
  };
  const int64_t heads = rows.heads.end - rows.heads.begin;
  int64_t t = key + first / heads, h = rows.heads.begin + first % heads;
  for (int i = 0; i < kKeys; ++i, ++h) {
    if (h == rows.heads.end) {
      h = rows.heads.begin;
      ++t;
    }
    if (t >= p.tk) return;
    fetch(static_cast<const T*>(p.k.data) + at.k[t - at.first] + h * p.k.stride_h, p.d);
    fetch(static_cast<const T*>(p.v.data) + at.v[t - at.first] + h * p.v.stride_h, p.dv);
  }
}

// A partial result: O, m, l.
template <class A>
struct Partial {
  A* o;
  int64_t width;
  OMNIATTN_INLINE A& m() const { return o[width]; }
  OMNIATTN_INLINE A& l() const { return o[width + 1]; }
};
template <class A>
OMNIATTN_INLINE void scale_partial(const Partial<A>& row, A factor) {
  using V = Vec<A>;
  for (int64_t c = 0; c < row.width; c += V::kWidth) store(row.o + c, load(row.o + c) * V(factor));
}
template <class A>
OMNIATTN_INLINE Partial<A> partial_of(const AttentionForwardParams& params, int64_t b,
                                      int64_t split, int64_t h, int64_t q) {
  const AttentionProblem& p = params.problem;
  const int64_t row = ((b * decode_splits(p) + split) * p.hq + h) * p.tq + q;
  return {static_cast<A*>(params.workspace) + row * partial_elements(p), padded_row(p.dv)};
}

// Replaces logits that break a stick by weights, as if no key came after these; `m` of the row's
// partial is the cost of its keys.
template <class A>
[[gnu::noinline]] void stick_partial(int64_t keys, A* s, const Partial<A>& row) {
  using V = Vec<A>;
  StickRow<A> stick;
  const Range columns{0, round_up(keys, V::kWidth)};
  const A cost = stick.set(s, columns);
  for_columns<A>(columns, [&](int64_t n) { store(s + n, stick.weights(n, A(0))); });
  scale_partial(row, exp(V(-cost)).v[0]);
  row.m() += cost;
}

// Replaces logits by the unnormalised weights of softpick.
template <class A>
[[gnu::noinline]] void pick_partial(int64_t keys, A* s, const Partial<A>& row) {
  const Range columns{0, round_up(keys, Vec<A>::kWidth)};
  row.l() +=
      reduce_add(pick_weights(s, columns, row.m(), [&](int64_t n, Vec<A> w) { store(s + n, w); }));
}

// Turns logits of up to 64 keys of one row into probabilities, and updates the row's partial.
template <class A>
void softmax_partial(const AttentionProblem& p, const RowScore<A>& score, int64_t keys, A* s,
                     const Partial<A>& row) {
  using V = Vec<A>;
  V top(negative_infinity<A>());
  score.to_logits(s, {0, keys}, A(1));
  for (int64_t n = 0; n < keys; n += V::kWidth) {
    const V x = select(lanes_below<A>(keys - n), load(s + n), V(negative_infinity<A>()));
    store(s + n, x);
    top = max(top, x);
  }
  const A highest = reduce_max(top);
  if (divides_rows(p.score) && highest > row.m()) {
    const A alpha = exp2(V((row.m() - highest) * exponent_factor<A>(p.score))).v[0];
    row.l() *= alpha;
    scale_partial(row, alpha);
    row.m() = highest;
  }
  if (is_stick(p.score)) {
    stick_partial(keys, s, row);
  } else if (is_softpick(p.score)) {
    pick_partial(keys, s, row);
  } else {
    with_weight(p.score, softmax_shift(row.m()), [&](auto weight) {
      V sum = zero<A>();
      for (int64_t n = 0; n < keys; n += V::kWidth) {
        const V w = weight(load(s + n)).value;
        sum += w;
        store(s + n, w);
      }
      row.l() += reduce_add(sum);
    });
  }
  if (p.dropout.threshold == 0) return;
  RowDropout<A>(p, score.b, score.h, score.q, score.key).apply(s, {0, keys});
}

// Factors of the rows of a panel of int8 keys or values: in place if they are adjacent.
template <class A>
struct RowFactors {
  const A* factors;
  A copy[kKeyPanel];

  // `at`: offsets of the rows' factors from head 0.
  void read(const AttentionProblem& p, const HeadView& x, const int64_t* at, int64_t count,
            int64_t head) {
    const A* const from = static_cast<const A*>(x.data) + head * x.stride_h;
    if (x.stride_t == 1 && p.pages.table == nullptr) {
      factors = from + at[0];
      return;
    }
    for (int64_t n = 0; n < count; ++n) copy[n] = from[at[n]];
    factors = copy;
  }
  void apply(A* s, int64_t count) const {
    for (int64_t n = 0; n < count; n += Vec<A>::kWidth) {
      store(s + n, load(s + n) * load_n(factors + n, count - n));
    }
  }
};

// Processes keys [keys.begin, keys.end), at most a panel, for all rows of one kv head. K is the
// type in which keys and values are stored.
template <class K>
void decode_keys(const AttentionForwardParams& params, const Rows& rows, const KeyRows& at,
                 int64_t split, Range keys, int64_t panel, const compute_t<K>* q,
                 Arena<compute_t<K>> arena) {
  using A = compute_t<K>;
  constexpr bool kScaled = std::is_same_v<K, Int8<A>>;
  const AttentionProblem& p = params.problem;
  const int64_t count = keys.end - keys.begin;
  bool skip = true, masked = false;
  for (int64_t r = 0; r < rows.count; r += p.tq) {
    const TileClass seen = tile_class(p.mask, rows.b, rows.head(r), {0, p.tq}, keys);
    skip = skip && seen == TileClass::skip;
    masked = masked || seen != TileClass::full;
  }
  if (skip) return;
  const bool tiles = decodes_by_tiles(p);
  KeyTile<K> x{};
  x.k = static_cast<const K*>(p.k.data) + rows.kv_head * p.k.stride_h;
  x.v = static_cast<const K*>(p.v.data) + rows.kv_head * p.v.stride_h;
  x.at_k = at.k + (keys.begin - at.first);
  x.at_v = at.v + (keys.begin - at.first);
  x.count = count;
  x.q = q;
  x.s = arena.take(rows.count * kKeyPanel);
  A* const registers = arena.take(program_elements(p));
  if (tiles) {
    x.transposed = arena.take(kKeyPanel * round_up(rows.count, kKeyPanel));
    x.wide = arena.take(kKeyPanel * padded_row(p.d > p.dv ? p.d : p.dv));
  }
  // The partials of a kv head are consecutive, like its rows.
  x.o = partial_of<A>(params, rows.b, split, rows.first_head, 0).o;
  x.ldo = partial_elements(p);
  WideRows<A> wide{};
  if (tiles) {
    wide = dot_tiles(p, rows.count, x);
  } else {
    const int64_t ahead = (rows.kv_head - rows.heads.begin) * panel;
    dot_rows(p, rows.count, x,
             [&](int64_t n) { fetch_ahead<K>(p, rows, at, keys.begin + panel, ahead + n); });
  }
  RowFactors<A> of_keys, of_values;
  if constexpr (kScaled) {
    const int64_t first = keys.begin - at.first;
    of_keys.read(p, p.k_scale, at.k_scale + first, count, rows.kv_head);
    of_values.read(p, p.v_scale, at.v_scale + first, count, rows.kv_head);
  }
  for (int64_t r = 0; r < rows.count; ++r) {
    uint64_t visible[kMaskWords] = {};
    if (masked) visible[0] = seen_bits(p.mask, rows.b, rows.head(r), rows.query(r), keys.begin);
    const RowScore<A> score{
        p, rows.b, rows.head(r), rows.query(r), keys.begin, masked ? visible : nullptr, registers};
    A* const s = x.s + r * kKeyPanel;
    if constexpr (kScaled) of_keys.apply(s, count);
    softmax_partial(p, score, count, s,
                    partial_of<A>(params, rows.b, split, rows.head(r), rows.query(r)));
    if constexpr (kScaled) of_values.apply(s, count);
  }
  tiles ? weigh_tiles(p, rows.count, x, wide) : weigh_rows(p, rows.count, x);
}

// Packs the scaled query rows of one kv head, in the layout of decode_query_elements.
template <class T>
void pack_queries(const AttentionProblem& p, const Rows& rows, compute_t<T>* q,
                  Arena<compute_t<T>> arena) {
  using A = compute_t<T>;
  const int64_t ld = padded_row(p.d);
  const bool tiles = decodes_by_tiles(p);
  const int64_t step = tiles ? kKeyPanel : rows.count;
  A* const to = tiles ? arena.take(step * ld) : q;
  for (int64_t first = 0; first < rows.count; first += step) {
    const int64_t count = intersect({first, first + step}, {0, rows.count}).end - first;
    for (int64_t r = 0; r < count; ++r) {
      const int64_t h = rows.head(first + r);
      pack_rows<T>(row_of<T>(p.q, rows.b, rows.query(first + r), h), 0, 1, p.d,
                   query_factor<A>(p, h), to + r * ld);
    }
    if (tiles) pack_bt(to, ld, p.d, count, q + first * p.d);
  }
}

template <class T, class K>
void decode_item(const AttentionForwardParams& params, void* scratch, int64_t item) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.problem;
  const int64_t splits = decode_splits(p), head_items = decode_head_items(p);
  const int64_t b = item / (splits * head_items), split = item / head_items % splits;
  const Range heads = head_items == 1 ? Range{0, p.hkv} : Range{item % p.hkv, item % p.hkv + 1};
  const int64_t group = group_size(p), head_rows = group * p.tq;

  Arena<A> arena{static_cast<A*>(scratch), decode_scratch_elements(p)};
  A* const q = arena.take((heads.end - heads.begin) * decode_query_elements(p));
  for (int64_t h = heads.begin; h < heads.end; ++h) {
    const Rows rows{b, h, head_rows, h * group, p.tq, heads};
    pack_queries<T>(p, rows, q + (h - heads.begin) * decode_query_elements(p), arena);
    for (int64_t r = 0; r < head_rows; ++r) {
      const Partial<A> row = partial_of<A>(params, b, split, rows.head(r), rows.query(r));
      for (int64_t c = 0; c < row.width; ++c) row.o[c] = A(0);
      row.m() = is_softmax(p.score) ? negative_infinity<A>() : A(0);
      row.l() = A(0);
    }
  }
  Range seen = intersect(visible_keys(p.mask, b, {0, p.tq}), block(split, split_keys(p), p.tk));
  seen.begin = seen.begin / 4 * 4;  // dropout bits come in groups of four keys
  if (is_empty(seen)) return;
  KeyRows at;
  locate_keys(p, b, split * split_keys(p), at);
  const int64_t panel = decode_panel(p, heads.end - heads.begin, sizeof(K));
  for (int64_t key = seen.begin / panel * panel; key < seen.end; key += panel) {
    const Range keys = intersect(seen, {key, key + panel});
    for (int64_t h = heads.begin; h < heads.end; ++h) {
      const Rows rows{b, h, head_rows, h * group, p.tq, heads};
      decode_keys<K>(params, rows, at, split, keys, panel,
                     q + (h - heads.begin) * decode_query_elements(p), arena);
    }
  }
}

// Final m and l of a row.
template <class A>
struct RowSums {
  A m, l;
};

// The functions below replace m of each partial of a row by its weight.
template <class A, class F>
RowSums<A> weigh_partials(const AttentionProblem& p, A sink, int64_t splits, const F& partial) {
  using V = Vec<A>;
  A m = sink;
  for (int64_t n = 0; n < splits; ++n) {
    const A top = partial(n).m();
    if (top > m) m = top;
  }
  const auto weight = [&](A top) {
    return exp2(V((top - softmax_shift(m)) * exponent_factor<A>(p.score))).v[0];
  };
  A l = p.sinks == nullptr ? A(0) : weight(sink);
  for (int64_t n = 0; n < splits; ++n) {
    const Partial<A> part = partial(n);
    part.m() = weight(part.m());
    l += part.m() * part.l();
  }
  return {m, l};
}
// For rows that break a stick.
template <class A, class F>
RowSums<A> break_partials(int64_t splits, const F& partial) {
  ExactSum<A> beyond{A(0), A(0)};
  for (int64_t n = splits - 1; n >= 0; --n) {
    const Partial<A> part = partial(n);
    const A weight = exp(Vec<A>(-beyond.total())).v[0];
    beyond.add(part.m());
    part.m() = weight;
  }
  return {beyond.value, beyond.error};
}

template <class T>
void merge_row(const AttentionForwardParams& params, int64_t item) {
  using A = compute_t<T>;
  using V = Vec<A>;
  const AttentionProblem& p = params.problem;
  const int64_t b = item / (p.hq * p.tq), h = item / p.tq % p.hq, q = item % p.tq;
  const int64_t splits = decode_splits(p), stride = p.hq * p.tq * partial_elements(p);
  const Partial<A> first = partial_of<A>(params, b, 0, h, q);
  const auto partial = [&](int64_t n) { return Partial<A>{first.o + n * stride, first.width}; };
  const auto [m, l] = is_stick(p.score)
                          ? break_partials<A>(splits, partial)
                          : weigh_partials(p, initial_maximum<A>(p, h), splits, partial);
  for (int64_t c = 0; c < p.dv; c += V::kWidth) {
    V sum = zero<A>();
    for (int64_t n = 0; n < splits; ++n) {
      const Partial<A> part = partial(n);
      sum = fma(V(part.m()), load(part.o + c), sum);
    }
    store(first.o + c, sum);
  }
  store_row(first.o, row_factor(p.score, l), p.dv, row_of<T>(params.out, b, q, h));
  store_lse(params, (b * p.hq + h) * p.lse_stride + q, row_lse(p.score, m, l, log(V(l)).v[0]));
}

void decode(const AttentionForwardParams& p, void* scratch, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, decode_items(p.problem));
  OMNIATTN_ASSERT_HAS(scratch, decode_scratch_elements(p.problem));
  dispatch(p.problem.dtype, [&](auto type) {
    using T = decltype(type);
    const auto run = [&](auto key) {
      for (int64_t i = begin; i < end; ++i) decode_item<T, decltype(key)>(p, scratch, i);
    };
    p.problem.is_int8 ? run(Int8<compute_t<T>>{}) : run(T{});
  });
}

void merge(const AttentionForwardParams& p, void*, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, merge_items(p.problem));
  dispatch(p.problem.dtype, [&](auto type) {
    for (int64_t i = begin; i < end; ++i) merge_row<decltype(type)>(p, i);
  });
}

}  // namespace

extern const AttentionDecodeKernels attention_decode_kernels_table = {decode, merge};

}  // namespace omniattn::OMNIATTN_ISA
