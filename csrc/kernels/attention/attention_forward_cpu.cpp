// Tiled forward (see attention_kernels_cpu.h). One query block of one head walks the visible key
// blocks, keeps S (96 x 128), O and the softmax state in L2 and writes O and lse once. A stick is
// broken from the last key block to the first. A work item
// is one such block, or all blocks of a kv head if there are enough heads: the packed K and V then
// stay in the caches of one core.
#include "kernels/attention/attention_distance.h"
#include "kernels/attention/attention_kernels_cpu.h"
#include "kernels/attention/attention_softmax.h"
#include "kernels/attention/attention_softpick.h"
#include "kernels/attention/attention_stick.h"
#include "kernels/attention/attention_tile.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "semantics/block_schedule.h"
#include "semantics/softmax.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Products read operands M: T itself if the ISA multiplies it, otherwise A = compute_t<T>.
// The weights are computed_t<M>.

// Packs panel `n` of 64 keys.
template <class T>
void pack_panel(const AttentionProblem& p, int64_t b, int64_t h, int64_t n,
                const PackedHead<T>& packed) {
  using M = operand_t<T>;
  const Range keys = block(n, kKeyPanel, p.tk);
  const int64_t count = keys.end - keys.begin;
  pack_keys_as_columns(row_of<T>(p.k, b, keys.begin, h), p.k.stride_t, p.d, count, kKeyPanel,
                       packed.k + keys.begin * packed_depth<M>(p.d));
  pack_operand_rows(row_of<T>(p.v, b, keys.begin, h), p.v.stride_t, count, p.dv,
                    packed.v + keys.begin * padded_row(p.dv));
}

// Rows of a tile: products q.k, then weights as computed_t<M>; their sums.
template <class A>
struct SoftmaxTile {
  const AttentionProblem& p;
  const TilePlan& plan;
  int64_t b, h;
  A *s, *o, *m, *l, *registers;

  OMNIATTN_INLINE SoftmaxRow<A> row(int64_t r, A factor) const {
    const int64_t width = padded_row(p.dv);
    return {s + r * kKeyBlock, factor, o + r * width, width, m + r, l + r * Vec<A>::kWidth};
  }
};

// Raises the maxima of rows [row, end), at most as many as a vector has lanes.
template <class A>
void raise_maxima(const SoftmaxTile<A>& tile, int64_t row, int64_t end, Range columns, A factor) {
  using V = Vec<A>;
  V rows[V::kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < V::kWidth; ++i) {
    rows[i] = lane_maxima(tile.s + smaller(row + i, end - 1) * kKeyBlock, columns);
  }
  const int64_t count = end - row;
  const V top = maxima_of_rows(rows) * V(factor), old = load_n(tile.m + row, count);
  const Mask<A> raised = top > old;
  if (!any(raised)) return;
  store_n(tile.m + row, select(raised, top, old), count);
  A alphas[V::kWidth];
  store(alphas, exp2((old - top) * V(exponent_factor<A>(tile.p.score))));
  // Rows that have seen no key have no sums.
  Mask<A> left = raised & lanes_below<A>(count) & (old > V(negative_infinity<A>()));
  while (any(left)) {
    const int i = first(left);
    left = left & !lanes_below<A>(i + 1);
    scale_sums(tile.row(row + i, factor), alphas[i]);
  }
}

// Computes the weights of row r, whose logits break a stick; m and l of the row hold its cost.
template <class To, class A>
[[gnu::noinline]] void break_stick(const SoftmaxTile<A>& tile, int64_t r, Range columns) {
  const SoftmaxRow<A> row = tile.row(r, A(1));
  StickRow<A> stick;
  const A cost = stick.set(row.s, columns);
  ExactSum<A> beyond{*row.m, *row.l};
  for_columns<A>(columns,
                 [&](int64_t n) { store_weights<To>(row.s, n, stick.weights(n, beyond.total())); });
  beyond.add(cost);
  *row.m = beyond.value;
  *row.l = beyond.error;
}

// Computes the unnormalised weights of softpick of row r.
template <class To, class A>
[[gnu::noinline]] void pick_row(const SoftmaxTile<A>& tile, int64_t r, Range columns) {
  const SoftmaxRow<A> row = tile.row(r, A(1));
  const auto sum = pick_weights(row.s, columns, *row.m,
                                [&](int64_t n, Vec<A> w) { store_weights<To>(row.s, n, w); });
  store(row.l, load(row.l) + sum);
}

