// Rows of one tile of the backward (see attention_backward_cpu.cpp): turns the products q.k
// and dP into the weights and dS, the gradients of the terms added to the logits, and the
// operands of the following products.
#pragma once

#include "kernels/attention/attention_softpick.h"
#include "kernels/attention/attention_stick.h"
#include "kernels/attention/attention_tile.h"
#include "runtime/transpose.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// True if dK and dV of a block of keys are summed transposed, dK^T += x_q^T dx: the pairs of rows
// of P and dx, which 16-bit products read, can then be their B without conversion.
template <class T>
constexpr bool kSumsColumns = kKeepsQueries<T> && !kSplits<operand_t<T>>;

// Workspace for rows [first, first + count) of all (b, h, q): x_q = pre * q, dO times the factor of
// its row of P, dQ once per split, Delta, shift, and the factor if dO lacks it. A row that breaks a
// stick has the cost of the keys not yet visited, and the sum of stick_gradients. If kSumsColumns,
// also x_q and dO as columns, with the rows of a block of queries together.
template <class T>
struct QueryRows {
  using A = compute_t<T>;
  using M = operand_t<T>;
  int64_t first, count;
  int64_t ldq, ldo;  // row strides of q and dO
  int64_t width_q;   // row stride of dQ
  int64_t d, dv;
  M *q_, *grad_out_, *q_columns_, *grad_out_columns_;
  A *grad_q_, *delta_, *shift_, *factor_;
  ExactSum<A>* left_;

  QueryRows(const AttentionBackwardParams& params, void* memory, int64_t first_row, int64_t rows)
      : first(first_row),
        count(rows),
        ldq(operand_row<M>(params.problem.d)),
        ldo(operand_row<M>(params.problem.dv)),
        width_q(padded_row(params.problem.d)),
        d(params.problem.d),
        dv(params.problem.dv) {
    const AttentionProblem& p = params.problem;
    Arena<A> arena{static_cast<A*>(memory), backward_workspace_elements(params, rows)};
    q_ = reinterpret_cast<M*>(arena.take(count * width_q));
    grad_out_ = reinterpret_cast<M*>(arena.take(count * padded_row(dv)));
    q_columns_ = reinterpret_cast<M*>(arena.take(column_elements(p, count, d)));
    grad_out_columns_ = reinterpret_cast<M*>(arena.take(column_elements(p, count, dv)));
    grad_q_ = arena.take(count * width_q * params.splits);
    delta_ = arena.take(count);
    shift_ = arena.take(count);
    factor_ = arena.take(count);
    left_ = reinterpret_cast<ExactSum<A>*>(arena.take(2 * count));
  }
  OMNIATTN_INLINE M* q(int64_t row) const { return q_ + (row - first) * ldq; }
  OMNIATTN_INLINE M* grad_out(int64_t row) const { return grad_out_ + (row - first) * ldo; }
  // Columns of a block of queries that starts at `row`: (d, queries) and (dv, queries).
  OMNIATTN_INLINE M* q_columns(int64_t row) const { return q_columns_ + (row - first) * d; }
  OMNIATTN_INLINE M* grad_out_columns(int64_t row) const {
    return grad_out_columns_ + (row - first) * dv;
  }
  OMNIATTN_INLINE A* grad_q(int64_t split, int64_t row) const {
    return grad_q_ + (split * count + row - first) * width_q;
  }
  OMNIATTN_INLINE A& delta(int64_t row) const { return delta_[row - first]; }
  OMNIATTN_INLINE A& shift(int64_t row) const { return shift_[row - first]; }
  OMNIATTN_INLINE A& factor(int64_t row) const { return factor_[row - first]; }
  OMNIATTN_INLINE ExactSum<A>& left(int64_t row) const { return left_[row - first]; }
};

#if defined(OMNIATTN_PAIRS)
// Transposes x (count, width), with row stride ldx, to columns (width, count).
template <class M>
void transpose_rows(const M* x, int64_t ldx, int64_t count, int64_t width, M* to) {
  if (count % 2 != 0) return store_transposed(x, ldx, count, width, 1.0f, to, count);
  for (int64_t c = 0; c < width; c += 16) {
    for (int64_t r = 0; r < count; r += 32) {
      VecF block[16];
#pragma GCC unroll 16
      for (int64_t i = 0; i < 16; ++i) {
        const int64_t left = r + 2 * i < count ? width - c : 0;
        const M* const row = x + (r + 2 * i) * ldx + c;
        block[i] = as_lanes(load_pairs_of_rows_n(row, left, row + ldx, left));
      }
      transpose(block);
      for (int64_t i = 0; i < smaller(16, width - c); ++i) {
        store_pairs_n(to + (c + i) * count + r, as_pairs(block[i]), (count - r) / 2);
      }
    }
  }
}
#endif

