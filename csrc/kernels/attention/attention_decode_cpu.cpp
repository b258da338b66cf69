// Few query rows against many keys (see attention.h): keys are split at fixed places, each work
// item reads its K and V rows once, in memory order, for all query rows that share them, and leaves
// one partial (O, m, l) per row; merge adds the partials in key order. K and V are read as they
// are, through a table of their rows that is the same for pages. Many rows of one kv head (MLA's
// 128 heads on one latent) are multiplied by register tiles: S^T = K Q^T with Q packed once an
// item.
#include "kernels/attention/attention.h"
#include "kernels/attention/attention_tile.h"
#include "runtime/dispatch.h"
#include "semantics/softmax.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

constexpr int kRows = 4;  // query rows in registers, beside
constexpr int kKeys = 4;  // keys (in q.k) or vectors of a V row (in P V)

// The rows of one kv head: (head of the group, query).
struct Rows {
  int64_t b, kv_head, count;
  int64_t first_head, queries;
  Range heads;  // kv heads of the work item
  OMNIATTN_INLINE int64_t head(int64_t r) const { return first_head + r / queries; }
  OMNIATTN_INLINE int64_t query(int64_t r) const { return r % queries; }
};

// Where the rows of a split's keys lie: elements from the data of k and v to head 0.
struct KeyRows {
  int64_t first;                          // key
  int64_t k[kTileSplitKeys + kKeyPanel];  // and those of the panel behind, which are fetched ahead
  int64_t v[kTileSplitKeys + kKeyPanel];
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
    }
  }
}

// Sums of neighbouring lanes: those of a, then those of b.
template <class A>
OMNIATTN_INLINE Vec<A> fold(Vec<A> a, Vec<A> b) {
  const VecPair<Vec<A>> lanes = deinterleave(a, b);
  return lanes.first + lanes.second;
}
// p[i] = the sum of the lanes of x[i]: half the instructions of four reduce_add, which were a
// quarter of dot_tile's time.
template <class A>
OMNIATTN_INLINE void store_sums(A* p, const Vec<A> (&x)[4]) {
  constexpr int kWidth = Vec<A>::kWidth;
  if constexpr (kWidth < 4) {
    for (int i = 0; i < 4; ++i) p[i] = reduce_add(x[i]);
  } else {
    Vec<A> sums = fold(fold(x[0], x[1]), fold(x[2], x[3]));
#pragma GCC unroll 4
    for (int lanes = kWidth / 4; lanes > 1; lanes /= 2) sums = fold(sums, sums);
    store_n(p, sums, 4);
  }
}

// s[r][n] = q_r . k_n for up to kKeys keys, `at` elements behind k; q rows are padded with zeros.
template <class T, int kCount>
OMNIATTN_INLINE void dot_tile(const compute_t<T>* q, int64_t ldq, const T* k, const int64_t* at,
                              int64_t keys, int64_t d, compute_t<T>* s) {
  using V = Vec<compute_t<T>>;
  V acc[kCount][kKeys];
#pragma GCC unroll 4
  for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < kKeys; ++n) acc[r][n] = zero<compute_t<T>>();
  }
  const T* key[kKeys];  // a missing key repeats the last one
  for (int n = 0; n < kKeys; ++n) key[n] = k + at[n < keys ? n : keys - 1];
  for (int64_t c = 0; c < d; c += V::kWidth) {
    V x[kKeys];
#pragma GCC unroll 4
    for (int n = 0; n < kKeys; ++n) {
      x[n] = c + V::kWidth <= d ? load(key[n] + c) : load_n(key[n] + c, d - c);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
      const V row = load(q + r * ldq + c);
#pragma GCC unroll 4
      for (int n = 0; n < kKeys; ++n) acc[r][n] = fma(row, x[n], acc[r][n]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kCount; ++r) store_sums(s + r * kKeyPanel, acc[r]);
}

// o[r][0 .. cols) += sum_n s[r][n] v_n, v_n at[n] elements behind v; kCount rows, kVecs vectors of
// which the last may be partial.
template <class T, int kCount, int kVecs>
OMNIATTN_INLINE void weigh_tile(const compute_t<T>* s, const T* v, const int64_t* at, int64_t keys,
                                int64_t cols, compute_t<T>* o, int64_t ldo) {
  using V = Vec<compute_t<T>>;
  V acc[kCount][kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) acc[r][c] = load(o + r * ldo + c * V::kWidth);
  }
  const bool whole = cols >= kVecs * V::kWidth;
  for (int64_t n = 0; n < keys; ++n) {
    const T* const row = v + at[n];
    V x[kVecs];
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) {
      x[c] = whole ? load(row + c * V::kWidth) : load_n(row + c * V::kWidth, cols - c * V::kWidth);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
      const V p(s[r * kKeyPanel + n]);
#pragma GCC unroll 4
      for (int c = 0; c < kVecs; ++c) acc[r][c] = fma(p, x[c], acc[r][c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) store(o + r * ldo + c * V::kWidth, acc[r][c]);
  }
}

// f(first row, Count<rows>) for tiles of kRows rows and a remainder.
template <int kCount>
struct Count {
  static constexpr int value = kCount;
};
template <class F>
OMNIATTN_INLINE void for_row_tiles(int64_t rows, const F& f) {
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) f(r, Count<kRows>{});
  switch (rows - r) {
    case 3:
      return f(r, Count<3>{});
    case 2:
      return f(r, Count<2>{});
    case 1:
      return f(r, Count<1>{});
    default:
      return;
  }
}

