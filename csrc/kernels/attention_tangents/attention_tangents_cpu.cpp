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
#include "kernels/attention_tangents/attention_tangents_tile.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "semantics/block_schedule.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

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