// A tile, the rows it is computed from, and the destinations of its gradients.
template <class T>
struct GradientTile {
  using A = compute_t<T>;
  const AttentionBackwardParams& params;
  const QueryRows<T>& rows;
  const TilePlan& plan;
  int64_t b, h;
  int64_t row;      // index of the first query over all (b, h, q)
  A *weights, *ds;  // (kQueryBlock, kKeyBlock); at first the products q.k and dP
  A* registers;     // of the program
  // Gradients, from the first query and key on; null: not wanted.
  A *grad_bias, *grad_relative;
  const ProgramGradient* grad_program;
};

// to[n] += from[n] for the columns below `count`.
template <class A>
OMNIATTN_INLINE void add_to_row(const A* from, Range columns, int64_t count, A* to) {
  for_columns<A>(columns, [&](int64_t n) {
    store_n(to + n, load_n(to + n, count - n) + load(from + n), count - n);
  });
}

// Stores the only sum in `to`, as columns below `count`. Rows of whole lines may bypass the caches.
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

// Adds dS of row r to the gradients of the bias and the table term.
template <class T>
void add_to_terms(const GradientTile<T>& tile, int64_t r, Range columns) {
  const AttentionBackwardParams& params = tile.params;
  const compute_t<T>* const ds = tile.ds + r * kKeyBlock;
  if (tile.grad_bias != nullptr) {
    auto* const to = tile.grad_bias + r * params.grad_bias_stride_q;
    const int64_t count = params.problem.tk - tile.plan.keys.begin;
    if (params.bias_write == BiasWrite::add) {
      add_to_row(ds, columns, count, to);
    } else {
      write_row(ds, columns, count, params.bias_write == BiasWrite::stream, to);
    }
  }
  if (tile.grad_relative != nullptr) {
    add_to_row(ds, columns, kKeyBlock, tile.grad_relative + r * params.problem.relative.stride_q);
  }
}

// Turns q.k and dP of row r into the operands of the products: weights after dropout, and dx.
template <class T>
void gradient_row(const GradientTile<T>& tile, const RowScore<compute_t<T>>& score, int64_t r,
                  Range columns) {
  using A = compute_t<T>;
  using V = Vec<A>;
  const AttentionProblem& problem = tile.params.problem;
  A *const weights = tile.weights + r * kKeyBlock, *const ds = tile.ds + r * kKeyBlock;
  const auto drop = [&](A* row) {
    if (problem.dropout.threshold == 0) return;
    RowDropout<A>(problem, score.b, score.h, score.q, score.key).apply(row, columns);
  };

  A slope[kKeyBlock];  // slope of the transform
  const A factor = kKeepsQueries<T> ? query_factor<A>(problem, tile.h) : A(1);
  score.to_logits(weights, columns, factor, slope);

  const int64_t row = tile.row + r;
  if constexpr (kSplits<operand_t<T>>) scale_row(ds, columns, tile.rows.factor(row));
  drop(ds);
  if (is_stick(problem.score)) {
    score.hide(ds, columns, A(0));
    stick_gradients(weights, ds, columns, tile.rows.left(row), tile.rows.delta(row));
  } else if (is_softpick(problem.score)) {
    pick_gradients(weights, ds, columns, tile.rows.shift(row), tile.rows.delta(row));
  } else {
    const V mean(is_softmax(problem.score) ? tile.rows.delta(row) : A(0));  // weighted mean of dP
    with_weight(problem.score, tile.rows.shift(row), [&](auto weight) {
      for_columns<A>(columns, [&](int64_t n) {
        const auto w = weight(load(weights + n));
        store(weights + n, w.value);
        store(ds + n, w.slope * (load(ds + n) - mean));
      });
    });
  }
  if (problem.program != nullptr) {
    score.run_program(problem.program->gradient, 1, ds, columns, tile.grad_program);
  }
  score.hide(ds, columns, A(0));  // a hidden key may hold anything, and 0 * NaN is NaN
  add_to_terms(tile, r, columns);

  drop(weights);
  if constexpr (kSplits<operand_t<T>>) scale_row(weights, columns, tile.rows.factor(row));
  if (problem.score.transform != ScoreKind::none) {
    for_columns<A>(columns, [&](int64_t n) { store(ds + n, load(ds + n) * load(slope + n)); });
  }
}

