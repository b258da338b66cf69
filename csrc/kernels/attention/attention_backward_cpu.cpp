// Backward in five products per tile (see attention.h; spec attention 2). A work item owns a set of
// (b, kv head) and every splits-th key block: for each it recomputes P from lse and adds
//
//   dV += (Z P)^T dO     dP = dO V^T     dS = P (Z dP - Delta)     dK += dx^T x_q     dQ += dx K
//
// with dx = dS * slope of the softcap. The factor of a row of P (see Lse) multiplies the row's dO
// instead, and with it Delta. dK and dV of the block stay in L2 and are written once. Products read
// operands M, see attention_forward_cpu.cpp; x_q of bf16 is q, and dx of dK is scaled.
#include "kernels/attention/attention.h"
#include "kernels/attention/attention_tile.h"
#include "runtime/dispatch.h"
#include "semantics/softmax.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Workspace: x_q = pre * q, dO times the factor of its row of P, dQ once per split, Delta and
// shift, for rows [first, first + count) of all (b, h, q).
template <class T>
struct QueryRows {
  using A = compute_t<T>;
  using M = operand_t<T>;
  int64_t first, count, ldq, ldo;
  M *q_, *grad_out_;
  A *grad_q_, *delta_, *shift_;

  QueryRows(const AttentionBackwardParams& params, void* memory, int64_t first_row, int64_t rows)
      : first(first_row),
        count(rows),
        ldq(padded_row(params.problem.d)),
        ldo(padded_row(params.problem.dv)) {
    Arena<A> arena{static_cast<A*>(memory), backward_workspace_elements(params, rows)};
    q_ = reinterpret_cast<M*>(arena.take(count * ldq));
    grad_out_ = reinterpret_cast<M*>(arena.take(count * ldo));
    grad_q_ = arena.take(count * ldq * params.splits);
    delta_ = arena.take(count);
    shift_ = arena.take(count);
  }
  OMNIATTN_INLINE M* q(int64_t row) const { return q_ + (row - first) * ldq; }
  OMNIATTN_INLINE M* grad_out(int64_t row) const { return grad_out_ + (row - first) * ldo; }
  OMNIATTN_INLINE A* grad_q(int64_t split, int64_t row) const {
    return grad_q_ + (split * count + row - first) * ldq;
  }
  OMNIATTN_INLINE A& delta(int64_t row) const { return delta_[row - first]; }
  OMNIATTN_INLINE A& shift(int64_t row) const { return shift_[row - first]; }
};
template <class T>
QueryRows<T> all_rows(const AttentionBackwardParams& params) {
  return QueryRows<T>(params, params.workspace, 0, query_rows(params.problem));
}

// One block of queries of one head.
struct QueryBlock {
  int64_t b, h;
  Range queries;
  int64_t row;  // of the first query among all (b, h, q)
};
inline QueryBlock query_block(const AttentionProblem& p, int64_t b, int64_t h, int64_t n) {
  const Range queries = block(n, kQueryBlock, p.tq);
  return {b, h, queries, (b * p.hq + h) * p.tq + queries.begin};
}
inline QueryBlock query_block_item(const AttentionProblem& p, int64_t item) {
  const int64_t head = item / query_block_count(p);
  return query_block(p, head / p.hq, head % p.hq, item % query_block_count(p));
}

// Where the block's part of a gradient per head goes.
inline int64_t part_of(const AttentionProblem& p, const QueryBlock& x) {
  return (x.b * p.hq + x.h) * query_block_count(p) + x.queries.begin / kQueryBlock;
}

