// Tangents of attention and of its gradients, in the order of the backward (see
// attention_kernels_cpu.h): a work item owns a kv head and every splits-th key block. With tangents
// x' of x, logits S = scale q k^T, weights P after the dropout Z, and m = rowsum(P S'):
//
//   S' = scale (q' k^T + q k'^T)     lse' = m     O' = (Z P S') v + (Z P) v' - m O
//
// dP = Z dO v^T, Delta = rowsum(O dO) - dlse and dS = P (dP - Delta) are those of the backward:
//
//   P' = P (S' - m)    dP' = Z (dO v'^T + dO' v^T)    Delta' = rowsum(O' dO + O dO') - dlse'
//   dS' = P' (dP - Delta) + P (dP' - Delta')
//   dq' = scale (dS' k + dS k')    dk' = scale (dS'^T q + dS^T q')    dv' = P'^T dO + P^T dO'
//
// One pass over the key blocks sums O' and m, a second one the gradients. Rows hold a tensor beside
// its tangent, [q' q], [k k'], [v' v] and [dO dO'], so that S' and dP' are one product each: 5
// products of a tile in the first pass, and 10 in the second. All products are in the compute type.
#include "kernels/attention/attention_backward_tile.h"
#include "kernels/attention_tangents/attention_tangents.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "semantics/block_schedule.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

using Params = AttentionTangentParams;

// Workspace for rows [first, first + count) of all (b, h, q).
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

// One block of queries of one head.
struct QueryBlock {
  int64_t b, h;
  Range queries;
  int64_t row;  // index of the first query over all (b, h, q)
};
QueryBlock query_block(const AttentionProblem& p, int64_t head, int64_t n) {
  const Range queries = block(n, kQueryBlock, p.tq);
  return {head / p.hq, head % p.hq, queries, head * p.tq + queries.begin};
}
QueryBlock query_block_item(const AttentionProblem& p, int64_t item) {
  return query_block(p, item / query_block_count(p), item % query_block_count(p));
}
// Index in lse of the first query.
int64_t stat_of(const AttentionProblem& p, const QueryBlock& x) {
  return (x.b * p.hq + x.h) * p.lse_stride + x.queries.begin;
}

// to[r] = factor * row r of a view, from (b, t) on, with zeros up to `half`; zeros without a view.
template <class T>
void load_half(const HeadView& x, int64_t b, int64_t t, int64_t h, int64_t rows, int64_t cols,
               compute_t<T> factor, compute_t<T>* to, int64_t ld) {
  using V = Vec<compute_t<T>>;
  for (int64_t r = 0; r < rows; ++r, to += ld) {
    if (x.data == nullptr) {
      fill_zero(to, half_row(cols));
      continue;
    }
    const T* const from = row_of<T>(x, b, t + r, h);
    for (int64_t c = 0; c < half_row(cols); c += V::kWidth) {
      store(to + c, load_n(from + c, cols - c) * V(factor));
    }
  }
}

template <class T>
void prepare_block(const Params& params, const TangentRows<compute_t<T>>& rows,
                   const QueryBlock& x) {
  using A = compute_t<T>;
  using V = Vec<A>;
  const AttentionProblem& p = params.problem;
  const int64_t count = x.queries.end - x.queries.begin, stat = stat_of(p, x);
  const auto load_queries = [&](const HeadView& from, int64_t cols, A factor, A* to, int64_t ld) {
    load_half<T>(from, x.b, x.queries.begin, x.h, count, cols, factor, to, ld);
  };
  const A factor = query_factor<A>(p, x.h);
  load_queries(params.moved_q, p.d, factor, rows.q(x.row), rows.ldq);
  load_queries(p.q, p.d, factor, rows.q(x.row) + half_row(p.d), rows.ldq);
  if (has_gradients(params)) {
    A* const grad = rows.grad_out(x.row);
    load_queries(params.grad_out, p.dv, A(1), grad, rows.ldo);
    load_queries(params.moved_grad_out, p.dv, A(1), grad + half_row(p.dv), rows.ldo);
  }
  const A* const lse = static_cast<const A*>(params.lse) + stat;
  const A* const tail = static_cast<const A*>(params.lse_tail) + stat;
  for (int64_t r = 0; r < count; ++r) {
    const auto [shift, exponent] = softmax_backward_shift(p.score, Lse<A>{lse[r], tail[r]});
    rows.shift(x.row + r) = shift;
    rows.factor(x.row + r) = exp2(V(exponent)).v[0];
  }
  for (int64_t split = 0; split < params.splits; ++split) {
    fill_zero(rows.sums(split, x.row), count * rows.ld_sums);
    fill_zero(&rows.mean(split, x.row), count);
  }
}

