// Shared by the steps of the tangents of attention, see attention_tangents_cpu.cpp: rows of queries
// and keys, and the sums that one tile adds to.
#pragma once

#include "kernels/attention/attention_backward_tile.h"
#include "kernels/attention_tangents/attention_tangents.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

using Params = AttentionTangentParams;

// Memory for query rows [first, first + count) of all (b, h, q).
template <class A>
struct TangentRows {
  int64_t first, count, splits;
  int64_t ldq, ldo, ld_sums;
  A *q_, *grad_out_, *sums_, *mean_, *shift_, *factor_, *delta_, *moved_delta_;

  TangentRows(const Params& x, void* memory, int64_t first_row, int64_t rows)
      : first(first_row),
        count(rows),
        splits(x.splits),
        ldq(pair_row(x.problem.d)),
        ldo(has_gradients(x) ? pair_row(x.problem.dv) : 0),
        ld_sums(tangent_sums_row(x.problem)) {
    Arena<A> arena{static_cast<A*>(memory), tangent_workspace_elements(x, rows)};
    q_ = arena.take(count * ldq);
    grad_out_ = arena.take(count * ldo);
    sums_ = arena.take(count * ld_sums * splits);
    mean_ = arena.take(count * splits);
    shift_ = arena.take(count);
    factor_ = arena.take(count);
    delta_ = arena.take(count);
    moved_delta_ = arena.take(count);
  }
  OMNIATTN_INLINE A* q(int64_t row) const { return q_ + (row - first) * ldq; }
  OMNIATTN_INLINE A* grad_out(int64_t row) const { return grad_out_ + (row - first) * ldo; }
  OMNIATTN_INLINE A* sums(int64_t split, int64_t row) const {
    return sums_ + (split * count + row - first) * ld_sums;
  }
  OMNIATTN_INLINE A& mean(int64_t split, int64_t row) const {
    return mean_[split * count + row - first];
  }
  OMNIATTN_INLINE A& shift(int64_t row) const { return shift_[row - first]; }
  OMNIATTN_INLINE A& factor(int64_t row) const { return factor_[row - first]; }
  OMNIATTN_INLINE A& delta(int64_t row) const { return delta_[row - first]; }
  OMNIATTN_INLINE A& moved_delta(int64_t row) const { return moved_delta_[row - first]; }
};

template <class A>
TangentRows<A> all_rows(const Params& x) {
  return TangentRows<A>(x, x.workspace, 0, query_rows(x.problem));
}

// Key-side operands and tiles of one work item.
template <class A>
struct KeySide {
  int64_t ldk, ldv;    // strides of rows [k k'] and [v' v]
  A *k, *v, *kt, *vt;  // these rows, and their columns
  A *grad_k, *grad_v;
  A *weights, *moved, *dp, *moved_dp;  // (kQueryBlock, kKeyBlock): q.k, S', dP and dP' at first

  KeySide(const AttentionProblem& p, void* scratch) : ldk(pair_row(p.d)), ldv(pair_row(p.dv)) {
    Arena<A> arena{static_cast<A*>(scratch), tangent_scratch_elements(p)};
    k = arena.take(kKeyBlock * ldk);
    v = arena.take(kKeyBlock * ldv);
    kt = arena.take(kKeyBlock * 2 * half_row(p.d));
    vt = arena.take(kKeyBlock * 2 * half_row(p.dv));
    grad_k = arena.take(kKeyBlock * padded_row(p.d));
    grad_v = arena.take(kKeyBlock * padded_row(p.dv));
    A** const tiles[] = {&weights, &moved, &dp, &moved_dp};
    for (A** const tile : tiles) *tile = arena.take(kQueryBlock * kKeyBlock);
  }
};