template <class T>
void prepare_block(const AttentionBackwardParams& params, const QueryRows<T>& rows,
                   const QueryBlock& x) {
  using A = compute_t<T>;
  using V = Vec<A>;
  const AttentionProblem& p = params.problem;
  const int64_t count = x.queries.end - x.queries.begin;
  pack_rows<T>(row_of<T>(p.q, x.b, x.queries.begin, x.h), p.q.stride_t, count, p.d,
               kKeepsQueries<T> ? A(1) : query_factor<A>(p, x.h), rows.q(x.row));
  const int64_t stat = (x.b * p.hq + x.h) * p.lse_stride + x.queries.begin;  // place in lse
  const A* const lse = static_cast<const A*>(params.lse) + stat;
  const A* const tail = static_cast<const A*>(params.lse_tail) + stat;
  const A* const grad_lse = static_cast<const A*>(params.grad_lse);
  for (int64_t r = 0; r < count; ++r) {
    const int64_t row = x.row + r;
    const T* const out = row_of<T>(params.out, x.b, x.queries.begin + r, x.h);
    const A factor = exp2(V(softmax_tail_exponent(tail[r]))).v[0];
    auto* const grad = rows.grad_out(row);
    pack_rows<T>(row_of<T>(params.grad_out, x.b, x.queries.begin + r, x.h), 0, 1, p.dv, factor,
                 grad);
    V sum = zero<A>();
    for (int64_t c = 0; c < p.dv; c += V::kWidth) {
      sum = fma(load_n(out + c, p.dv - c), load(grad + c), sum);
    }
    rows.delta(row) = reduce_add(sum) - (grad_lse != nullptr ? factor * grad_lse[stat + r] : A(0));
    rows.shift(row) = softmax_backward_shift(p.score, lse[r]);
  }
  if (params.part_sinks != nullptr) {
    A sum = A(0);
    for (int64_t row = x.row; row < x.row + count; ++row) {
      const A distance = initial_maximum<A>(p, x.h) - rows.shift(row);
      sum -= exp2(V(distance * exponent_factor<A>(p.score))).v[0] * rows.delta(row);
    }
    static_cast<A*>(params.part_sinks)[part_of(p, x)] = sum;
  }
  for (int64_t split = 0; split < params.splits; ++split) {
    fill_zero(rows.grad_q(split, x.row), count * rows.ldq);
  }
}

// Tiles and key-side operands of one work item.
template <class T>
struct KeySide {
  using A = compute_t<T>;
  using M = operand_t<T>;
  M *kt, *vt, *k;
  A *grad_k, *grad_v, *p, *ds;

  KeySide(const AttentionBackwardParams& params, void* scratch) {
    const AttentionProblem& x = params.problem;
    Arena<A> arena{static_cast<A*>(scratch), backward_scratch_elements(params)};
    kt = reinterpret_cast<M*>(arena.take(kKeyBlock * x.d));
    vt = reinterpret_cast<M*>(arena.take(kKeyBlock * x.dv));
    k = reinterpret_cast<M*>(arena.take(kKeyBlock * padded_row(x.d)));
    grad_k = arena.take(kKeyBlock * padded_row(x.d));
    grad_v = arena.take(kKeyBlock * padded_row(x.dv));
    p = arena.take(kQueryBlock * kKeyBlock);
    ds = arena.take(kQueryBlock * kKeyBlock);
  }
};

// From logits in p and dP in ds: the weights and dS.
template <class A>
OMNIATTN_INLINE void softmax_row(const Score& score, A* p, A* ds, Range columns, A shift, A delta) {
  using V = Vec<A>;
  with_exponent<A>(score, [&](auto exponent) {
    for_columns<A>(columns, [&](int64_t n) {
      const V e = exp2(exponent(load(p + n) - V(shift)));
      store(p + n, e);
      store(ds + n, e * (load(ds + n) - V(delta)));
    });
  });
}
template <class A>
OMNIATTN_INLINE void pointwise_row(Normaliser normaliser, A* p, A* ds, Range columns) {
  with_pointwise(normaliser, [&](auto constant) {
    for_columns<A>(columns, [&](int64_t n) {
      const PointwiseWeight<A> w(decltype(constant)::value, load(p + n));
      store(p + n, w.weight);
      store(ds + n, w.slope * load(ds + n));
    });
  });
}

// to[n] += from[n] for the columns below `count`.
template <class A>
OMNIATTN_INLINE void add_to_row(const A* from, Range columns, int64_t count, A* to) {
  for_columns<A>(columns, [&](int64_t n) {
    store_n(to + n, load_n(to + n, count - n) + load(from + n), count - n);
  });
}

// The same where `to` holds no other sum. Rows of whole lines may go past the caches.
template <class A>
OMNIATTN_INLINE void write_row(const A* from, Range columns, int64_t count, bool past_caches,
                               A* to) {
  const bool lines = reinterpret_cast<uintptr_t>(to) % 64 == 0 && columns.end <= count;
  if (past_caches && lines) {
    for_columns<A>(columns, [&](int64_t n) { stream(to + n, load(from + n)); });
  } else {
    for_columns<A>(columns, [&](int64_t n) { store_n(to + n, load(from + n), count - n); });
  }
}