// Key-side operands and tiles of one work item.
template <class A>
struct KeySide {
  int64_t ldk, ldv;    // strides of rows [k k'] and [v' v]
  A *k, *v, *kt, *vt;  // these rows, and the same as columns
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

enum class Pass { outputs, gradients };

// Processes all queries of one kv head with one key block.
template <class T>
void key_block(const Params& params, const TangentRows<compute_t<T>>& rows, void* scratch,
               Pass pass, int64_t split, int64_t b, int64_t h, Range keys) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.problem;
  const KeySide<A> side(p, scratch);
  const int64_t count = keys.end - keys.begin;
  const auto load_keys = [&](const HeadView& from, int64_t cols, A* to, int64_t ld) {
    load_half<T>(from, b, keys.begin, h, count, cols, A(1), to, ld);
  };
  const int64_t half = half_row(p.d), half_v = half_row(p.dv);
  load_keys(p.k, p.d, side.k, side.ldk);
  load_keys(params.moved_k, p.d, side.k + half, side.ldk);
  load_keys(params.moved_v, p.dv, side.v, side.ldv);
  load_keys(p.v, p.dv, side.v + half_v, side.ldv);
  pack_keys_as_columns(side.k, side.ldk, 2 * half, count, kKeyBlock, side.kt);
  const int64_t ldk = padded_row(p.d), ldv = padded_row(p.dv);
  if (pass == Pass::gradients) {
    pack_keys_as_columns(side.v, side.ldv, 2 * half_v, count, kKeyBlock, side.vt);
    fill_zero(side.grad_k, kKeyBlock * ldk);
    fill_zero(side.grad_v, kKeyBlock * ldv);
  }
  TilePlan plan;
  for (int64_t head = h * group_size(p); head < (h + 1) * group_size(p); ++head) {
    for (Tiles<Along::queries> tiles(p, b, head, keys); tiles.next(plan);) {
      const int64_t row = (b * p.hq + head) * p.tq + plan.queries.begin;
      const TangentTile<A> tile{params, rows, side, plan, b, head, row};
      pass == Pass::outputs ? add_outputs(tile, split) : add_gradients(tile, split);
    }
  }
  if (pass == Pass::outputs) return;
  const MutableHeadView &grad_k = params.moved_grad_k, &grad_v = params.moved_grad_v;
  for (int64_t n = 0; n < count; ++n) {
    store_row(side.grad_k + n * ldk, static_cast<A>(p.score.chain), p.d,
              row_of<T>(grad_k, b, keys.begin + n, h));
    store_row(side.grad_v + n * ldv, A(1), p.dv, row_of<T>(grad_v, b, keys.begin + n, h));
  }
}

// Sums a row over the splits, in order, into that of split 0.
template <class A>
A* summed_row(const TangentRows<A>& rows, int64_t row) {
  A* const sum = rows.sums(0, row);
  for (int64_t split = 1; split < rows.splits; ++split) {
    const A* const part = rows.sums(split, row);
    for_columns<A>({0, rows.ld_sums},
                   [&](int64_t c) { store(sum + c, load(sum + c) + load(part + c)); });
  }
  return sum;
}

// Computes O' and m of one block of queries, and what its gradients need.
template <class T>
void join_block(const Params& params, const TangentRows<compute_t<T>>& rows, const QueryBlock& x) {
  using A = compute_t<T>;
  using V = Vec<A>;
  const AttentionProblem& p = params.problem;
  const int64_t count = x.queries.end - x.queries.begin, stat = stat_of(p, x);
  const A* const grad_lse = static_cast<const A*>(params.grad_lse);
  const A* const moved_grad_lse = static_cast<const A*>(params.moved_grad_lse);
  for (int64_t r = 0; r < count; ++r) {
    const int64_t row = x.row + r, t = x.queries.begin + r;
    A* const sum = summed_row(rows, row);
    A mean = rows.mean(0, row);
    for (int64_t split = 1; split < params.splits; ++split) mean += rows.mean(split, row);
    rows.mean(0, row) = mean;
    const T* const out = row_of<T>(params.out, x.b, t, x.h);
    for (int64_t c = 0; c < p.dv; c += V::kWidth) {
      store(sum + c, load(sum + c) - V(mean) * load_n(out + c, p.dv - c));
    }
    store_row(sum, A(1), p.dv, row_of<T>(params.moved_out, x.b, t, x.h));
    static_cast<A*>(params.moved_lse)[stat + r] = mean;
    if (!has_gradients(params)) continue;
    const A *const grad = rows.grad_out(row), *const moved_grad = grad + half_row(p.dv);
    V delta = zero<A>(), moved_delta = zero<A>();
    for (int64_t c = 0; c < p.dv; c += V::kWidth) {
      const V o = load_n(out + c, p.dv - c);
      delta = fma(o, load(grad + c), delta);
      moved_delta = fma(load(sum + c), load(grad + c), fma(o, load(moved_grad + c), moved_delta));
    }
    rows.delta(row) = reduce_add(delta) - (grad_lse != nullptr ? grad_lse[stat + r] : A(0));
    rows.moved_delta(row) =
        reduce_add(moved_delta) - (moved_grad_lse != nullptr ? moved_grad_lse[stat + r] : A(0));
  }
  for (int64_t split = 0; split < params.splits; ++split) {
    fill_zero(rows.sums(split, x.row), count * rows.ld_sums);
  }
}

