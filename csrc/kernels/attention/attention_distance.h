// Terms of a tile's scores by the distance of query and key, q_i.r and k_j.w with rows r and w of k
// - i (see DistanceRows), and their gradients.
//
// Pair (r, c) of a tile reads the row at place c - r + last of its band of distances. A few queries
// are multiplied by all rows that they reach; each query's products are then added from its own
// first place on. The term k.w is computed likewise with keys as rows, in a transposed tile.
#pragma once

#include "kernels/attention/attention_tile.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

constexpr int64_t kBandRows = kRowGroup / 2;  // rows multiplied together; they divide a group
static_assert(kBandRows <= kMostBandRows && kRowGroup % kBandRows == 0);

// Rows of distances of a tile, in the order of their places.
struct BandRows {
  const DistanceRows* rows;
  int64_t first, step;  // distance of place 0; difference between adjacent places
  int64_t last;         // place of pair (0, 0)

  OMNIATTN_INLINE int64_t row(int64_t place) const {
    return row_of_distance(*rows, first + place * step);
  }
  // In a tile far from the diagonal, all places have the first row or all have the
  // last row. They count as one place.
  OMNIATTN_INLINE bool is_uniform() const { return row(0) == row(kBand - 2); }
  // Places of some rows and columns of the tile.
  OMNIATTN_INLINE Range places(Range of, Range columns) const {
    if (is_uniform()) return {0, 1};
    return {columns.begin - (of.end - 1) + last, columns.end - of.begin + last};
  }
};

// Distance terms of one head. Operands are not narrowed; `q` below is pre * q of a tile.
template <class A>
class DistanceTerms {
 public:
  using V = Vec<A>;

  // `memory` has distance_elements.
  DistanceTerms(const AttentionProblem& p, int64_t b, int64_t h, A* memory)
      : p_(p), b_(b), h_(h), ld_(padded_row(p.d)), factor_(query_factor<A>(p, h)) {
    if (!has_distance_rows(p)) return;
    Arena<A> arena{memory, distance_elements(p)};
    rows_ = arena.take(kBand * ld_);
    grad_rows_ = arena.take(kBand * ld_);
    columns_ = arena.take(kBand * p.d);
    part_ = arena.take(kBand * kMostBandRows);
    keys_ = arena.take(kKeyBlock * ld_);
    turned_ = arena.take(kKeyBlock * kQueryBlock);
  }

  // Adds the terms to the products of a tile, pre * q.k.
  template <class T>
  void add(const TilePlan& plan, const A* q, A* x) const {
    if (p_.relative_keys.data != nullptr) {
      const BandRows band = of_queries(plan);
      load_rows(band, A(1));
      turn_rows(band);
      for_queries(
          plan, [&](Range rows, Range columns) { add_band(band, q, rows, columns, x, kKeyBlock); });
    }
    if (p_.relative_queries.data != nullptr) {
      const BandRows band = of_keys(plan);
      load_keys<T>(plan);
      load_rows(band, A(1));
      turn_rows(band);
      fill_zero(turned_, kKeyBlock * kQueryBlock);
      for_keys(plan, [&](Range rows, Range columns) {
        add_band(band, keys_, rows, columns, turned_, kQueryBlock);
      });
      add_turned(plan, x);
    }
  }

  // From the gradients of a tile's products, adds gradients to the tile's rows of dQ and dK, and to
  // the problem's rows of distances (null: not wanted).
  template <class T>
  void add_gradients(const TilePlan& plan, const A* q, const A* dx, A* grad_q, A* grad_k,
                     A* grad_keys, A* grad_queries) const {
    if (p_.relative_keys.data != nullptr) {
      const BandRows band = of_queries(plan);
      load_rows(band, A(1));
      fill_zero(grad_rows_, kBand * ld_);
      for_queries(plan, [&](Range rows, Range columns) {
        add_band_gradients(band, q, rows, columns, dx, kKeyBlock, grad_q);
      });
      add_rows(band, grad_keys);
    }
    if (p_.relative_queries.data != nullptr) {
      const BandRows band = of_keys(plan);
      load_keys<T>(plan);
      load_rows(band, factor_);
      fill_zero(grad_rows_, kBand * ld_);
      turn(plan, dx);
      for_keys(plan, [&](Range rows, Range columns) {
        add_band_gradients(band, keys_, rows, columns, turned_, kQueryBlock, grad_k);
      });
      add_rows(band, grad_queries);
    }
  }