template <class T>
void gradient_rows(const GradientTile<T>& tile) {
  using A = compute_t<T>;
  const TilePlan& plan = tile.plan;
  for (int64_t g = 0; g < plan.groups(); ++g) {
    const Range columns = plan.columns[g], group = plan.group_rows(g);
    for (int64_t r = group.begin; r < group.end; ++r) {
      A* const both[] = {tile.weights, tile.ds};
      for (A* const x : both) {  // products along the columns read whole rows
        fill_zero(x + r * kKeyBlock, columns.begin);
        fill_zero(x + r * kKeyBlock + columns.end, kKeyBlock - columns.end);
      }
      const RowScore<A> score{
          tile.params.problem,    tile.b,          tile.h,
          plan.queries.begin + r, plan.keys.begin, plan.masked[g] ? plan.visible[r] : nullptr,
          tile.registers};
      gradient_row(tile, score, r, columns);
    }
  }
}

// Multiplies rows of a tile by a factor and stores pairs of rows: [ceil(rows / 2)][stride][2].
template <class M, class A>
void pair_rows(A* x, int64_t rows, A factor, M* pairs, int64_t stride) {
  using V = Vec<A>;
  if (rows % 2 != 0) fill_zero(x + rows * kKeyBlock, kKeyBlock);
  for (int64_t r = 0; r < rows; r += 2) {
    for_columns<A>({0, kKeyBlock}, [&](int64_t n) {
      const V first = load(x + r * kKeyBlock + n), second = load(x + (r + 1) * kKeyBlock + n);
      store_pairs(pairs + r * stride + 2 * n,
                  narrow_to_pairs<M>(first * V(factor), second * V(factor)));
    });
  }
}
// Stores narrowed rows.
template <class M, class A>
void narrow_rows(const A* x, int64_t rows, M* to) {
  for_columns<A>({0, rows * kKeyBlock}, [&](int64_t n) { store_factors(to + n, load(x + n)); });
}

// Operands of a tile's products: P and dx for dV and dK by columns, dx for dQ by rows.
template <class M>
struct TileOperands {
  const computed_t<M>*weights, *dk, *dq;
};

// Makes the operands of `rows` rows of tiles with room for `capacity`, an even number. `factor` is
// the factor of dK; dx lacks it if it stays fp32, see scale_for_keys.
template <class T>
TileOperands<operand_t<T>> tile_operands(compute_t<T>* weights, compute_t<T>* ds, int64_t rows,
                                         int64_t capacity, compute_t<T> factor) {
  using A = compute_t<T>;
  using M = operand_t<T>;
  if constexpr (!kKeepsQueries<T> || kSplits<operand_t<T>>) {
    return {weights, ds, ds};
  } else {
    // The operands reuse the memory of the tiles: pairs of rows in the first half of each, the rows
    // of dq in the second half of the weights, which is free once their pairs are made.
    M* const weight_pairs = reinterpret_cast<M*>(weights);
    M* const ds_pairs = reinterpret_cast<M*>(ds);
    M* const ds_rows = weight_pairs + capacity * kKeyBlock;
    pair_rows(weights, rows, A(1), weight_pairs, kKeyBlock);
    narrow_rows(ds, rows, ds_rows);
    pair_rows(ds, rows, factor, ds_pairs, kKeyBlock);
    return {weight_pairs, ds_pairs, ds_rows};
  }
}

// Multiplies dx by the factor of dK, after the product for dQ.
template <class T>
void scale_for_keys(compute_t<T>* ds, int64_t rows, compute_t<T> factor) {
  if constexpr (kSplits<operand_t<T>>) scale_row(ds, {0, rows * kKeyBlock}, factor);
}

// Elements of a computed operand per column: 2 for pairs, 1 if it stays fp32.
template <class M>
constexpr int64_t kComputedPair = kSplits<M> ? 1 : Operand<M>::kStep;

// True if rows_in_one_pass computes the operands of a tile.
template <class T>
bool takes_one_pass(const AttentionProblem& p, const TilePlan& plan) {
  bool masked = false;
  for (int64_t g = 0; g < plan.groups(); ++g) masked = masked || plan.masked[g];
  return is_softmax(p.score) && leaves_logits(p.terms) && p.dropout.threshold == 0 && !masked &&
         plan.is_full() && plan.rows() % 2 == 0;
}

