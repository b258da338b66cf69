// What the attention kernels share: packing of rows, score views, logits and masks of one tile row.
#pragma once

#include "kernels/attention/attention.h"
#include "runtime/assert.h"
#include "runtime/gemm_tile.h"
#include "runtime/vec.h"
#include "semantics/softmax.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

constexpr int64_t kMaskWords = kKeyBlock / 64;  // visibility of one query for one key block

template <class T>
OMNIATTN_INLINE const T* row_of(const HeadView& x, int64_t b, int64_t t, int64_t h) {
  return static_cast<const T*>(x.data) + b * x.stride_b + t * x.stride_t + h * x.stride_h;
}
template <class T>
OMNIATTN_INLINE T* row_of(const MutableHeadView& x, int64_t b, int64_t t, int64_t h) {
  return static_cast<T*>(x.data) + b * x.stride_b + t * x.stride_t + h * x.stride_h;
}

// Hands out consecutive parts of a buffer of which `left` elements are unused.
template <class A>
struct Arena {
  A* next;
  int64_t left;
  OMNIATTN_INLINE A* take(int64_t elements) {
    OMNIATTN_ASSERT(0 <= elements && elements <= left);
    A* const part = next;
    next += elements;
    left -= elements;
    return part;
  }
};

// to[r][c] = factor * from[r][c] for c < cols, then 0, in rows of padded_row(cols).
template <class T, class M>
void pack_rows(const T* from, int64_t stride, int64_t rows, int64_t cols, compute_t<T> factor,
               M* to) {
  using V = Vec<compute_t<T>>;
  const int64_t width = padded_row(cols);
  for (int64_t r = 0; r < rows; ++r, from += stride, to += width) {
    int64_t c = 0;
    for (; c + V::kWidth <= cols; c += V::kWidth) store(to + c, load(from + c) * V(factor));
    for (; c < width; c += V::kWidth) store(to + c, load_n(from + c, cols - c) * V(factor));
  }
}

template <class A>
OMNIATTN_INLINE void fill_zero(A* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = A{};
}

// Rows that products read as B, in rows of padded_row(cols): of bf16 operands in pairs of rows.
template <class T, class M>
void pack_operand_rows(const T* from, int64_t stride, int64_t rows, int64_t cols, M* to) {
  if constexpr (Operand<M>::kStep == 1) {
    pack_rows<T>(from, stride, rows, cols, compute_t<T>(1), to);
  } else {
    pack_rows(from, stride, rows, cols, to, padded_row(cols), padded_row(cols));
  }
}

// Whether T is multiplied as it is stored. Scaled queries would round once more: logits and dS are
// scaled instead.
template <class T>
constexpr bool kKeepsQueries = sizeof(operand_t<T>) < sizeof(compute_t<T>);

// Elements of one packed column.
template <class M>
OMNIATTN_INLINE int64_t packed_depth(int64_t d) {
  return k_steps<M>(d) * Operand<M>::kStep;
}

// Key rows (count, d) as column panels, zero up to column `capacity`.
template <class T, class M>
void pack_keys_as_columns(const T* from, int64_t stride, int64_t d, int64_t count, int64_t capacity,
                          M* to) {
  pack_bt(from, stride, d, count, to);
  const int64_t packed = round_up(count, kPanelCols<M>), depth = packed_depth<M>(d);
  fill_zero(to + packed * depth, (capacity - packed) * depth);
}

// to[c] = factor * from[c], narrowed to T.
template <class T>
OMNIATTN_INLINE void store_row(const compute_t<T>* from, compute_t<T> factor, int64_t cols, T* to) {
  using V = Vec<compute_t<T>>;
  int64_t c = 0;
  for (; c + V::kWidth <= cols; c += V::kWidth) store(to + c, load(from + c) * V(factor));
  if (c < cols) store_n(to + c, load(from + c) * V(factor), cols - c);
}

