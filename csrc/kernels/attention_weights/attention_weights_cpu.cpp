// Attention weights from q, k and lse (see attention_kernels_cpu.h), or sums of them. A work item
// is one key block of one head of the result: it owns the columns it writes, and sums the query
// heads one by one, each in query order.
#include "kernels/attention/attention_distance.h"
#include "kernels/attention/attention_kernels_cpu.h"
#include "kernels/attention_weights/attention_weights.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "semantics/block_schedule.h"
#include "semantics/softmax.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class T>
void weights_item(const AttentionWeightsParams& w, void* scratch, int64_t item) {
  using A = compute_t<T>;
  using M = operand_t<T>;
  const AttentionProblem& p = w.problem;
  const int64_t blocks = key_block_count(p), head = item / blocks, heads = weights_heads(w);
  const int64_t b = head / heads, first = head % heads * heads_summed(w);
  const Range keys = block(item % blocks, kKeyBlock, p.tk);
  const int64_t count = keys.end - keys.begin;

  Arena<A> arena{static_cast<A*>(scratch), weights_scratch_elements(p)};
  M* const kt = reinterpret_cast<M*>(arena.take(kKeyBlock * p.d));
  M* const q = reinterpret_cast<M*>(arena.take(kQueryBlock * padded_row(p.d)));
  A* const s = arena.take(kQueryBlock * kKeyBlock);
  A* const sums = arena.take(kKeyBlock);
  A* const registers = arena.take(program_elements(p));
  A* const relative = arena.take(distance_elements(p));
  pack_keys_as_columns(row_of<T>(p.k, b, keys.begin, kv_head(first, p.hq, p.hkv)), p.k.stride_t,
                       p.d, count, kKeyBlock, kt);
  fill_zero(sums, kKeyBlock);

  TilePlan plan;
  for (int64_t h = first; h < first + heads_summed(w); ++h) {
    const DistanceTerms<A> distances(p, b, h, relative);
    const A* const lse = static_cast<const A*>(w.lse) + (b * p.hq + h) * p.tq;
    for (Tiles<Along::queries> tiles(p, b, h, keys); tiles.next(plan);) {
      const A product_factor = pack_queries<T>(p, b, h, plan.queries, q);
      multiply_by_keys(plan, q, operand_row<M>(p.d), p.d, kt, s, bias_rows(p, b, h, plan));
      if constexpr (!kKeepsQueries<T>) distances.template add<T>(plan, q, s);
      for (int64_t r = 0; r < plan.rows(); ++r) {
        const int64_t g = r / kRowGroup, query = plan.queries.begin + r;
        const Range columns = plan.columns[g], inside = intersect(columns, {0, count});
        if (is_empty(columns)) continue;
        A* const x = s + r * kKeyBlock;
        const uint64_t* const visible = plan.masked[g] ? plan.visible[r] : nullptr;
        const RowScore<A> score{p, b, h, query, keys.begin, visible, registers};
        weigh_row(score, x, columns, product_factor, lse_in_logits(p.score, lse[query]), sums);
        store_weights<T>(w, head, query, keys.begin + inside.begin, inside.end - inside.begin,
                         x + inside.begin);
      }
    }
  }
  store_column_sums(w, head, keys.begin, count, sums);
}

void weights(const AttentionWeightsParams& p, void* scratch, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, weights_items(p));
  OMNIATTN_ASSERT_HAS(scratch, weights_scratch_elements(p.problem));
  const TileScope tiles;
  dispatch(p.problem.dtype, [&](auto type) {
    for (int64_t i = begin; i < end; ++i) weights_item<decltype(type)>(p, scratch, i);
  });
}

}  // namespace

extern const AttentionWeightsKernels attention_weights_kernels_table = {weights};

}  // namespace omniattn::OMNIATTN_ISA