// From pre * q.k in p and dP in ds: the weights, after dropout, and dS, which goes to the gradients
// of bias and table term, null where there are none.
template <class A>
void gradient_row(const RowScore<A>& score, A* p, A* ds, Range columns, A shift, A delta,
                  A* grad_bias, BiasWrite bias_write, A* grad_relative) {
  const AttentionProblem& x = score.p;
  A t[kKeyBlock];
  score.to_logits(p, columns, t);
  const auto drop = [&](A* row) {
    if (x.dropout.threshold == 0) return;
    RowDropout<A>(x, score.b, score.h, score.q, score.key).apply(row, columns);
  };
  drop(ds);
  if (x.score.normaliser == Normaliser::softmax) {
    softmax_row(x.score, p, ds, columns, shift, delta);
  } else {
    pointwise_row(x.score.normaliser, p, ds, columns);
  }
  score.hide(ds, columns, A(0));  // a hidden key may hold anything, 0 * NaN included
  if (grad_bias != nullptr) {
    const int64_t count = x.tk - score.key;
    if (bias_write == BiasWrite::add) {
      add_to_row(ds, columns, count, grad_bias);
    } else {
      write_row(ds, columns, count, bias_write == BiasWrite::stream, grad_bias);
    }
  }
  if (grad_relative != nullptr) add_to_row(ds, columns, kKeyBlock, grad_relative);
  drop(p);
  if (x.score.post != 0) {
    for_columns<A>(columns,
                   [&](int64_t n) { store(ds + n, load(ds + n) * softcap_slope(load(t + n))); });
  }
}

// `grad_bias` is that of the tile's first query and key.
template <class T, class A>
void gradient_rows(const AttentionBackwardParams& params, const QueryRows<T>& rows, int64_t split,
                   int64_t b, int64_t h, const TilePlan& plan, A* p, A* ds, A* grad_bias) {
  const AttentionProblem& problem = params.problem;
  const A factor = kKeepsQueries<T> ? query_factor<A>(problem, h) : A(1);
  A* relative = nullptr;  // of the first query and key
  if (params.part_relative != nullptr) {
    const int64_t part = split * table_parts(params) + b / batches_per_plane(params);
    relative = static_cast<A*>(params.part_relative) +
               (part * problem.hq + h) * params.part_relative_plane + problem.relative.origin +
               plan.queries.begin * problem.relative.stride_q + plan.keys.begin;
  }
  for (int64_t g = 0; g < plan.groups(); ++g) {
    const Range columns = plan.columns[g], group = plan.group_rows(g);
    for (int64_t r = group.begin; r < group.end; ++r) {
      A* const p_row = p + r * kKeyBlock;
      A* const ds_row = ds + r * kKeyBlock;
      A* const both[] = {p_row, ds_row};
      for (A* const x : both) {  // the products down the columns read whole rows
        fill_zero(x, columns.begin);
        fill_zero(x + columns.end, kKeyBlock - columns.end);
      }
      const int64_t q = plan.queries.begin + r, row = (b * problem.hq + h) * problem.tq + q;
      const RowScore<A> score{
          problem, b, h, q, plan.keys.begin, plan.masked[g] ? plan.visible[r] : nullptr};
      scale_row(p_row, columns, factor);
      gradient_row(score, p_row, ds_row, columns, rows.shift(row), rows.delta(row),
                   grad_bias == nullptr ? nullptr : grad_bias + r * params.grad_bias_stride_q,
                   params.bias_write,
                   relative == nullptr ? nullptr : relative + r * problem.relative.stride_q);
    }
  }
}

// What products read of a tile: P and dx of dK down their columns, dx of dQ along its rows.
template <class M>
struct TileOperands {
  const M *p, *dk, *dq;
};