// Lane n is set when bit n is.
template <class A>
OMNIATTN_INLINE Mask<A> lanes_of(uint64_t bits) {
#if defined(__AVX512F__)
  return {static_cast<unsigned>(bits) & Mask<A>::kAll};
#else
  typename Vec<A>::Bits lane = {};
#pragma GCC unroll 8
  for (int n = 0; n < Vec<A>::kWidth; ++n) lane[n] = 1 << n;
  const auto low = static_cast<int>(bits & ((1u << Vec<A>::kWidth) - 1));
  return {((lane & low) == lane)};
#endif
}

// n elements of a row, converted to A; lanes from n on are 0.
template <class A, class S>
OMNIATTN_INLINE Vec<A> load_as(const S* row, int64_t n) {
  if constexpr (sizeof(compute_t<S>) == sizeof(A)) {
    return load_n(row, n);
  } else {
    A lanes[Vec<A>::kWidth] = {};
    for (int64_t i = 0; i < Vec<A>::kWidth && i < n; ++i) lanes[i] = row[i];
    return load(lanes);
  }
}

// f(row) with the storage type of a score view, which is not wider than A.
template <class A, class F>
OMNIATTN_INLINE void with_score_row(const ScoreView& x, int64_t offset, const F& f) {
  if (x.dtype == DType::f32) return f(static_cast<const float*>(x.data) + offset);
  if constexpr (sizeof(A) == 8) {
    f(static_cast<const double*>(x.data) + offset);
  } else {
    if (x.dtype == DType::bf16) return f(static_cast<const bf16*>(x.data) + offset);
    f(static_cast<const f16*>(x.data) + offset);
  }
}

// f(weight), where weight(x) is the weight of a logit x and its derivative: e^(x - shift) of a
// softmax, whose rows are normalised later, or that of another normaliser. Loops inside f hold no
// branch.
template <class A, class F>
OMNIATTN_INLINE void with_weight(const Score& score, A shift, const F& f) {
  using V = Vec<A>;
  const auto power = [](V x) OMNIATTN_LAMBDA {
    const V e = exp2(x);
    return score_rules::ValueAndSlope<V>{e, e};
  };
  if (!is_softmax(score)) {
    with_score_rule<ScoreRole::normaliser>(score.normaliser, [&](auto rule) OMNIATTN_LAMBDA {
      f([=](V x) OMNIATTN_LAMBDA { return rule.at(x); });
    });
  } else if (score.natural) {
    constexpr auto kFactor = static_cast<A>(kLog2E);
    f([=](V x) OMNIATTN_LAMBDA { return power((x - V(shift)) * V(kFactor)); });
  } else {
    f([=](V x) OMNIATTN_LAMBDA { return power(x - V(shift)); });
  }
}

// f(n) for each vector of a range of columns.
template <class A, class F>
OMNIATTN_INLINE void for_columns(Range columns, const F& f) {
  for (int64_t n = columns.begin; n < columns.end; n += Vec<A>::kWidth) f(n);
}

template <class A>
OMNIATTN_INLINE void scale_row(A* x, Range columns, A factor) {
  if (factor == A(1)) return;
  for_columns<A>(columns, [&](int64_t n) { store(x + n, load(x + n) * Vec<A>(factor)); });
}

// One query row against keys [key, key + 128): everything that is not q.k. Each term is a pass of
// its own over the row, which lies in L1: branches for each vector took more time.
template <class A>
struct RowScore {
  const AttentionProblem& p;
  int64_t b, h, q, key;
  const uint64_t* visible;  // kMaskWords words; null: all keys are visible

  // Turns x = pre * q.k into logits: transform, bias, table term, mask. Where there is a transform
  // and `slope` is not null it receives the derivative.
  void to_logits(A* x, Range columns, A* slope = nullptr) const {
    using V = Vec<A>;
    if (p.score.transform != ScoreKind::none) {
      with_score_rule<ScoreRole::transform>(p.score.transform, [&](auto rule) OMNIATTN_LAMBDA {
        for_columns<A>(columns, [&](int64_t n) {
          const auto g = rule.at(load(x + n));
          if (slope != nullptr) store(slope + n, g.slope);
          store(x + n, V(static_cast<A>(p.score.post)) * g.value);
        });
      });
    }
    if (p.bias.data != nullptr) {
      const ScoreView& s = p.bias;
      const int64_t offset = b * s.stride_b + h * s.stride_h + q * s.stride_q + key;
      with_score_row<A>(s, offset, [&](const auto* row) {
        for_columns<A>(columns, [&](int64_t n) {
          const V bias = load_as<A>(row + n, p.tk - key - n);
          store(x + n, load(x + n) + bias);
        });
      });
    }
    if (p.relative.data != nullptr) {
      const RelativeView& r = p.relative;
      const A* const row = static_cast<const A*>(r.data) + r.origin + b * r.stride_b +
                           h * r.stride_h + q * r.stride_q + key;
      for_columns<A>(columns, [&](int64_t n) { store(x + n, load(x + n) + load(row + n)); });
    }
    hide(x, columns, negative_infinity<A>());
  }

