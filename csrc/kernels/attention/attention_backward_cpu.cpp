// Backward in five products per tile (see attention_kernels_cpu.h). A work item owns a set of (b,
// kv head) and every splits-th key block. For each block it recomputes P from lse and adds
//
//   dV += (Z P)^T dO     dP = dO V^T     dS = P (Z dP - Delta)     dK += dx^T x_q     dQ += dx K
//
// where dx = dS * slope of the transform. The rounding factor of a row of P (see Lse) multiplies
// the row's dO and Delta instead. dK and dV of the block stay in L2 and are written once. Products
// read operands M, see attention_forward_cpu.cpp; if these have 16 bits, x_q is the unscaled q and
// the dx in dK is scaled. With AMX tiles, one group of rows of P and dS at a time stays in L1.
#include "kernels/attention/attention_backward_tile.h"
#include "kernels/attention/attention_distance.h"
#include "kernels/attention/attention_kernels_cpu.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "runtime/transpose.h"
#include "semantics/block_schedule.h"
#include "semantics/softmax.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class T>
QueryRows<T> all_rows(const AttentionBackwardParams& params) {
  return QueryRows<T>(params, params.workspace, 0, query_rows(params.problem));
}

// One block of queries of one head.
struct QueryBlock {
  int64_t b, h;
  Range queries;
  int64_t row;  // index of the first query over all (b, h, q)
};
inline QueryBlock query_block(const AttentionProblem& p, int64_t b, int64_t h, int64_t n) {
  const Range queries = block(n, kQueryBlock, p.tq);
  return {b, h, queries, (b * p.hq + h) * p.tq + queries.begin};
}
inline QueryBlock query_block_item(const AttentionProblem& p, int64_t item) {
  const int64_t head = item / query_block_count(p);
  return query_block(p, head / p.hq, head % p.hq, item % query_block_count(p));
}

// Index of the block's part of a gradient per head.
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
  pack_queries<T>(p, x.b, x.h, x.queries, rows.q(x.row));
  const int64_t stat = (x.b * p.hq + x.h) * p.lse_stride + x.queries.begin;  // index in lse
  const A* const lse = static_cast<const A*>(params.lse) + stat;
  const A* const tail = static_cast<const A*>(params.lse_tail) + stat;
  const A* const grad_lse = static_cast<const A*>(params.grad_lse);
  for (int64_t r = 0; r < count; ++r) {
    const int64_t row = x.row + r;
    const T* const out = row_of<T>(params.out, x.b, x.queries.begin + r, x.h);
    const auto [shift, exponent] = is_stick(p.score)
                                       ? BackwardShift<A>{A(0), A(0)}
                                       : softmax_backward_shift(p.score, Lse<A>{lse[r], tail[r]});
    const A factor = exp2(V(exponent)).v[0];
    const A kept = kSplits<operand_t<T>> ? factor : A(1);  // folding it into dO would round
    auto* const grad = rows.grad_out(row);
    pack_rows<T>(row_of<T>(params.grad_out, x.b, x.queries.begin + r, x.h), 0, 1, p.dv,
                 kSplits<operand_t<T>> ? A(1) : factor, grad);
    V sum = zero<A>();
    for (int64_t c = 0; c < p.dv; c += V::kWidth) {
      sum = fma(load_n(out + c, p.dv - c), load(grad + c), sum);
    }
    rows.delta(row) =
        kept * reduce_add(sum) - (grad_lse != nullptr ? factor * grad_lse[stat + r] : A(0));
    rows.shift(row) = shift;
    rows.factor(row) = kept;
    if (is_stick(p.score)) {
      rows.delta(row) = grad_lse != nullptr ? grad_lse[stat + r] : A(0);
      rows.left(row) = {-lse[r], -tail[r]};
    }
  }
  if constexpr (kSumsColumns<T>) {
    transpose_rows(rows.q(x.row), rows.ldq, count, p.d, rows.q_columns(x.row));
    transpose_rows(rows.grad_out(x.row), rows.ldo, count, p.dv, rows.grad_out_columns(x.row));
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
    fill_zero(rows.grad_q(split, x.row), count * rows.width_q);
  }
}