template <class T, class A>
TileOperands<operand_t<T>> tile_operands(const AttentionProblem& problem, int64_t h,
                                         const TilePlan& plan, A* p, A* ds) {
  using M = operand_t<T>;
  if constexpr (!kKeepsQueries<T>) {
    return {p, ds, ds};
  } else {
    // In their own memory: pairs of rows in the first half of each tile, the rows of dq in the
    // other half of p, which is free when p is done.
    constexpr int64_t kHalf = kQueryBlock * kKeyBlock;
    M* const p_pairs = reinterpret_cast<M*>(p);
    M* const ds_pairs = reinterpret_cast<M*>(ds);
    M* const ds_rows = p_pairs + kHalf;
    const int64_t rows = plan.rows();
    const A factor = query_factor<A>(problem, h);
    if (rows % 2 != 0) {
      fill_zero(p + rows * kKeyBlock, kKeyBlock);
      fill_zero(ds + rows * kKeyBlock, kKeyBlock);
    }
    const auto pair_rows = [](const A* x, int64_t r, int64_t n, A scale, M* pairs) {
      const Vec<A> first = load(x + r * kKeyBlock + n), second = load(x + (r + 1) * kKeyBlock + n);
      store_pairs(pairs + r * kKeyBlock + 2 * n,
                  narrow_to_pairs(first * Vec<A>(scale), second * Vec<A>(scale)));
    };
    for (int64_t r = 0; r < rows; r += 2) {
      for_columns<A>({0, kKeyBlock}, [&](int64_t n) { pair_rows(p, r, n, A(1), p_pairs); });
    }
    for (int64_t r = 0; r < rows; ++r) {
      for_columns<A>({0, kKeyBlock}, [&](int64_t n) {
        store(ds_rows + r * kKeyBlock + n, load(ds + r * kKeyBlock + n));
      });
    }
    for (int64_t r = 0; r < rows; r += 2) {
      for_columns<A>({0, kKeyBlock}, [&](int64_t n) { pair_rows(ds, r, n, factor, ds_pairs); });
    }
    return {p_pairs, ds_pairs, ds_rows};
  }
}

// sum += X^T Y: X (queries x keys of the tile), of bf16 in pairs of queries, Y rows of queries.
// Where the mask cuts the tile, a few keys at a time take only the groups that see them.
template <class M>
void accumulate_queries(const TilePlan& plan, const M* x, const M* y, int64_t ld, int64_t width,
                        compute_t<M>* sum) {
  constexpr int64_t kPair = Operand<M>::kStep;
  const int64_t step = plan.is_full() ? kKeyBlock : kRowGroup;
  const auto multiply = [&](Panels<M> b, int64_t column, int64_t columns) {
    for (int64_t key = 0; key < kKeyBlock; key += step) {
      const Range keys = intersect({key, key + step}, {0, kKeyBlock});
      Range rows = {kQueryBlock, 0};
      for (int64_t g = 0; g < plan.groups(); ++g) {
        if (is_empty(intersect(plan.columns[g], keys))) continue;
        const Range group = plan.group_rows(g);
        rows = {group.begin < rows.begin ? group.begin : rows.begin, group.end};
      }
      if (is_empty(rows)) continue;
      gemm_tile<M, ALayout::kTransposed>(
          x + rows.begin * kKeyBlock + key * kPair, kKeyBlock, b.at(rows.begin, 0),
          sum + key * ld + column, ld, keys.end - keys.begin, columns, rows.end - rows.begin, true);
    }
  };
  if constexpr (kPair == 1) {
    multiply(row_panels(y, ld), 0, width);
  } else {
    M pairs[kQueryBlock * kPanelCols<M>];
    for (int64_t column = 0; column < width; column += kPanelCols<M>) {
      const int64_t columns = width - column < kPanelCols<M> ? width - column : kPanelCols<M>;
      pack_rows(y + column, ld, plan.rows(), columns, pairs, kPanelCols<M>, columns);
      multiply(packed_panels(static_cast<const M*>(pairs), kQueryBlock), column, columns);
    }
  }
}