  // Sets hidden keys to `value`.
  OMNIATTN_INLINE void hide(A* x, Range columns, A value) const {
    if (visible == nullptr) return;
    for_columns<A>(columns, [&](int64_t n) {
      const Mask<A> seen = lanes_of<A>(visible[n / 64] >> (n % 64));
      store(x + n, select(seen, load(x + n), Vec<A>(value)));
    });
  }
};

// Factors of dropout on keys [key, key + 128) of one query: 0 or 1 / (1 - p).
template <class A>
struct RowDropout {
  uint64_t keep[kMaskWords];
  A scale;

  RowDropout(const AttentionProblem& p, int64_t b, int64_t h, int64_t q, int64_t key)
      : scale(static_cast<A>(p.dropout.scale)) {
    for (int64_t w = 0; w < kMaskWords; ++w) {
      keep[w] = keep_bits(p.dropout, (p.first_batch + b) * p.hq + h, q, key + 64 * w);
    }
  }
  OMNIATTN_INLINE void apply(A* x, Range columns) const {
    for_columns<A>(columns, [&](int64_t n) {
      const Mask<A> kept = lanes_of<A>(keep[n / 64] >> (n % 64));
      store(x + n, load(x + n) * select(kept, Vec<A>(scale), zero<A>()));
    });
  }
};

// Queries of a tile share one clipped range of keys per group, so that the triangle of a causal
// tile costs little more than its area.
constexpr int64_t kRowGroup = 24;
constexpr int64_t kRowGroups = kQueryBlock / kRowGroup;

// What one tile (a query block x a key block) has to compute. Ranges of keys are relative to the
// block.
struct TilePlan {
  Range queries, keys;        // positions; keys.end is the block's end or Tk
  bool masked[kRowGroups];    // some key of the group's range is hidden from some row
  Range seen[kRowGroups];     // holds every key visible to the group; empty: none
  Range columns[kRowGroups];  // seen, rounded to multiples of 16
  uint64_t visible[kQueryBlock][kMaskWords];  // of rows in masked groups

  OMNIATTN_INLINE int64_t rows() const { return queries.end - queries.begin; }
  OMNIATTN_INLINE int64_t groups() const { return ceil_div(rows(), kRowGroup); }
  OMNIATTN_INLINE bool is_full() const {
    for (int64_t g = 0; g < groups(); ++g) {
      if (columns[g].begin != 0 || columns[g].end != kKeyBlock) return false;
    }
    return true;
  }
  OMNIATTN_INLINE Range group_rows(int64_t g) const {
    return intersect({g * kRowGroup, (g + 1) * kRowGroup}, {0, rows()});
  }
};