// Tiles and key-side operands of one work item.
template <class T>
struct KeySide {
  using A = compute_t<T>;
  using M = operand_t<T>;
  M *kt, *vt, *k, *weight_pairs, *dx_pairs, *dx;
  A *grad_k, *grad_v;  // if kSumsColumns, (d, kKeyRow) and (dv, kKeyRow)
  A *weights, *ds, *registers, *distances;

  KeySide(const AttentionBackwardParams& params, void* scratch) {
    const AttentionProblem& x = params.problem;
    Arena<A> arena{static_cast<A*>(scratch), backward_scratch_elements(params)};
    kt = reinterpret_cast<M*>(arena.take(kKeyBlock * x.d));
    vt = reinterpret_cast<M*>(arena.take(kKeyBlock * x.dv));
    k = reinterpret_cast<M*>(arena.take(kKeyBlock * padded_row(x.d)));
    grad_k = arena.take(kKeyRow * padded_row(x.d));
    grad_v = arena.take(kKeyRow * padded_row(x.dv));
    weights = arena.take(kQueryBlock * kKeyBlock);
    ds = arena.take(kQueryBlock * kKeyBlock);
    weight_pairs = reinterpret_cast<M*>(arena.take(column_elements(x, kQueryBlock, kKeyRow)));
    dx_pairs = reinterpret_cast<M*>(arena.take(column_elements(x, kQueryBlock, kKeyRow)));
    dx = reinterpret_cast<M*>(arena.take(column_elements(x, kQueryBlock, kKeyRow)));
    registers = arena.take(backward_program_elements(x));
    distances = arena.take(distance_elements(x));
  }
};

// Sets the memory in which an item accumulates the gradients of the tables of a program.
template <class A>
void give_program_parts(const AttentionBackwardParams& params, int64_t split, int64_t b, int64_t h,
                        ProgramGradient* to) {
  const int64_t kv = kv_head(h, params.problem.hq, params.problem.hkv);
  for (int64_t n = 0; n < params.problem.program->table_count; ++n) {
    const ProgramGradients::Table& table = params.grad_program->tables[n];
    to[n] = table.whole;
    if (to[n].data == nullptr) continue;
    const int64_t part = program_part(params, table.has_heads, b, kv, split);
    to[n].data = static_cast<A*>(to[n].data) + part * table.elements;
  }
}

// Memory in which an item sums gradients of a head's rows of distances; `parts` null: not wanted.
template <class A>
A* distance_part(const AttentionBackwardParams& params, const DistanceRows& rows, void* parts,
                 int64_t split, int64_t b, int64_t h) {
  if (parts == nullptr) return nullptr;
  const AttentionProblem& p = params.problem;
  const int64_t part = split * distance_parts(params) + b / batches_per_item(params);
  const int64_t size = distance_part_elements(p, rows);
  return static_cast<A*>(parts) + part * size + h * (size / p.hq);
}