template <class T>
void gradient_tile(const AttentionBackwardParams& params, const QueryRows<T>& rows,
                   const KeySide<T>& side, int64_t split, int64_t b, int64_t h,
                   const TilePlan& plan) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.problem;
  const int64_t row = (b * p.hq + h) * p.tq + plan.queries.begin;
  const auto* const q = rows.q(row);
  const auto* const grad_out = rows.grad_out(row);
  const int64_t width_k = round_up(p.d, 16), width_v = round_up(p.dv, 16);
  A* grad_bias = nullptr;
  TileRows bias = bias_rows(p, b, h, plan), old_bias_gradient{};
  if (params.grad_bias != nullptr) {
    grad_bias = static_cast<A*>(params.grad_bias) + b * params.grad_bias_stride_b +
                h * params.grad_bias_stride_h + plan.queries.begin * params.grad_bias_stride_q +
                plan.keys.begin;
    if (params.bias_write == BiasWrite::add) {
      old_bias_gradient = tile_rows_of(grad_bias, params.grad_bias_stride_q, sizeof(A));
    }
  }
  multiply_by_keys(plan, q, rows.ldq, p.d, side.kt, side.p, bias);
  multiply_by_keys(plan, grad_out, rows.ldo, p.dv, side.vt, side.ds, old_bias_gradient);
  gradient_rows<T>(params, rows, split, b, h, plan, side.p, side.ds, grad_bias);
  const auto x = tile_operands<T>(p, h, plan, side.p, side.ds);
  accumulate_queries(plan, x.p, grad_out, rows.ldo, width_v, side.grad_v);
  accumulate_queries(plan, x.dk, q, rows.ldq, width_k, side.grad_k);
  accumulate_keys(plan, x.dq, kKeyBlock, side.k, rows.ldq, width_k, rows.grad_q(split, row),
                  rows.ldq);
}

// All queries of one kv head against one key block.
template <class T>
void gradient_key_block(const AttentionBackwardParams& params, const QueryRows<T>& rows,
                        void* scratch, int64_t split, int64_t b, int64_t h, Range keys) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.problem;
  const KeySide<T> side(params, scratch);
  const int64_t count = keys.end - keys.begin;
  const T* const k = row_of<T>(p.k, b, keys.begin, h);
  const T* const v = row_of<T>(p.v, b, keys.begin, h);
  pack_keys_as_columns(k, p.k.stride_t, p.d, count, kKeyBlock, side.kt);
  pack_keys_as_columns(v, p.v.stride_t, p.dv, count, kKeyBlock, side.vt);
  pack_operand_rows(k, p.k.stride_t, count, p.d, side.k);
  fill_zero(side.grad_k, kKeyBlock * rows.ldq);
  fill_zero(side.grad_v, kKeyBlock * rows.ldo);

  TilePlan plan;
  for (int64_t head = h * group_size(p); head < (h + 1) * group_size(p); ++head) {
    for (QueryTiles tiles(p, b, head, keys); tiles.next(plan);) {
      gradient_tile<T>(params, rows, side, split, b, head, plan);
    }
  }
  for (int64_t n = 0; n < count; ++n) {
    store_row(side.grad_k + n * rows.ldq, static_cast<A>(p.score.chain), p.d,
              row_of<T>(params.grad_k, b, keys.begin + n, h));
    store_row(side.grad_v + n * rows.ldo, A(1), p.dv,
              row_of<T>(params.grad_v, b, keys.begin + n, h));
  }
}

// dQ of one block of queries: the sum over splits, in order, times the scale.
template <class T>
void finish_block(const AttentionBackwardParams& params, const QueryRows<T>& rows,
                  const QueryBlock& x) {
  using A = compute_t<T>;
  using V = Vec<A>;
  const AttentionProblem& p = params.problem;
  V head_scale = zero<A>();
  for (int64_t r = 0; r < x.queries.end - x.queries.begin; ++r) {
    A* const sum = rows.grad_q(0, x.row + r);
    for (int64_t split = 1; split < params.splits; ++split) {
      const A* const part = rows.grad_q(split, x.row + r);
      for (int64_t c = 0; c < rows.ldq; c += V::kWidth) {
        store(sum + c, load(sum + c) + load(part + c));
      }
    }
    store_row(sum, query_factor<A>(p, x.h) * static_cast<A>(p.score.chain), p.d,
              row_of<T>(params.grad_q, x.b, x.queries.begin + r, x.h));
    if (params.part_head_scale == nullptr) continue;
    const T* const q = row_of<T>(p.q, x.b, x.queries.begin + r, x.h);
    for (int64_t c = 0; c < p.d; c += V::kWidth) {
      head_scale = fma(load_n(q + c, p.d - c), load(sum + c), head_scale);
    }
  }
  if (params.part_head_scale != nullptr) {
    static_cast<A*>(params.part_head_scale)[part_of(p, x)] =
        reduce_add(head_scale) * static_cast<A>(p.score.pre * p.score.chain);
  }
}