// Keys taken at once: what is fetched ahead of them has to stay in L2.
OMNIATTN_INLINE int64_t decode_panel(const AttentionProblem& p, int64_t heads, int64_t size) {
  constexpr int64_t kAhead = 256 << 10;
  int64_t panel = kKeyPanel;
  if (decodes_by_tiles(p)) return panel;
  while (panel > 16 && panel * heads * (p.d + p.dv) * size > kAhead) panel /= 2;
  return panel;
}

// Fetches kKeys of the rows of the next panel, in memory order: all heads of a key, then the next
// key. The rows of one head lie too far apart for the hardware to run ahead, which costs 1.7 times
// the time (bf16, 8 heads of 128).
template <class T>
OMNIATTN_INLINE void fetch_ahead(const AttentionProblem& p, const Rows& rows, const KeyRows& at,
                                 int64_t key, int64_t first) {
  const auto fetch = [](const T* row, int64_t cols) {
    for (int64_t c = 0; c < cols; c += int64_t{64 / sizeof(T)}) __builtin_prefetch(row + c, 0, 2);
  };
  const int64_t heads = rows.heads.end - rows.heads.begin;
  for (int64_t i = first; i < first + kKeys; ++i) {
    const int64_t t = key + i / heads, h = rows.heads.begin + i % heads;
    if (t >= p.tk) return;
    fetch(static_cast<const T*>(p.k.data) + at.k[t - at.first] + h * p.k.stride_h, p.d);
    fetch(static_cast<const T*>(p.v.data) + at.v[t - at.first] + h * p.v.stride_h, p.dv);
  }
}

// One partial result: O, m, l.
template <class A>
struct Partial {
  A* o;
  int64_t width;
  OMNIATTN_INLINE A& m() const { return o[width]; }
  OMNIATTN_INLINE A& l() const { return o[width + 1]; }
};
template <class A>
OMNIATTN_INLINE Partial<A> partial_of(const AttentionForwardParams& params, int64_t b,
                                      int64_t split, int64_t h, int64_t q) {
  const AttentionProblem& p = params.problem;
  const int64_t row = ((b * decode_splits(p) + split) * p.hq + h) * p.tq + q;
  return {static_cast<A*>(params.workspace) + row * partial_elements(p), padded_row(p.dv)};
}