// Computes P and dS of a tile, or of one group of its rows: calls f(tile), which holds q.k and dP.
template <class T, class F>
void score_gradients(const AttentionBackwardParams& params, const QueryRows<T>& rows,
                     const KeySide<T>& side, int64_t split, int64_t b, int64_t h,
                     const TilePlan& plan, const F& f) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.problem;
  const int64_t row = (b * p.hq + h) * p.tq + plan.queries.begin;
  const auto* const q = rows.q(row);
  GradientTile<T> tile{params,       rows,    plan,           b,       h,       row,
                       side.weights, side.ds, side.registers, nullptr, nullptr, nullptr};
  ProgramGradient program_gradients[kMaxProgramTables];
  if (params.grad_program != nullptr) {
    give_program_parts<A>(params, split, b, h, program_gradients);
    tile.grad_program = program_gradients;
  }
  TileRows old_bias_gradient{};
  if (params.grad_bias != nullptr) {
    tile.grad_bias = static_cast<A*>(params.grad_bias) + b * params.grad_bias_stride_b +
                     h * params.grad_bias_stride_h +
                     plan.queries.begin * params.grad_bias_stride_q + plan.keys.begin;
    if (params.bias_write == BiasWrite::add) {
      old_bias_gradient = tile_rows_of(tile.grad_bias, params.grad_bias_stride_q, sizeof(A));
    }
  }
  if (params.part_relative != nullptr) {
    const int64_t part = split * table_parts(params) + b / batches_per_plane(params);
    tile.grad_relative = static_cast<A*>(params.part_relative) +
                         (part * p.hq + h) * params.part_relative_plane + p.relative.origin +
                         plan.queries.begin * p.relative.stride_q + plan.keys.begin;
  }
  multiply_by_keys(plan, q, rows.ldq, p.d, side.kt, tile.weights, bias_rows(p, b, h, plan));
  const DistanceTerms<A> distances(p, b, h, side.distances);
  if constexpr (!kKeepsQueries<T>) distances.template add<T>(plan, q, side.weights);
  multiply_by_keys(plan, rows.grad_out(row), rows.ldo, p.dv, side.vt, tile.ds, old_bias_gradient);
  f(tile);
  if constexpr (!kKeepsQueries<T>) {
    distances.template add_gradients<T>(
        plan, q, side.ds, rows.grad_q(split, row), side.grad_k,
        distance_part<A>(params, p.relative_keys, params.part_relative_keys, split, b, h),
        distance_part<A>(params, p.relative_queries, params.part_relative_queries, split, b, h));
  }
}

// Computes the products of one tile.
template <class T>
void gradient_tile(const AttentionBackwardParams& params, const QueryRows<T>& rows,
                   const KeySide<T>& side, int64_t split, int64_t b, int64_t h,
                   const TilePlan& plan) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.problem;
  const int64_t first = (b * p.hq + h) * p.tq, row = first + plan.queries.begin;
  const int64_t ldk = padded_row(p.d), ldv = padded_row(p.dv);
  const int64_t width_k = round_up(p.d, 16), width_v = round_up(p.dv, 16);
  const A factor = query_factor<A>(p, h);
  const auto add_to_queries = [&](const TilePlan& part, const computed_t<operand_t<T>>* dx) {
    accumulate_keys(part, dx, kKeyBlock, side.k, ldk, width_k,
                    rows.grad_q(split, first + part.queries.begin), ldk);
  };
  if constexpr (kSumsColumns<T>) {
    for_parts<kOnTiles>(plan, [&](const TilePlan& part) {
      const int64_t begin = (part.queries.begin - plan.queries.begin) * kKeyRow;
      auto *const weight_pairs = side.weight_pairs + begin, *const dx_pairs = side.dx_pairs + begin;
      score_gradients<T>(params, rows, side, split, b, h, part, [&](const GradientTile<T>& tile) {
        if (takes_one_pass<T>(p, part)) {
          rows_in_one_pass(tile, weight_pairs, dx_pairs, side.dx);
        } else {
          gradient_rows(tile);
          pair_rows(side.weights, part.rows(), A(1), weight_pairs, kKeyRow);
          narrow_rows(side.ds, part.rows(), side.dx);
          pair_rows(side.ds, part.rows(), factor, dx_pairs, kKeyRow);
        }
      });
      add_to_queries(part, side.dx);
    });
    accumulate_columns(plan, rows.grad_out_columns(row), p.dv, side.weight_pairs, side.grad_v);
    accumulate_columns(plan, rows.q_columns(row), p.d, side.dx_pairs, side.grad_k);
  } else {
    score_gradients<T>(params, rows, side, split, b, h, plan,
                       [](const GradientTile<T>& tile) { gradient_rows(tile); });
    accumulate_queries(plan, side.weights, rows.grad_out(row), rows.ldo, width_v, side.grad_v, ldv);
    add_to_queries(plan, side.ds);
    scale_for_keys<T>(side.ds, plan.rows(), factor);
    accumulate_queries(plan, side.ds, rows.q(row), rows.ldq, width_k, side.grad_k, ldk);
  }
}