// ---- work items --------------------------------------------------------------------------------

// f(b, kv head) for all that an owner has, in order.
template <class F>
void for_owned(const AttentionBackwardParams& params, int64_t owner, const F& f) {
  const AttentionProblem& p = params.problem;
  const int64_t head_owners = p.hkv / heads_per_item(params);
  const Range batches = block(owner / head_owners, batches_per_item(params), p.batch);
  const Range heads = block(owner % head_owners, heads_per_item(params), p.hkv);
  for (int64_t b = batches.begin; b < batches.end; ++b) {
    for (int64_t h = heads.begin; h < heads.end; ++h) f(b, h);
  }
}

template <class T>
void backward_item(const AttentionBackwardParams& params, void* scratch, int64_t item) {
  const AttentionProblem& p = params.problem;
  const auto rows = all_rows<T>(params);
  const int64_t owner = item % backward_owners(params), split = item / backward_owners(params);
  for_owned(params, owner, [&](int64_t b, int64_t h) {
    for (int64_t n = split; n < key_block_count(p); n += params.splits) {
      gradient_key_block<T>(params, rows, scratch, split, b, h, block(n, kKeyBlock, p.tk));
    }
  });
}

// Everything for one kv head.
template <class T>
void whole_head(const AttentionBackwardParams& params, void* scratch, int64_t b, int64_t h) {
  const AttentionProblem& p = params.problem;
  const int64_t group = group_size(p), count = group * p.tq;
  auto* const memory = static_cast<compute_t<T>*>(scratch) + backward_scratch_elements(params);
  const QueryRows<T> rows(params, memory, (b * p.hkv + h) * count, count);
  const auto for_query_blocks = [&](auto f) {
    for (int64_t head = h * group; head < (h + 1) * group; ++head) {
      for (int64_t n = 0; n < query_block_count(p); ++n) f(query_block(p, b, head, n));
    }
  };
  for_query_blocks([&](const QueryBlock& x) { prepare_block<T>(params, rows, x); });
  for (int64_t n = 0; n < key_block_count(p); ++n) {
    gradient_key_block<T>(params, rows, scratch, 0, b, h, block(n, kKeyBlock, p.tk));
  }
  for_query_blocks([&](const QueryBlock& x) { finish_block<T>(params, rows, x); });
}

void prepare(const AttentionBackwardParams& p, void*, int64_t begin, int64_t end) {
  dispatch(p.problem.dtype, [&](auto type) {
    using T = decltype(type);
    const auto rows = all_rows<T>(p);
    for (int64_t i = begin; i < end; ++i) {
      prepare_block<T>(p, rows, query_block_item(p.problem, i));
    }
  });
}

void backward(const AttentionBackwardParams& p, void* scratch, int64_t begin, int64_t end) {
  dispatch(p.problem.dtype, [&](auto type) {
    for (int64_t i = begin; i < end; ++i) backward_item<decltype(type)>(p, scratch, i);
  });
  if (p.bias_write == BiasWrite::stream) stream_fence();
}

void finish(const AttentionBackwardParams& p, void*, int64_t begin, int64_t end) {
  dispatch(p.problem.dtype, [&](auto type) {
    using T = decltype(type);
    const auto rows = all_rows<T>(p);
    for (int64_t i = begin; i < end; ++i) {
      finish_block<T>(p, rows, query_block_item(p.problem, i));
    }
  });
}

void backward_heads(const AttentionBackwardParams& p, void* scratch, int64_t begin, int64_t end) {
  dispatch(p.problem.dtype, [&](auto type) {
    for (int64_t i = begin; i < end; ++i) {
      for_owned(p, i, [&](int64_t b, int64_t h) { whole_head<decltype(type)>(p, scratch, b, h); });
    }
  });
  if (p.bias_write == BiasWrite::stream) stream_fence();
}

}  // namespace

extern const AttentionBackwardKernels attention_backward_kernels_table = {prepare, backward, finish,
                                                                          backward_heads};

}  // namespace omniattn::OMNIATTN_ISA