// Logits to probabilities for up to 64 keys of one row; updates its partial.
template <class A>
void softmax_partial(const AttentionProblem& p, const RowScore<A>& score, int64_t keys, A* s,
                     const Partial<A>& row) {
  using V = Vec<A>;
  V top(negative_infinity<A>());
  score.to_logits(s, {0, keys});
  for (int64_t n = 0; n < keys; n += V::kWidth) {
    const V x = select(lanes_below<A>(keys - n), load(s + n), V(negative_infinity<A>()));
    store(s + n, x);
    top = max(top, x);
  }
  const A highest = reduce_max(top), exponent = exponent_factor<A>(p.score);
  if (p.score.normaliser == Normaliser::softmax && highest > row.m()) {
    const V alpha = exp2(V((row.m() - highest) * exponent));
    row.l() *= alpha.v[0];
    for (int64_t c = 0; c < row.width; c += V::kWidth) store(row.o + c, load(row.o + c) * alpha);
    row.m() = highest;
  }
  const V shift(softmax_shift(row.m()));
  V sum = zero<A>();
  for (int64_t n = 0; n < keys; n += V::kWidth) {
    const V x = load(s + n);
    const V e = p.score.normaliser == Normaliser::softmax
                    ? exp2((x - shift) * V(exponent))
                    : PointwiseWeight<A>(p.score.normaliser, x).weight;
    sum += e;
    store(s + n, e);
  }
  row.l() += reduce_add(sum);
  if (p.dropout.threshold == 0) return;
  RowDropout<A>(p, score.b, score.h, score.q, score.key).apply(s, {0, keys});
}

// Some keys of one kv head, at most a panel, and the buffers of their products with its rows.
template <class T>
struct KeyTile {
  using A = compute_t<T>;
  const T *k, *v;  // of key n: at_k[n], at_v[n] elements behind
  const int64_t *at_k, *at_v;
  int64_t count;
  const A* q;            // (rows, d), padded, or Q^T in panels
  A* s;                  // (rows, kKeyPanel)
  A *transposed, *wide;  // for tiles: S^T, and k or v as padded rows
  A* o;                  // (rows, dv) of the partials, in rows of ldo
  int64_t ldo;
};

// s = Q K^T. All rows take their turn at a few keys while these are in L1; then fetch(n) for what
// comes behind.
template <class T, class F>
void dot_rows(const AttentionProblem& p, int64_t rows, const KeyTile<T>& x, const F& fetch) {
  const int64_t ldq = padded_row(p.d);
  for (int64_t n = 0; n < x.count; n += kKeys) {
    fetch(n);
    for_row_tiles(rows, [&](int64_t r, auto tile) {
      dot_tile<T, decltype(tile)::value>(x.q + r * ldq, ldq, x.k, x.at_k + n, x.count - n, p.d,
                                         x.s + r * kKeyPanel + n);
    });
  }
}

// o += P V, a few columns of V at a time for the same reason.
template <class T>
void weigh_rows(const AttentionProblem& p, int64_t rows, const KeyTile<T>& x) {
  constexpr int64_t kWidth = Vec<compute_t<T>>::kWidth;
  const auto weigh = [&](int64_t c, auto vectors) {
    for_row_tiles(rows, [&](int64_t r, auto tile) {
      weigh_tile<T, decltype(tile)::value, decltype(vectors)::value>(
          x.s + r * kKeyPanel, x.v + c, x.at_v, x.count, p.dv - c, x.o + r * x.ldo + c, x.ldo);
    });
  };
  int64_t c = 0;
  for (; c + 4 * kWidth <= p.dv; c += 4 * kWidth) weigh(c, Count<4>{});
  for (; c < p.dv; c += kWidth) weigh(c, Count<1>{});
}

template <class A>
struct WideRows {
  const A* data;
  int64_t stride;
};

// Rows in the compute type at one distance: where they are if they fit, else copied to `memory`.
template <class T>
WideRows<compute_t<T>> wide_rows(const T* from, const int64_t* at, int64_t count, int64_t cols,
                                 compute_t<T>* memory) {
  if constexpr (sizeof(T) == sizeof(compute_t<T>)) {
    const int64_t stride = count > 1 ? at[1] - at[0] : cols;
    bool fits = stride % 256 != 0;  // such rows would share a few sets of L1
    for (int64_t n = 1; fits && n < count; ++n) fits = at[n] - at[n - 1] == stride;
    if (fits) return {from + at[0], stride};
  }
  const int64_t stride = padded_row(cols);
  for (int64_t n = 0; n < count; ++n) {
    pack_rows<T>(from + at[n], 0, 1, cols, compute_t<T>(1), memory + n * stride);
  }
  return {memory, stride};
}