// Processes all queries of one kv head with one key block.
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
  const int64_t ldk = padded_row(p.d), ldv = padded_row(p.dv);
  fill_zero(side.grad_k, kKeyRow * ldk);
  fill_zero(side.grad_v, kKeyRow * ldv);

  TilePlan plan;
  for (int64_t head = h * group_size(p); head < (h + 1) * group_size(p); ++head) {
    for (Tiles<Along::queries> tiles(p, b, head, keys); tiles.next(plan);) {
      gradient_tile<T>(params, rows, side, split, b, head, plan);
    }
  }
  const A chain = static_cast<A>(p.score.chain);
  T* const grad_k = row_of<T>(params.grad_k, b, keys.begin, h);
  T* const grad_v = row_of<T>(params.grad_v, b, keys.begin, h);
  if constexpr (kSumsColumns<T>) {
    store_transposed(side.grad_k, kKeyRow, p.d, count, chain, grad_k, params.grad_k.stride_t);
    store_transposed(side.grad_v, kKeyRow, p.dv, count, A(1), grad_v, params.grad_v.stride_t);
  } else {
    for (int64_t n = 0; n < count; ++n) {
      store_row(side.grad_k + n * ldk, chain, p.d, grad_k + n * params.grad_k.stride_t);
      store_row(side.grad_v + n * ldv, A(1), p.dv, grad_v + n * params.grad_v.stride_t);
    }
  }
}

// Computes dQ of one block of queries: the sum over splits, in order, times the scale.
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
      for (int64_t c = 0; c < rows.width_q; c += V::kWidth) {
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

// Work items.

// Calls f(b, kv head) for each pair of an owner, in order.
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

// Runs all steps for one kv head.
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

void prepare(const AttentionBackwardParams& params, void*, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, forward_items(params.problem));
  dispatch(params.problem.dtype, [&](auto type) {
    using T = decltype(type);
    const auto rows = all_rows<T>(params);
    for (int64_t i = begin; i < end; ++i) {
      prepare_block<T>(params, rows, query_block_item(params.problem, i));
    }
  });
}

void backward(const AttentionBackwardParams& params, void* scratch, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, backward_items(params));
  OMNIATTN_ASSERT_HAS(scratch, backward_scratch_elements(params));
  const TileScope tiles;
  dispatch(params.problem.dtype, [&](auto type) {
    for (int64_t i = begin; i < end; ++i) backward_item<decltype(type)>(params, scratch, i);
  });
  if (params.bias_write == BiasWrite::stream) stream_fence();
}

void finish(const AttentionBackwardParams& params, void*, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, forward_items(params.problem));
  dispatch(params.problem.dtype, [&](auto type) {
    using T = decltype(type);
    const auto rows = all_rows<T>(params);
    for (int64_t i = begin; i < end; ++i) {
      finish_block<T>(params, rows, query_block_item(params.problem, i));
    }
  });
}

void backward_heads(const AttentionBackwardParams& params, void* scratch, int64_t begin,
                    int64_t end) {
  OMNIATTN_ASSERT(0 <= begin && begin <= end);
  OMNIATTN_ASSERT_HAS(scratch, backward_scratch_elements(params));
  const TileScope tiles;
  dispatch(params.problem.dtype, [&](auto type) {
    for (int64_t i = begin; i < end; ++i) {
      for_owned(params, i,
                [&](int64_t b, int64_t h) { whole_head<decltype(type)>(params, scratch, b, h); });
    }
  });
  if (params.bias_write == BiasWrite::stream) stream_fence();
}

}  // namespace

extern const AttentionBackwardKernels attention_backward_kernels_table = {prepare, backward, finish,
                                                                          backward_heads};

}  // namespace omniattn::OMNIATTN_ISA