// gradient_rows, pair_rows and narrow_rows in one pass, for logits that are scaled products
// and tiles without hidden pairs.
template <class T>
void rows_in_one_pass(const GradientTile<T>& tile, operand_t<T>* weight_pairs,
                      operand_t<T>* dx_pairs, operand_t<T>* dx) {
  using A = compute_t<T>;
  using M = operand_t<T>;
  using V = Vec<A>;
  const AttentionProblem& problem = tile.params.problem;
  const V factor(query_factor<A>(problem, tile.h));
  with_weight(problem.score, A(0), [&](auto weight) {
    for (int64_t r = 0; r < tile.plan.rows(); r += 2) {
      const A *const x = tile.weights + r * kKeyBlock, *const y = tile.ds + r * kKeyBlock;
      const int64_t row = tile.row + r;
      const V shift(tile.rows.shift(row)), next_shift(tile.rows.shift(row + 1));
      const V mean(tile.rows.delta(row)), next_mean(tile.rows.delta(row + 1));
      for_columns<A>({0, kKeyBlock}, [&](int64_t n) {
        const V logit = rounded_product(load(x + n), factor);
        const V next_logit = rounded_product(load(x + kKeyBlock + n), factor);
        const V w = weight(logit - shift).value, next_w = weight(next_logit - next_shift).value;
        const V d = w * (load(y + n) - mean);
        const V next_d = next_w * (load(y + kKeyBlock + n) - next_mean);
        store_pairs(weight_pairs + r * kKeyRow + 2 * n, narrow_to_pairs<M>(w, next_w));
        store_pairs(dx_pairs + r * kKeyRow + 2 * n,
                    narrow_to_pairs<M>(d * factor, next_d * factor));
        store_factors(dx + r * kKeyBlock + n, d);
        store_factors(dx + (r + 1) * kKeyBlock + n, next_d);
      });
    }
  });
}

// Calls f(keys, rows) for ranges of keys and the rows of a tile that see them. If the mask cuts the
// tile, a range has few keys and uses only the groups that see them.
template <class F>
OMNIATTN_INLINE void for_key_ranges(const TilePlan& plan, const F& f) {
  const int64_t step = plan.is_full() ? kKeyBlock : kRowGroup;
  for (int64_t key = 0; key < kKeyBlock; key += step) {
    const Range keys = intersect({key, key + step}, {0, kKeyBlock});
    const Range rows = rows_seeing(plan, keys);
    if (!is_empty(rows)) f(keys, rows);
  }
}

// sum += X^T Y, where X is (queries x keys of the tile), and Y has a row of `ldy` per query.
template <class M>
void accumulate_queries(const TilePlan& plan, const computed_t<M>* x, const M* y, int64_t ldy,
                        int64_t width, compute_t<M>* sum, int64_t ld) {
  const auto multiply = [&](const Panels<M>& b, int64_t column, int64_t columns) {
    for_key_ranges(plan, [&](Range keys, Range rows) {
      gemm_tile<M, ALayout::kTransposed>(x + rows.begin * kKeyBlock + keys.begin, kKeyBlock,
                                         b.at(rows.begin, 0), sum + keys.begin * ld + column, ld,
                                         keys.end - keys.begin, columns, rows.end - rows.begin,
                                         true);
    });
  };
  if constexpr (Operand<M>::kStep == 1) {
    multiply(row_panels(y, ldy), 0, width);
  } else {
    static_assert(kSplits<M>);  // tiles make their pieces in each call
    constexpr int64_t kColumns = 4 * kPanelCols<M>;
    M pairs[kQueryBlock * kColumns];
    for (int64_t column = 0; column < width; column += kColumns) {
      const int64_t columns = width - column < kColumns ? width - column : kColumns;
      pack_b(y + column, ldy, plan.rows(), columns, pairs);
      multiply(packed_panels(static_cast<const M*>(pairs), plan.rows()), column, columns);
    }
  }
}

// sum (width, kKeyRow) += Y X, where Y (width, queries of the tile) holds
// columns, and X holds pairs of queries.
template <class M>
void accumulate_columns(const TilePlan& plan, const M* y, int64_t width, const M* x,
                        compute_t<M>* sum) {
  for_key_ranges(plan, [&](Range keys, Range rows) {
    const M* const pairs = x + rows.begin * kKeyRow + 2 * keys.begin;
    gemm_tile<M>(y + rows.begin, plan.rows(), row_panels(pairs, kKeyRow), sum + keys.begin, kKeyRow,
                 width, keys.end - keys.begin, rows.end - rows.begin, true);
  });
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