// x = a B for the rows of a plan's groups and the terms `inner` of rows a and columns B, of which
// there are `depth`.
template <class A>
void multiply_terms(const TilePlan& plan, const A* a, int64_t lda, const A* columns, int64_t depth,
                    Range inner, A* x) {
  for (int64_t panel = 0; panel < kKeyBlock; panel += kPanelCols<A>) {
    const Panels<A> b{columns + panel * depth + inner.begin * kPanelCols<A>, kPanelCols<A>, 0};
    for (int64_t g = 0; g < plan.groups(); ++g) {
      const Range seen = intersect(plan.columns[g], {panel, panel + kPanelCols<A>});
      const Range rows = plan.group_rows(g);
      if (is_empty(seen)) continue;
      A* const to = x + rows.begin * kKeyBlock + panel;
      gemm_tile<A>(a + rows.begin * lda, lda, b, to, kKeyBlock, rows.end - rows.begin,
                   seen.end - panel, inner.end - inner.begin, false);
    }
  }
}

// x = [y' y] [z z']^T, where tangents may be absent.
template <class A>
void multiply_moved(const TilePlan& plan, const A* a, int64_t lda, const A* columns, int64_t half,
                    bool has_first, bool has_second, A* x) {
  const Range inner{has_first ? 0 : half, has_second ? 2 * half : half};
  if (is_empty(inner)) return fill_zero(x, plan.rows() * kKeyBlock);
  multiply_terms(plan, a + inner.begin, lda, columns, 2 * half, inner, x);
}

// One tile and the rows that it is computed from.
template <class A>
struct TangentTile {
  const Params& params;
  const TangentRows<A>& rows;
  const KeySide<A>& side;
  const TilePlan& plan;
  int64_t b, h;
  int64_t row;  // index of the first query over all (b, h, q)
};

// Computes q.k and S' / chain of a tile.
template <class A>
void multiply_queries(const TangentTile<A>& tile) {
  const auto& [params, rows, side, plan, b, h, row] = tile;
  const int64_t half = half_row(params.problem.d);
  const A* const q = rows.q(row);
  multiply_terms(plan, q + half, rows.ldq, side.kt, 2 * half, {0, half}, side.weights);
  multiply_moved(plan, q, rows.ldq, side.kt, half, params.moved_q.data != nullptr,
                 params.moved_k.data != nullptr, side.moved);
}

// Turns the products of each row into logits and calls f(score, r, columns).
template <class A, class F>
void for_rows(const TangentTile<A>& tile, const F& f) {
  const TilePlan& plan = tile.plan;
  for (int64_t g = 0; g < plan.groups(); ++g) {
    const Range columns = plan.columns[g], group = plan.group_rows(g);
    for (int64_t r = group.begin; r < group.end; ++r) {
      const RowScore<A> score{tile.params.problem,
                              tile.b,
                              tile.h,
                              plan.queries.begin + r,
                              plan.keys.begin,
                              plan.masked[g] ? plan.visible[r] : nullptr,
                              nullptr};
      score.to_logits(tile.side.weights + r * kKeyBlock, columns, A(1));
      f(score, r, columns);
    }
  }
}

// Multiplies rows by the dropout factors of their keys.
template <class A>
void drop(const RowScore<A>& score, Range columns, A* const (&some)[2]) {
  if (score.p.dropout.threshold == 0) return;
  const RowDropout<A> dropout(score.p, score.b, score.h, score.q, score.key);
  for (A* const x : some) dropout.apply(x, columns);
}

// Adds a tile to the sums of O' and m.
template <class A>
void add_outputs(const TangentTile<A>& tile, int64_t split) {
  using V = Vec<A>;
  const auto& [params, rows, side, plan, b, h, row] = tile;
  const AttentionProblem& p = params.problem;
  multiply_queries(tile);
  const V chain(static_cast<A>(p.score.chain));
  for_rows(tile, [&, row = row](const RowScore<A>& score, int64_t r, Range columns) {
    A *const weights = tile.side.weights + r * kKeyBlock, *const moved =
                                                              tile.side.moved + r * kKeyBlock;
    const V factor(tile.rows.factor(row + r));
    with_weight(p.score, tile.rows.shift(row + r), [&](auto weight) {
      for_columns<A>(columns, [&](int64_t n) {
        const V w = weight(load(weights + n)).value * factor;
        store(weights + n, w);
        store(moved + n, w * chain * load(moved + n));
      });
    });
    score.hide(moved, columns, A(0));  // a hidden key may hold anything, and 0 * NaN is NaN
    V sum = zero<A>();
    for_columns<A>(columns, [&](int64_t n) { sum = sum + load(moved + n); });
    tile.rows.mean(split, row + r) += reduce_add(sum);
    drop(score, columns, {weights, moved});
  });
  const int64_t half = half_row(p.dv);
  A* const sums = rows.sums(split, row);
  accumulate_keys(plan, side.moved, kKeyBlock, side.v + half, side.ldv, half, sums, rows.ld_sums);
  if (params.moved_v.data != nullptr) {
    accumulate_keys(plan, side.weights, kKeyBlock, side.v, side.ldv, half, sums, rows.ld_sums);
  }
}