// Computes the unnormalised weights of row r.
template <class M, class To, class A>
OMNIATTN_INLINE void weigh_row(const SoftmaxTile<A>& tile, int64_t r, A factor, Range columns) {
  if (is_stick(tile.p.score)) return break_stick<To>(tile, r, columns);
  if (is_softpick(tile.p.score)) return pick_row<To>(tile, r, columns);
  weigh<M, To>(tile.p.score, tile.row(r, factor), columns);
}

// Computes logits, softmax and dropout of a tile.
template <class M, class A>
void softmax_tile(const SoftmaxTile<A>& tile, A product_factor) {
  using V = Vec<A>;
  const AttentionProblem& p = tile.p;
  const TilePlan& plan = tile.plan;
  const int64_t key = plan.keys.begin;
  for (int64_t g = 0; g < plan.groups(); ++g) {
    const Range columns = plan.columns[g], rows = plan.group_rows(g);
    if (is_empty(columns)) continue;
    const bool is_plain = leaves_logits(p.terms) && !plan.masked[g] && product_factor > A(0) &&
                          weighs_by_key(p.score);
    const A factor = is_plain ? product_factor : A(1);
    for (int64_t r = rows.begin; r < rows.end && !is_plain; ++r) {
      A* const s = tile.s + r * kKeyBlock;
      const uint64_t* const visible = plan.masked[g] ? plan.visible[r] : nullptr;
      RowScore<A>{p, tile.b, tile.h, plan.queries.begin + r, key, visible, tile.registers}
          .to_logits(s, columns, product_factor);
    }
    for (int64_t r = rows.begin; r < rows.end && divides_rows(p.score); r += V::kWidth) {
      raise_maxima(tile, r, smaller(r + V::kWidth, rows.end), columns, factor);
    }
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      if (p.dropout.threshold == 0) {
        weigh_row<M, computed_t<M>>(tile, r, factor, columns);
      } else {
        A* const s = tile.s + r * kKeyBlock;
        weigh_row<M, A>(tile, r, factor, columns);
        RowDropout<A>(p, tile.b, tile.h, plan.queries.begin + r, key).apply(s, columns);
        narrow_row<computed_t<M>>(s, columns);
      }
    }
  }
}

// Processes one block of queries of one head.
template <class T>
void forward_block(const AttentionForwardParams& params, int64_t b, int64_t h, int64_t n,
                   const PackedHead<T>& packed, void* scratch) {
  using A = compute_t<T>;
  using M = operand_t<T>;
  using V = Vec<A>;
  const AttentionProblem& p = params.problem;
  const Range queries = block(n, kQueryBlock, p.tq);
  const int64_t rows = queries.end - queries.begin;
  const int64_t width = padded_row(p.dv), ldq = operand_row<M>(p.d);

  Arena<A> arena{static_cast<A*>(scratch), forward_scratch_elements(p)};
  M* const q = reinterpret_cast<M*>(arena.take(kQueryBlock * padded_row(p.d)));
  A* const s = arena.take(kQueryBlock * kKeyBlock);
  A* const o = arena.take(kQueryBlock * width);
  A* const m = arena.take(kQueryBlock);
  A* const l = arena.take(kQueryBlock * V::kWidth);
  A* const registers = arena.take(program_elements(p));
  const DistanceTerms<A> distances(p, b, h, arena.take(distance_elements(p)));
  const A product_factor = pack_queries<T>(p, b, h, queries, q);
  fill_zero(o, rows * width);
  fill_zero(l, rows * V::kWidth);
  const A first = initial_maximum<A>(p, h);
  for (int64_t r = 0; r < rows; ++r) {
    m[r] = first;
    if (is_softmax(p.score)) l[r * V::kWidth] = softmax_initial_sum(first);
  }

  TilePlan plan;
  for (Tiles<Along::keys> tiles(p, b, h, queries);
       is_stick(p.score) ? tiles.last(plan) : tiles.next(plan);) {
    const Range keys = plan.keys;
    for_parts<kOnTiles>(plan, [&](const TilePlan& part) {
      const int64_t row = part.queries.begin - queries.begin;
      multiply_by_keys(part, q + row * ldq, ldq, p.d, packed.k + keys.begin * packed_depth<M>(p.d),
                       s, bias_rows(p, b, h, part));
      if constexpr (!kKeepsQueries<T>) distances.template add<T>(part, q, s);
      softmax_tile<M>(SoftmaxTile<A>{p, part, b, h, s, o + row * width, m + row,
                                     l + row * V::kWidth, registers},
                      product_factor);
      accumulate_keys(part, reinterpret_cast<const computed_t<M>*>(s),
                      kKeyBlock * (sizeof(A) / sizeof(computed_t<M>)),
                      packed.v + keys.begin * width, width, round_up(p.dv, 16), o + row * width,
                      width);
    });
  }

  const int64_t stat = (b * p.hq + h) * p.lse_stride + queries.begin;  // index in lse
  for (int64_t r = 0; r < rows; ++r) {
    const A sum = reduce_add(load(l + r * V::kWidth));
    store_row(o + r * width, row_factor(p.score, sum), p.dv,
              row_of<T>(params.out, b, queries.begin + r, h));
    store_lse(params, stat + r, row_lse(p.score, m[r], sum, log(V(sum)).v[0]));
  }
}