// False: no key of the tile is visible to any of its queries.
inline bool plan_tile(const AttentionProblem& p, int64_t b, int64_t h, Range queries, Range keys,
                      TilePlan& plan) {
  OMNIATTN_ASSERT(contains({0, p.tq}, queries) && contains({0, p.tk}, keys));
  OMNIATTN_ASSERT(0 <= b && b < p.batch && 0 <= h && h < p.hq);
  plan.queries = queries;
  plan.keys = keys;
  const Range tile = visible_keys_in(p.mask, b, h, queries, keys);
  if (is_empty(tile)) return false;
  bool any = false;
  for (int64_t g = 0; g < plan.groups(); ++g) {
    const Range rows = plan.group_rows(g);
    const Range q = {queries.begin + rows.begin, queries.begin + rows.end};
    const Range seen = visible_keys_in(p.mask, b, h, q, tile);
    plan.seen[g] = plan.columns[g] = {0, 0};
    plan.masked[g] = false;
    if (is_empty(seen)) continue;
    plan.seen[g] = {seen.begin - keys.begin, seen.end - keys.begin};
    plan.columns[g] = {plan.seen[g].begin / 16 * 16, round_up(plan.seen[g].end, 16)};
    plan.masked[g] = !all_visible(
        p.mask, b, h, q, {keys.begin + plan.columns[g].begin, keys.begin + plan.columns[g].end});
    any = any || !plan.masked[g];
    if (!plan.masked[g]) continue;
    uint64_t some = 0;
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      for (int64_t w = 0; w < kMaskWords; ++w) {
        plan.visible[r][w] = visible_bits(p.mask, b, h, queries.begin + r, keys.begin + 64 * w);
        some |= plan.visible[r][w];
      }
    }
    if (some == 0) plan.seen[g] = plan.columns[g] = {0, 0};
    any = any || some != 0;
  }
  return any;
}

// Plans the tiles of a block of queries that hold a visible pair, in order.
struct KeyTiles {
  const AttentionProblem& p;
  KeyCursor blocks;

  KeyTiles(const AttentionProblem& problem, int64_t b, int64_t h, Range queries)
      : p(problem), blocks(problem.mask, b, h, queries, kKeyBlock) {}
  bool next(TilePlan& plan) {
    for (int64_t n; (n = blocks.next()) >= 0;) {
      if (plan_tile(p, blocks.b, blocks.h, blocks.q, block(n, kKeyBlock, p.tk), plan)) return true;
    }
    return false;
  }
};

// The same of a block of keys.
struct QueryTiles {
  const AttentionProblem& p;
  QueryCursor blocks;

  QueryTiles(const AttentionProblem& problem, int64_t b, int64_t h, Range keys)
      : p(problem), blocks(problem.mask, b, h, keys, kQueryBlock) {}
  bool next(TilePlan& plan) {
    for (int64_t n; (n = blocks.next()) >= 0;) {
      if (plan_tile(p, blocks.b, blocks.h, block(n, kQueryBlock, p.tq), blocks.k, plan))
        return true;
    }
    return false;
  }
};

// The rows that a tile needs of a (Tq, Tk) array. They are too short for the hardware to run ahead,
// so they are fetched while products are computed, a few between any two register tiles: all at
// once they would wait for each other.
struct TileRows {
  const char* data;  // of the first query and key; null: none
  int64_t stride, element, next;

  OMNIATTN_INLINE void fetch(const TilePlan& plan, int64_t count) {
    for (; next < plan.rows() && count > 0; ++next, --count) {
      const Range seen = plan.seen[next / kRowGroup];
      for (int64_t c = seen.begin * element; c < seen.end * element; c += 64) {
        __builtin_prefetch(data + next * stride + c, 0, 2);
      }
    }
  }
};
OMNIATTN_INLINE TileRows tile_rows_of(const void* data, int64_t stride, int64_t element) {
  return {static_cast<const char*>(data), stride * element, element, 0};
}

OMNIATTN_INLINE TileRows bias_rows(const AttentionProblem& p, int64_t b, int64_t h,
                                   const TilePlan& plan) {
  const ScoreView& s = p.bias;
  if (s.data == nullptr || s.stride_q == 0) return {};
  const int64_t size = size_of(s.dtype);
  const int64_t offset = b * s.stride_b + h * s.stride_h + plan.queries.begin * s.stride_q;
  return tile_rows_of(static_cast<const char*>(s.data) + (offset + plan.keys.begin) * size,
                      s.stride_q, size);
}