// to[c][r] = from[r][c].
template <class A>
void transpose_rows(const A* from, int64_t ld, int64_t rows, int64_t cols, A* to, int64_t ld_to) {
  constexpr int64_t kWidth = Vec<A>::kWidth;
  for (int64_t c = 0; c < cols; c += kWidth) {
    for (int64_t r = 0; r < rows; r += kWidth) {
      pack_transposed_block(from + r * ld + c, ld, rows - r, cols - c, cols - c, to + c * ld_to + r,
                            ld_to);
    }
  }
}

// Whether values are the first columns of their keys, as in MLA.
OMNIATTN_INLINE bool are_values_of_keys(const AttentionProblem& p) {
  return p.k.data == p.v.data && p.k.stride_b == p.v.stride_b && p.k.stride_t == p.v.stride_t &&
         p.k.stride_h == p.v.stride_h && p.dv <= p.d;
}

// The same products by register tiles; the first gives the rows of k.
template <class T>
WideRows<compute_t<T>> dot_tiles(const AttentionProblem& p, int64_t rows, const KeyTile<T>& x) {
  using A = compute_t<T>;
  const int64_t ld = round_up(rows, kKeyPanel);
  const WideRows<A> k = wide_rows(x.k, x.at_k, x.count, p.d, x.wide);
  gemm_tile<A>(k.data, k.stride, packed_panels(x.q, p.d), x.transposed, ld, x.count, rows, p.d,
               false);
  transpose_rows(x.transposed, ld, x.count, rows, x.s, kKeyPanel);
  return k;
}
template <class T>
void weigh_tiles(const AttentionProblem& p, int64_t rows, const KeyTile<T>& x,
                 const WideRows<compute_t<T>>& k) {
  const WideRows<compute_t<T>> v =
      are_values_of_keys(p) ? k : wide_rows(x.v, x.at_v, x.count, p.dv, x.wide);
  gemm_tile<compute_t<T>>(x.s, kKeyPanel, row_panels(v.data, v.stride), x.o, x.ldo, rows, p.dv,
                          x.count, true);
}

// Keys [keys.begin, keys.end), at most a panel, for all rows of one kv head.
template <class T>
void decode_keys(const AttentionForwardParams& params, const Rows& rows, const KeyRows& at,
                 int64_t split, Range keys, int64_t panel, const compute_t<T>* q,
                 Arena<compute_t<T>> arena) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.problem;
  const int64_t count = keys.end - keys.begin;
  bool skip = true, masked = false;
  for (int64_t r = 0; r < rows.count; r += p.tq) {
    const TileClass seen = classify(p.mask, rows.b, rows.head(r), {0, p.tq}, keys);
    skip = skip && seen == TileClass::skip;
    masked = masked || seen != TileClass::full;
  }
  if (skip) return;
  const bool tiles = decodes_by_tiles(p);
  KeyTile<T> x;
  x.k = static_cast<const T*>(p.k.data) + rows.kv_head * p.k.stride_h;
  x.v = static_cast<const T*>(p.v.data) + rows.kv_head * p.v.stride_h;
  x.at_k = at.k + (keys.begin - at.first);
  x.at_v = at.v + (keys.begin - at.first);
  x.count = count;
  x.q = q;
  x.s = arena.take(rows.count * kKeyPanel);
  if (tiles) {
    x.transposed = arena.take(kKeyPanel * round_up(rows.count, kKeyPanel));
    x.wide = arena.take(kKeyPanel * padded_row(p.d > p.dv ? p.d : p.dv));
  }
  // The partials of one kv head lie one behind the other, as its rows do.
  x.o = partial_of<A>(params, rows.b, split, rows.first_head, 0).o;
  x.ldo = partial_elements(p);
  WideRows<A> wide{};
  if (tiles) {
    wide = dot_tiles(p, rows.count, x);
  } else {
    const int64_t ahead = (rows.kv_head - rows.heads.begin) * panel;
    dot_rows(p, rows.count, x,
             [&](int64_t n) { fetch_ahead<T>(p, rows, at, keys.begin + panel, ahead + n); });
  }
  for (int64_t r = 0; r < rows.count; ++r) {
    uint64_t visible[kMaskWords] = {};
    if (masked) visible[0] = visible_bits(p.mask, rows.b, rows.head(r), rows.query(r), keys.begin);
    const RowScore<A> score{
        p, rows.b, rows.head(r), rows.query(r), keys.begin, masked ? visible : nullptr};
    softmax_partial(p, score, count, x.s + r * kKeyPanel,
                    partial_of<A>(params, rows.b, split, rows.head(r), rows.query(r)));
  }
  tiles ? weigh_tiles(p, rows.count, x, wide) : weigh_rows(p, rows.count, x);
}