 private:
  BandRows of_queries(const TilePlan& plan) const {
    constexpr int64_t kLast = kQueryBlock - 1;
    return {&p_.relative_keys, distance_of(p_, plan.queries.begin + kLast, plan.keys.begin), 1,
            kLast};
  }
  BandRows of_keys(const TilePlan& plan) const {
    constexpr int64_t kLast = kKeyBlock - 1;
    return {&p_.relative_queries, distance_of(p_, plan.queries.begin, plan.keys.begin + kLast), -1,
            kLast};
  }

  // Calls f(queries, their columns) for groups of queries that are multiplied together.
  template <class F>
  static void for_queries(const TilePlan& plan, const F& f) {
    for (int64_t g = 0; g < plan.groups(); ++g) {
      if (is_empty(plan.columns[g])) continue;
      const Range group = plan.group_rows(g);
      for (int64_t r = group.begin; r < group.end; r += kBandRows) {
        f(intersect(group, {r, r + kBandRows}), plan.columns[g]);
      }
    }
  }
  // Calls f(keys, queries that see some of them).
  template <class F>
  static void for_keys(const TilePlan& plan, const F& f) {
    for (int64_t key = 0; key < kKeyBlock; key += kBandRows) {
      const Range keys = intersect({key, key + kBandRows}, {0, kKeyBlock});
      const Range queries = rows_seeing(plan, keys);
      if (!is_empty(queries)) f(keys, {queries.begin / 16 * 16, round_up(queries.end, 16)});
    }
  }

  // Loads pre * k; keys that no query sees become 0, since they may hold anything.
  template <class T>
  void load_keys(const TilePlan& plan) const {
    Range seen = {0, 0};
    for (int64_t g = 0; g < plan.groups(); ++g) seen = mask_rules::hull(seen, plan.seen[g]);
    fill_zero(keys_, kKeyBlock * ld_);
    const int64_t kv = kv_head(h_, p_.hq, p_.hkv);
    pack_rows<T>(row_of<T>(p_.k, b_, plan.keys.begin + seen.begin, kv), p_.k.stride_t,
                 seen.end - seen.begin, p_.d, factor_, keys_ + seen.begin * ld_);
  }

  // Number of rows to load: vectors read kWidth rows at least.
  static int64_t loaded(const BandRows& band) { return band.is_uniform() ? V::kWidth : kBand; }
  void load_rows(const BandRows& band, A factor) const {
    for (int64_t n = 0; n < loaded(band); ++n) {
      const A* const from =
          static_cast<const A*>(band.rows->data) + (band.row(n) * p_.hq + h_) * p_.d;
      A* const to = rows_ + n * ld_;
      int64_t c = 0;
      for (; c + V::kWidth <= p_.d; c += V::kWidth) store(to + c, load(from + c) * V(factor));
      for (; c < round_up(p_.d, 16); c += V::kWidth) {
        store(to + c, load_n(from + c, p_.d - c) * V(factor));
      }
    }
  }
  void turn_rows(const BandRows& band) const {
    for (int64_t n = 0; n < loaded(band); n += V::kWidth) {
      for (int64_t c = 0; c < p_.d; c += V::kWidth) {
        pack_transposed_block<A>(rows_ + n * ld_ + c, ld_, V::kWidth, ld_ - c, p_.d - c,
                                 columns_ + c * kBand + n, kBand);
      }
    }
  }

  // x[r][c] += own[r] . row of the pair.
  void add_band(const BandRows& band, const A* own, Range rows, Range columns, A* x,
                int64_t ldx) const {
    const Range places = band.places(rows, columns);
    const int64_t count = rows.end - rows.begin;
    gemm_tile<A>(own + rows.begin * ld_, ld_, row_panels<A>(columns_ + places.begin, kBand), part_,
                 kBand, count, places.end - places.begin, p_.d, false);
    for (int64_t r = 0; r < count; ++r) {
      A* const to = x + (rows.begin + r) * ldx;
      const A* const from = part_ + r * kBand;
      const A* const row = from + count - 1 - r - columns.begin;
      const bool uniform = band.is_uniform();
      for_columns<A>(columns, [&](int64_t n) {
        store(to + n, load(to + n) + (uniform ? V(*from) : load(row + n)));
      });
    }
  }