template <class T>
void pack_item(const AttentionForwardParams& params, int64_t item) {
  const AttentionProblem& p = params.problem;
  const int64_t panels = ceil_div(p.tk, kKeyPanel), head = item / panels;
  pack_panel<T>(p, head / p.hkv, head % p.hkv, item % panels,
                PackedHead<T>(p, params.workspace, head));
}

template <class T>
void block_item(const AttentionForwardParams& params, void* scratch, int64_t item) {
  const AttentionProblem& p = params.problem;
  // Under a causal mask later query blocks see more keys: the longest come first.
  const int64_t heads = p.batch * p.hq, n = query_block_count(p) - 1 - item / heads;
  const int64_t b = item % heads / p.hq, h = item % p.hq;
  const int64_t head = b * p.hkv + kv_head(h, p.hq, p.hkv);
  forward_block<T>(params, b, h, n, PackedHead<T>(p, params.workspace, head), scratch);
}

template <class T>
void head_item(const AttentionForwardParams& params, void* scratch, int64_t item) {
  const AttentionProblem& p = params.problem;
  const int64_t b = item / p.hkv, h = item % p.hkv;
  auto* const memory = static_cast<compute_t<T>*>(scratch);
  const PackedHead<T> packed(p, memory + forward_scratch_elements(p), 0);
  for (int64_t n = 0; n < ceil_div(p.tk, kKeyPanel); ++n) pack_panel<T>(p, b, h, n, packed);
  for (int64_t n = 0; n < query_block_count(p); ++n) {
    for (int64_t g = 0; g < group_size(p); ++g) {
      forward_block<T>(params, b, h * group_size(p) + g, n, packed, scratch);
    }
  }
}

void pack(const AttentionForwardParams& p, void*, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, pack_items(p.problem));
  dispatch(p.problem.dtype, [&](auto type) {
    for (int64_t i = begin; i < end; ++i) pack_item<decltype(type)>(p, i);
  });
}

void forward(const AttentionForwardParams& p, void* scratch, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, forward_items(p.problem));
  OMNIATTN_ASSERT_HAS(scratch, forward_scratch_elements(p.problem));
  const TileScope tiles;
  dispatch(p.problem.dtype, [&](auto type) {
    for (int64_t i = begin; i < end; ++i) block_item<decltype(type)>(p, scratch, i);
  });
}

void forward_heads(const AttentionForwardParams& p, void* scratch, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, kv_head_items(p.problem));
  OMNIATTN_ASSERT_HAS(scratch, forward_scratch_elements(p.problem));
  const TileScope tiles;
  dispatch(p.problem.dtype, [&](auto type) {
    for (int64_t i = begin; i < end; ++i) head_item<decltype(type)>(p, scratch, i);
  });
}

}  // namespace

extern const AttentionForwardKernels attention_forward_kernels_table = {pack, forward,
                                                                        forward_heads};

}  // namespace omniattn::OMNIATTN_ISA
