// Finds for each query the key with the largest logit, the first among equal ones (see
// attention_kernels_cpu.h). A work item is a query block of one head, which walks the key blocks in
// order.
#include "kernels/attention/attention_distance.h"
#include "kernels/attention/attention_kernels_cpu.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "semantics/block_schedule.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Best key of a row so far.
template <class A>
struct Best {
  A top;
  int64_t key;
};

// Turns the products x of a row's visible columns into logits and updates the best key.
template <class A>
void select_row(const RowScore<A>& score, A* x, Range columns, A factor, Best<A>& best) {
  using V = Vec<A>;
  V top(negative_infinity<A>());
  score.to_logits(x, columns, factor);
  for_columns<A>(columns, [&](int64_t n) { top = max(load(x + n), top); });  // NaN is never chosen
  const A highest = reduce_max(top);
  if (!(highest > best.top)) return;
  int64_t n = columns.begin;
  while (x[n] != highest) ++n;
  best = {highest, score.key + n};
}

template <class T>
void select_item(const AttentionSelectParams& params, void* scratch, int64_t item) {
  using A = compute_t<T>;
  using M = operand_t<T>;
  const AttentionProblem& p = params.problem;
  const int64_t blocks = query_block_count(p), head = item / blocks;
  const int64_t b = head / p.hq, h = head % p.hq;
  const Range queries = block(item % blocks, kQueryBlock, p.tq);
  const int64_t rows = queries.end - queries.begin;

  Arena<A> arena{static_cast<A*>(scratch), select_scratch_elements(p)};
  M* const kt = reinterpret_cast<M*>(arena.take(kKeyBlock * p.d));
  M* const q = reinterpret_cast<M*>(arena.take(kQueryBlock * padded_row(p.d)));
  A* const s = arena.take(kQueryBlock * kKeyBlock);
  A* const registers = arena.take(program_elements(p));
  const DistanceTerms<A> distances(p, b, h, arena.take(distance_elements(p)));
  const A product_factor = pack_queries<T>(p, b, h, queries, q);
  Best<A> best[kQueryBlock];
  for (Best<A>& row : best) row = {negative_infinity<A>(), -1};

  TilePlan plan;
  for (Tiles<Along::keys> tiles(p, b, h, queries); tiles.next(plan);) {
    const Range keys = plan.keys;
    pack_keys_as_columns(row_of<T>(p.k, b, keys.begin, kv_head(h, p.hq, p.hkv)), p.k.stride_t, p.d,
                         keys.end - keys.begin, kKeyBlock, kt);
    multiply_by_keys(plan, q, operand_row<M>(p.d), p.d, kt, s, bias_rows(p, b, h, plan));
    if constexpr (!kKeepsQueries<T>) distances.template add<T>(plan, q, s);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t g = r / kRowGroup;
      if (is_empty(plan.columns[g])) continue;
      const RowScore<A> score{
          p,        b, h, queries.begin + r, keys.begin, plan.masked[g] ? plan.visible[r] : nullptr,
          registers};
      select_row(score, s + r * kKeyBlock, plan.columns[g], product_factor, best[r]);
    }
  }

  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = head * p.tq + queries.begin + r;
    params.index[at] = best[r].key;
    static_cast<A*>(params.top)[at] = from_logit(p.score, best[r].top);
  }
}

void select_keys(const AttentionSelectParams& p, void* scratch, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, forward_items(p.problem));
  OMNIATTN_ASSERT_HAS(scratch, select_scratch_elements(p.problem));
  const TileScope tiles;
  dispatch(p.problem.dtype, [&](auto type) {
    for (int64_t i = begin; i < end; ++i) select_item<decltype(type)>(p, scratch, i);
  });
}

}  // namespace

extern const AttentionSelectKernels attention_select_kernels_table = {select_keys};

}  // namespace omniattn::OMNIATTN_ISA