// Computes dq' of one block of queries.
template <class T>
void finish_block(const Params& params, const TangentRows<compute_t<T>>& rows,
                  const QueryBlock& x) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.problem;
  const A factor = query_factor<A>(p, x.h) * static_cast<A>(p.score.chain);
  for (int64_t r = 0; r < x.queries.end - x.queries.begin; ++r) {
    store_row(summed_row(rows, x.row + r), factor, p.d,
              row_of<T>(params.moved_grad_q, x.b, x.queries.begin + r, x.h));
  }
}

// Work items.

template <class F>
void for_items(const Params& params, int64_t begin, int64_t end, const F& f) {
  dispatch(params.problem.dtype, [&](auto type) {
    for (int64_t i = begin; i < end; ++i) f(type, i);
  });
}
// Calls f(type, rows, block) for blocks of queries.
template <class F>
void for_blocks(const Params& params, int64_t begin, int64_t end, const F& f) {
  OMNIATTN_ASSERT_ITEMS(begin, end, forward_items(params.problem));
  for_items(params, begin, end, [&](auto type, int64_t i) {
    f(type, all_rows<compute_t<decltype(type)>>(params), query_block_item(params.problem, i));
  });
}

// Runs one pass over the key blocks of a kv head that belong to a split.
template <class T>
void key_blocks(const Params& params, const TangentRows<compute_t<T>>& rows, void* scratch,
                Pass pass, int64_t head, int64_t split) {
  const AttentionProblem& p = params.problem;
  for (int64_t n = split; n < key_block_count(p); n += params.splits) {
    key_block<T>(params, rows, scratch, pass, split, head / p.hkv, head % p.hkv,
                 block(n, kKeyBlock, p.tk));
  }
}

template <Pass kPass>
void pass_over_keys(const Params& params, void* scratch, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, tangent_items(params));
  OMNIATTN_ASSERT_HAS(scratch, tangent_scratch_elements(params.problem));
  const int64_t heads = kv_head_items(params.problem);
  for_items(params, begin, end, [&](auto type, int64_t i) {
    using T = decltype(type);
    key_blocks<T>(params, all_rows<compute_t<T>>(params), scratch, kPass, i % heads, i / heads);
  });
}

void prepare(const Params& params, void*, int64_t begin, int64_t end) {
  for_blocks(params, begin, end, [&](auto type, const auto& rows, const QueryBlock& x) {
    prepare_block<decltype(type)>(params, rows, x);
  });
}
void join(const Params& params, void*, int64_t begin, int64_t end) {
  for_blocks(params, begin, end, [&](auto type, const auto& rows, const QueryBlock& x) {
    join_block<decltype(type)>(params, rows, x);
  });
}
void finish(const Params& params, void*, int64_t begin, int64_t end) {
  for_blocks(params, begin, end, [&](auto type, const auto& rows, const QueryBlock& x) {
    finish_block<decltype(type)>(params, rows, x);
  });
}

// Runs all steps for kv heads.
void heads(const Params& params, void* scratch, int64_t begin, int64_t end) {
  const AttentionProblem& p = params.problem;
  OMNIATTN_ASSERT_ITEMS(begin, end, kv_head_items(p));
  OMNIATTN_ASSERT_HAS(scratch, tangent_scratch_elements(p));
  const int64_t group = group_size(p), count = group * p.tq;
  for_items(params, begin, end, [&](auto type, int64_t item) {
    using T = decltype(type);
    using A = compute_t<T>;
    A* const memory = static_cast<A*>(scratch) + tangent_scratch_elements(p);
    const TangentRows<A> rows(params, memory, item * count, count);
    const auto for_query_blocks = [&](auto f) {
      for (int64_t head = item * group; head < (item + 1) * group; ++head) {
        for (int64_t n = 0; n < query_block_count(p); ++n) f(query_block(p, head, n));
      }
    };
    for_query_blocks([&](const QueryBlock& x) { prepare_block<T>(params, rows, x); });
    key_blocks<T>(params, rows, scratch, Pass::outputs, item, 0);
    for_query_blocks([&](const QueryBlock& x) { join_block<T>(params, rows, x); });
    if (!has_gradients(params)) return;
    key_blocks<T>(params, rows, scratch, Pass::gradients, item, 0);
    for_query_blocks([&](const QueryBlock& x) { finish_block<T>(params, rows, x); });
  });
}

}  // namespace

extern const AttentionTangentKernels attention_tangent_kernels_table = {
    prepare, pass_over_keys<Pass::outputs>, join, pass_over_keys<Pass::gradients>, finish, heads};

}  // namespace omniattn::OMNIATTN_ISA