// Adds a tile to the sums of dq', dk' and dv'.
template <class A>
void add_gradients(const TangentTile<A>& tile, int64_t split) {
  using V = Vec<A>;
  const auto& [params, rows, side, plan, b, h, row] = tile;
  const AttentionProblem& p = params.problem;
  const int64_t half = half_row(p.d), half_v = half_row(p.dv);
  const A *const q = rows.q(row), *const grad = rows.grad_out(row);
  const bool moves_grad = params.moved_grad_out.data != nullptr;
  multiply_queries(tile);
  multiply_terms(plan, grad, rows.ldo, side.vt, 2 * half_v, {half_v, 2 * half_v}, side.dp);
  multiply_moved(plan, grad, rows.ldo, side.vt, half_v, params.moved_v.data != nullptr, moves_grad,
                 side.moved_dp);
  const V chain(static_cast<A>(p.score.chain));
  for_rows(tile, [&, row = row](const RowScore<A>& score, int64_t r, Range columns) {
    const KeySide<A>& s = tile.side;
    const int64_t at = r * kKeyBlock;
    A *const weights = s.weights + at, *const moved = s.moved + at;
    A *const ds = s.dp + at, *const moved_ds = s.moved_dp + at;
    drop(score, columns, {ds, moved_ds});
    const V factor(tile.rows.factor(row + r)), mean(tile.rows.mean(0, row + r));
    const V delta(tile.rows.delta(row + r)), moved_delta(tile.rows.moved_delta(row + r));
    with_weight(p.score, tile.rows.shift(row + r), [&](auto weight) {
      for_columns<A>(columns, [&](int64_t n) {
        const V w = weight(load(weights + n)).value * factor;
        const V moved_logit = fma(chain, load(moved + n), zero<A>() - mean);
        const V d = w * (load(ds + n) - delta);
        store(weights + n, w);
        store(moved + n, w * moved_logit);
        store(ds + n, d);
        store(moved_ds + n, fma(d, moved_logit, w * (load(moved_ds + n) - moved_delta)));
      });
    });
    A* const tiles[] = {weights, moved, ds, moved_ds};
    for (A* const x : tiles) score.hide(x, columns, A(0));
    drop(score, columns, {weights, moved});
    for (A* const x : tiles) {  // products along the columns: whole rows
      fill_zero(x, columns.begin);
      fill_zero(x + columns.end, kKeyBlock - columns.end);
    }
  });
  A* const sums = rows.sums(split, row);
  const int64_t ldk = padded_row(p.d), ldv = padded_row(p.dv);
  accumulate_keys(plan, side.moved_dp, kKeyBlock, side.k, side.ldk, half, sums, rows.ld_sums);
  accumulate_queries(plan, side.moved_dp, q + half, rows.ldq, half, side.grad_k, ldk);
  accumulate_queries(plan, side.moved, grad, rows.ldo, half_v, side.grad_v, ldv);
  if (params.moved_k.data != nullptr) {
    accumulate_keys(plan, side.dp, kKeyBlock, side.k + half, side.ldk, half, sums, rows.ld_sums);
  }
  if (params.moved_q.data != nullptr) {
    accumulate_queries(plan, side.dp, q, rows.ldq, half, side.grad_k, ldk);
  }
  if (moves_grad) {
    accumulate_queries(plan, side.weights, grad + half_v, rows.ldo, half_v, side.grad_v, ldv);
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
