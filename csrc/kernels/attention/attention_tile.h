// What the attention kernels share: packing of rows, score views, logits and masks of one tile row.
#pragma once

#include "kernels/attention/attention.h"
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

// Hands out consecutive parts of a buffer.
template <class A>
struct Carver {
  A* next;
  OMNIATTN_INLINE A* take(int64_t elements) {
    A* const part = next;
    next += elements;
    return part;
  }
};

// to[r][c] = factor * from[r][c] for c < cols, 0 behind, in rows of padded_row(cols).
template <class T>
void pack_rows(const T* from, int64_t stride, int64_t rows, int64_t cols, compute_t<T> factor,
               compute_t<T>* to) {
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
  for (int64_t i = 0; i < count; ++i) to[i] = A(0);
}

// Key rows (count, d) as column panels, zero up to column `capacity`.
template <class T>
void pack_keys_as_columns(const T* from, int64_t stride, int64_t d, int64_t count, int64_t capacity,
                          compute_t<T>* to) {
  using A = compute_t<T>;
  pack_bt(from, stride, d, count, to);
  const int64_t packed = round_up(count, kPanelCols<A>);
  fill_zero(to + packed * d, (capacity - packed) * d);
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

// n elements of a score view's row, converted to A; lanes behind n are 0.
template <class A>
OMNIATTN_INLINE Vec<A> load_score(const void* data, DType dtype, int64_t offset, int64_t n) {
  if constexpr (sizeof(A) == 8) {
    if (dtype == DType::f64) return load_n(static_cast<const double*>(data) + offset, n);
    A lanes[Vec<A>::kWidth] = {};
    const auto* row = static_cast<const float*>(data) + offset;
    for (int64_t i = 0; i < Vec<A>::kWidth && i < n; ++i) lanes[i] = row[i];
    return load(lanes);
  } else {
    if (dtype == DType::bf16) return load_n(static_cast<const bf16*>(data) + offset, n);
    if (dtype == DType::f16) return load_n(static_cast<const f16*>(data) + offset, n);
    return load_n(static_cast<const float*>(data) + offset, n);
  }
}

// Weight of a logit x (log2 units) by itself and its derivative, where rows are not normalised.
template <class A>
struct PointwiseWeight {
  Vec<A> weight, slope;
  OMNIATTN_INLINE PointwiseWeight(Normaliser normaliser, Vec<A> x) {
    using V = Vec<A>;
    if (normaliser == Normaliser::sigmoid) {
      const V e = exp2(min(V(A(126)), V(A(0)) - x));
      weight = select(x == V(negative_infinity<A>()), zero<A>(), reciprocal(V(A(1)) + e));
      slope = sigmoid_slope(weight);
    } else {
      const V root = max(x * V(static_cast<A>(kLn2)), zero<A>());
      weight = root * root;
      slope = relu2_slope(root);
    }
  }
};

// One query row against keys [key, key + 128): everything that is not q.k.
template <class A>
struct RowScore {
  const AttentionProblem& p;
  int64_t b, h, q, key;
  const uint64_t* visible;  // kMaskWords words; null: all keys are visible

  // Adds softcap, bias, table term and mask to x = pre * q.k of keys [key + n, key + n + kWidth);
  // log2 units. `t` receives tanh(x) when there is a softcap.
  OMNIATTN_INLINE Vec<A> logit(Vec<A> x, int64_t n, Vec<A>& t) const {
    if (p.score.post != 0) {
      t = tanh(x);
      x = Vec<A>(static_cast<A>(p.score.post)) * t;
    }
    if (p.bias.data != nullptr) {
      const int64_t offset =
          b * p.bias.stride_b + h * p.bias.stride_h + q * p.bias.stride_q + key + n;
      const Vec<A> bias = load_score<A>(p.bias.data, p.bias.dtype, offset, p.tk - key - n);
      x = fma(bias, Vec<A>(static_cast<A>(kLog2E)), x);
    }
    if (p.relative.data != nullptr) {
      const RelativeView& r = p.relative;
      x += load(static_cast<const A*>(r.data) + r.origin + b * r.stride_b + h * r.stride_h +
                q * r.stride_q + key + n);
    }
    if (visible != nullptr) {
      x = select(lanes_of<A>(visible[n / 64] >> (n % 64)), x, Vec<A>(negative_infinity<A>()));
    }
    return x;
  }

  OMNIATTN_INLINE bool plain() const {
    return p.score.post == 0 && p.bias.data == nullptr && p.relative.data == nullptr &&
           visible == nullptr;
  }
};

// Factors of dropout on keys [key, key + 128) of one query: 0 or 1 / (1 - p).
template <class A>
struct RowDropout {
  uint64_t keep[kMaskWords];
  A scale;

  RowDropout() = default;
  RowDropout(const AttentionProblem& p, int64_t b, int64_t h, int64_t q, int64_t key)
      : scale(static_cast<A>(p.dropout.scale)) {
    for (int64_t w = 0; w < kMaskWords; ++w) {
      keep[w] = keep_bits(p.dropout, (p.first_batch + b) * p.hq + h, q, key + 64 * w);
    }
  }
  OMNIATTN_INLINE Vec<A> factor(int64_t n) const {
    return select(lanes_of<A>(keep[n / 64] >> (n % 64)), Vec<A>(scale), zero<A>());
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

// x = A B^T for the rows of a plan's groups: rows [rows x k] in rows of lda, packed keys as column
// panels.
template <class A>
void multiply_by_keys(const TilePlan& plan, const A* rows, int64_t lda, int64_t k, const A* packed,
                      A* x) {
  for (int64_t panel = 0; panel < kKeyBlock; panel += kPanelCols<A>) {
    for (int64_t g = 0; g < plan.groups(); ++g) {
      const Range columns = intersect(plan.columns[g], {panel, panel + kPanelCols<A>});
      if (is_empty(columns)) continue;
      const Range r = plan.group_rows(g);
      // Panels are computed from their first column; the clipped end is what saves work.
      gemm_tile<A>(rows + r.begin * lda, lda, packed_panels(packed + panel * k, k),
                   x + r.begin * kKeyBlock + panel, kKeyBlock, r.end - r.begin, columns.end - panel,
                   k, false);
    }
  }
}

// sum += X Y for the rows of a plan's groups: X (queries x keys of the tile), Y rows of keys.
template <class A>
void accumulate_keys(const TilePlan& plan, const A* x, const A* y, int64_t ldy, int64_t width,
                     A* sum, int64_t ld) {
  for (int64_t panel = 0; panel < width; panel += kPanelCols<A>) {
    const int64_t cols = width - panel < kPanelCols<A> ? width - panel : kPanelCols<A>;
    for (int64_t g = 0; g < plan.groups(); ++g) {
      const Range seen = plan.seen[g], r = plan.group_rows(g);
      if (is_empty(seen)) continue;
      gemm_tile<A>(x + r.begin * kKeyBlock + seen.begin, kKeyBlock,
                   row_panels(y + seen.begin * ldy + panel, ldy), sum + r.begin * ld + panel, ld,
                   r.end - r.begin, cols, seen.end - seen.begin, true);
    }
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