// gemm_tile, with fetch() before each register tile.
template <class M, class F>
void gemm_tile_fetching(const M* a, int64_t lda, Panels<M> b, compute_t<M>* c, int64_t ldc,
                        int64_t m, int64_t n, int64_t k, bool accumulate, const F& fetch) {
  constexpr int64_t kRows = tile_rows(kTileVecs), kCols = kPanelCols<M>;
  for (int64_t col = 0; col < n; col += kCols) {
    for (int64_t r = 0; r < m; r += kRows) {
      fetch();
      gemm_tile<M>(a + r * lda, lda, b.at(0, col), c + r * ldc + col, ldc,
                   m - r < kRows ? m - r : kRows, n - col < kCols ? n - col : kCols, k, accumulate);
    }
  }
}

// x = A B^T for the rows of a plan's groups: rows [rows x k] in rows of lda, packed keys as column
// panels. What comes next is fetched meanwhile.
template <class M>
void multiply_by_keys(const TilePlan& plan, const M* rows, int64_t lda, int64_t k, const M* packed,
                      compute_t<M>* x, TileRows next = {}) {
  constexpr int64_t kFetchRows = 3;  // of 96, between 32 register tiles of AVX-512
  for (int64_t panel = 0; panel < kKeyBlock; panel += kPanelCols<M>) {
    for (int64_t g = 0; g < plan.groups(); ++g) {
      const Range columns = intersect(plan.columns[g], {panel, panel + kPanelCols<M>});
      if (is_empty(columns)) continue;
      const Range r = plan.group_rows(g);
      // Panels are computed from their first column; the clipped end is what saves work.
      const M* const a = rows + r.begin * lda;
      const Panels<M> b = packed_panels(packed + panel * packed_depth<M>(k), k);
      compute_t<M>* const c = x + r.begin * kKeyBlock + panel;
      const int64_t m = r.end - r.begin, n = columns.end - panel;
      if (next.data == nullptr) {
        gemm_tile<M>(a, lda, b, c, kKeyBlock, m, n, k, false);
      } else {
        gemm_tile_fetching<M>(a, lda, b, c, kKeyBlock, m, n, k, false,
                              [&] { next.fetch(plan, kFetchRows); });
      }
    }
  }
  if (next.data != nullptr) next.fetch(plan, plan.rows());
}

// sum += X Y for the rows of a plan's groups: X (queries x keys of the tile) in rows of ldx, Y rows
// of keys in rows of ldy, of bf16 pairs of rows.
template <class M>
void accumulate_keys(const TilePlan& plan, const M* x, int64_t ldx, const M* y, int64_t ldy,
                     int64_t width, compute_t<M>* sum, int64_t ld) {
  for (int64_t panel = 0; panel < width; panel += kPanelCols<M>) {
    const int64_t cols = width - panel < kPanelCols<M> ? width - panel : kPanelCols<M>;
    for (int64_t g = 0; g < plan.groups(); ++g) {
      const Range seen = plan.seen[g], r = plan.group_rows(g);
      if (is_empty(seen)) continue;
      const auto multiply = [&](int64_t key, int64_t keys, Panels<M> b) {
        gemm_tile<M>(x + r.begin * ldx + key, ldx, b, sum + r.begin * ld + panel, ld,
                     r.end - r.begin, cols, keys, true);
      };
      const auto rows_from = [&](int64_t key) {
        return row_panels(y + key * ldy + panel * Operand<M>::kStep, ldy);
      };
      if constexpr (Operand<M>::kStep == 1) {
        multiply(seen.begin, seen.end - seen.begin, rows_from(seen.begin));
      } else {
        // Not even 0 may multiply an unseen key of a pair: it could be NaN.
        const auto multiply_half = [&](int64_t key) {
          M pairs[2 * kPanelCols<M>] = {};
          const M* const from = rows_from(key / 2 * 2).data + key % 2;
          for (int64_t c = 0; c < cols; ++c) pairs[2 * c + key % 2] = from[2 * c];
          multiply(key / 2 * 2, 2, packed_panels(static_cast<const M*>(pairs), 2));
        };
        const Range whole = {round_up(seen.begin, 2), seen.end / 2 * 2};
        if (whole.begin > seen.begin) multiply_half(seen.begin);
        if (whole.begin < whole.end) {
          multiply(whole.begin, whole.end - whole.begin, rows_from(whole.begin));
        }
        if (whole.end < seen.end && whole.end >= seen.begin) multiply_half(whole.end);
      }
    }
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
