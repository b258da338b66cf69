// The attention weights, from q, k and lse (see attention.h), or their sums over the queries, which
// need no (Tq, Tk) memory. A work item is one key block of one head: it owns the columns it writes,
// and sums them in query order.
#include "kernels/attention/attention.h"
#include "kernels/attention/attention_distance.h"
#include "runtime/dispatch.h"
#include "semantics/softmax.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class T>
void weights_item(const AttentionWeightsParams& params, void* scratch, int64_t item) {
  using A = compute_t<T>;
  using M = operand_t<T>;
  const AttentionProblem& p = params.problem;
  const int64_t blocks = key_block_count(p), head = item / blocks;
  const int64_t b = head / p.hq, h = head % p.hq;
  const Range keys = block(item % blocks, kKeyBlock, p.tk);
  const int64_t count = keys.end - keys.begin;

  Arena<A> arena{static_cast<A*>(scratch), weights_scratch_elements(p)};
  M* const kt = reinterpret_cast<M*>(arena.take(kKeyBlock * p.d));
  M* const q = reinterpret_cast<M*>(arena.take(kQueryBlock * padded_row(p.d)));
  A* const s = arena.take(kQueryBlock * kKeyBlock);
  A* const sums = arena.take(kKeyBlock);
  A* const registers = arena.take(program_elements(p));
  const DistanceTerms<A> distances(p, b, h, arena.take(distance_elements(p)));
  pack_keys_as_columns(row_of<T>(p.k, b, keys.begin, kv_head(h, p.hq, p.hkv)), p.k.stride_t, p.d,
                       count, kKeyBlock, kt);
  fill_zero(sums, kKeyBlock);

  TilePlan plan;
  for (Tiles<Along::queries> tiles(p, b, h, keys); tiles.next(plan);) {
    const Range queries = plan.queries;
    const A product_factor = pack_queries<T>(p, b, h, queries, q);
    multiply_by_keys(plan, q, operand_row<M>(p.d), p.d, kt, s, bias_rows(p, b, h, plan));
    if constexpr (!kKeepsQueries<T>) distances.template add<T>(plan, q, s);
    const A* const lse = static_cast<const A*>(params.lse) + head * p.tq + queries.begin;
    for (int64_t r = 0; r < plan.rows(); ++r) {
      const int64_t g = r / kRowGroup;
      const Range columns = plan.columns[g];
      if (is_empty(columns)) continue;
      const RowScore<A> score{
          p,        b, h, queries.begin + r, keys.begin, plan.masked[g] ? plan.visible[r] : nullptr,
          registers};
      scale_row(s + r * kKeyBlock, columns, product_factor);
      weigh_row(score, s + r * kKeyBlock, columns, lse_in_logits(p.score, lse[r]), sums);
      if (params.weights == nullptr) continue;
      T* const row = static_cast<T*>(params.weights) + (head * p.tq + queries.begin + r) * p.tk;
      store_row(s + r * kKeyBlock + columns.begin, A(1),
                (columns.end < count ? columns.end : count) - columns.begin,
                row + keys.begin + columns.begin);
    }
  }
  if (params.sums == nullptr) return;
  A* const row = static_cast<A*>(params.sums) + head * p.tk + keys.begin;
  for (int64_t n = 0; n < count; ++n) row[n] = sums[n];
}

void weights(const AttentionWeightsParams& p, void* scratch, int64_t begin, int64_t end) {
  const TileScope tiles;
  dispatch(p.problem.dtype, [&](auto type) {
    for (int64_t i = begin; i < end; ++i) weights_item<decltype(type)>(p, scratch, i);
  });
}

}  // namespace

extern const AttentionWeightsKernels attention_weights_kernels_table = {weights};

}  // namespace omniattn::OMNIATTN_ISA