// The scaled query rows of one kv head, as decode_query_elements says.
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

template <class T>
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
      row.m() = p.score.normaliser == Normaliser::softmax ? negative_infinity<A>() : A(0);
      row.l() = A(0);
    }
  }
  Range seen = intersect(visible_keys(p.mask, b, {0, p.tq}), block(split, split_keys(p), p.tk));
  seen.begin = seen.begin / 4 * 4;  // dropout bits come in groups of four keys
  if (is_empty(seen)) return;
  KeyRows at;
  locate_keys(p, b, split * split_keys(p), at);
  const int64_t panel = decode_panel(p, heads.end - heads.begin, sizeof(T));
  for (int64_t key = seen.begin / panel * panel; key < seen.end; key += panel) {
    const Range keys = intersect(seen, {key, key + panel});
    for (int64_t h = heads.begin; h < heads.end; ++h) {
      const Rows rows{b, h, head_rows, h * group, p.tq, heads};
      decode_keys<T>(params, rows, at, split, keys, panel,
                     q + (h - heads.begin) * decode_query_elements(p), arena);
    }
  }
}

template <class T>
void merge_row(const AttentionForwardParams& params, int64_t item) {
  using A = compute_t<T>;
  using V = Vec<A>;
  const AttentionProblem& p = params.problem;
  const int64_t b = item / (p.hq * p.tq), h = item / p.tq % p.hq, q = item % p.tq;
  const int64_t splits = decode_splits(p), stride = p.hq * p.tq * partial_elements(p);
  const Partial<A> first = partial_of<A>(params, b, 0, h, q);
  const A sink = initial_maximum<A>(p, h);
  A m = sink;
  for (int64_t n = 0; n < splits; ++n) {
    const A top = Partial<A>{first.o + n * stride, first.width}.m();
    if (top > m) m = top;
  }
  const auto weight = [&](A top) {
    return exp2(V((top - softmax_shift(m)) * exponent_factor<A>(p.score))).v[0];
  };
  A l = weight(sink);                     // 0 without one
  for (int64_t n = 0; n < splits; ++n) {  // m of a partial becomes its weight
    const Partial<A> part{first.o + n * stride, first.width};
    part.m() = weight(part.m());
    l += part.m() * part.l();
  }
  for (int64_t c = 0; c < p.dv; c += V::kWidth) {
    V sum = zero<A>();
    for (int64_t n = 0; n < splits; ++n) {
      const Partial<A> part{first.o + n * stride, first.width};
      sum = fma(V(part.m()), load(part.o + c), sum);
    }
    store(first.o + c, sum);
  }
  store_row(first.o, row_factor(p.score.normaliser, l), p.dv, row_of<T>(params.out, b, q, h));
  store_lse(params, (b * p.hq + h) * p.lse_stride + q, row_lse(p.score, m, l, log(V(l)).v[0]));
}

void decode(const AttentionForwardParams& p, void* scratch, int64_t begin, int64_t end) {
  dispatch(p.problem.dtype, [&](auto type) {
    for (int64_t i = begin; i < end; ++i) decode_item<decltype(type)>(p, scratch, i);
  });
}

void merge(const AttentionForwardParams& p, void*, int64_t begin, int64_t end) {
  dispatch(p.problem.dtype, [&](auto type) {
    for (int64_t i = begin; i < end; ++i) merge_row<decltype(type)>(p, i);
  });
}

}  // namespace

extern const AttentionDecodeKernels attention_decode_kernels_table = {decode, merge};

}  // namespace omniattn::OMNIATTN_ISA