  // grad[r] += dx[r][c] row of the pair; gradient of this row += dx[r][c] own[r].
  void add_band_gradients(const BandRows& band, const A* own, Range rows, Range columns,
                          const A* dx, int64_t ldx, A* grad) const {
    const Range places = band.places(rows, columns);
    const int64_t count = rows.end - rows.begin, n = places.end - places.begin;
    const int64_t width = round_up(p_.d, 16);
    for (int64_t r = 0; r < count; ++r) {
      A* const to = part_ + r * kBand;
      const A* const from = dx + (rows.begin + r) * ldx;
      if (band.is_uniform()) {
        V sum = zero<A>();
        for_columns<A>(columns, [&](int64_t c) { sum += load(from + c); });
        *to = reduce_add(sum);
      } else {
        fill_zero(to, n);
        A* const row = to + count - 1 - r - columns.begin;
        for_columns<A>(columns, [&](int64_t c) { store(row + c, load(from + c)); });
      }
    }
    gemm_tile<A>(part_, kBand, row_panels<A>(rows_ + places.begin * ld_, ld_),
                 grad + rows.begin * ld_, ld_, count, width, n, true);
    gemm_tile<A, ALayout::kTransposed>(part_, kBand, row_panels<A>(own + rows.begin * ld_, ld_),
                                       grad_rows_ + places.begin * ld_, ld_, n, width, count, true);
  }

  // Adds the gradients of the band to the gradients of the problem's rows.
  void add_rows(const BandRows& band, A* grad) const {
    if (grad == nullptr) return;
    const Range range = distance_range(p_, *band.rows);
    for (int64_t n = 0; n < (band.is_uniform() ? 1 : kBand); ++n) {
      if (!contains(range, {band.row(n), band.row(n) + 1})) continue;  // no pair reads it
      A* const to = grad + (band.row(n) - range.begin) * p_.d;
      const A* const from = grad_rows_ + n * ld_;
      int64_t c = 0;
      for (; c + V::kWidth <= p_.d; c += V::kWidth) store(to + c, load(to + c) + load(from + c));
      if (c < p_.d) store_n(to + c, load_n(to + c, p_.d - c) + load(from + c), p_.d - c);
    }
  }

  // Adds the transposed tile to x, and copies x to it, in blocks of vectors.
  void add_turned(const TilePlan& plan, A* x) const {
    V block[V::kWidth];
    for (int64_t r = 0; r < plan.rows(); r += V::kWidth) {
      for (int64_t n = 0; n < kKeyBlock; n += V::kWidth) {
        for (int64_t i = 0; i < V::kWidth; ++i) {
          block[i] = load(turned_ + (n + i) * kQueryBlock + r);
        }
        transpose(block);
        for (int64_t i = 0; i < V::kWidth && r + i < plan.rows(); ++i) {
          A* const to = x + (r + i) * kKeyBlock + n;
          store(to, load(to) + block[i]);
        }
      }
    }
  }
  void turn(const TilePlan& plan, const A* x) const {
    V block[V::kWidth];
    for (int64_t r = 0; r < kQueryBlock; r += V::kWidth) {
      for (int64_t n = 0; n < kKeyBlock; n += V::kWidth) {
        for (int64_t i = 0; i < V::kWidth; ++i) {
          block[i] = r + i < plan.rows() ? load(x + (r + i) * kKeyBlock + n) : zero<A>();
        }
        transpose(block);
        for (int64_t i = 0; i < V::kWidth; ++i) {
          store(turned_ + (n + i) * kQueryBlock + r, block[i]);
        }
      }
    }
  }

  const AttentionProblem& p_;
  int64_t b_, h_, ld_;
  A factor_;
  A *rows_, *grad_rows_, *columns_, *part_, *keys_, *turned_;
};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
