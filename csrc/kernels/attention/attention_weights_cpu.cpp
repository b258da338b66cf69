// The attention weights, from q, k and lse (see attention.h), or their sums over the queries, which
// need no (Tq, Tk) memory. A work item is one key block of one head, or a few key blocks of one kv
// head with few query rows, which read each key once, in place: it owns the columns it writes, and
// sums them in query order.
#include "kernels/attention/attention.h"
#include "kernels/attention/attention_decode_tile.h"
#include "kernels/attention/attention_distance.h"
#include "runtime/dispatch.h"
#include "semantics/softmax.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Weights of one row's visible columns, added to `sums`.
template <class A>
void weigh_row(const RowScore<A>& score, A* x, Range columns, A shift, A* sums) {
  using V = Vec<A>;
  score.to_logits(x, columns);
  with_weight(score.p.score, shift, [&](auto weight) {
    for_columns<A>(columns, [&](int64_t n) {
      const V w = weight(load(x + n)).value;
      store(x + n, w);
      store(sums + n, load(sums + n) + w);
    });
  });
}

template <class T>
void weights_item(const AttentionWeightsParams& params, void* scratch, int64_t item) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.problem;
  const int64_t blocks = key_block_count(p), head = item / blocks;
  const int64_t b = head / p.hq, h = head % p.hq, ldq = padded_row(p.d);
  const Range keys = block(item % blocks, kKeyBlock, p.tk);
  const int64_t count = keys.end - keys.begin;

  Arena<A> arena{static_cast<A*>(scratch), weights_scratch_elements(p)};
  A* const kt = arena.take(kKeyBlock * p.d);
  A* const q = arena.take(kQueryBlock * ldq);
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
    pack_rows<T>(row_of<T>(p.q, b, queries.begin, h), p.q.stride_t, plan.rows(), p.d,
                 query_factor<A>(p, h), q);
    multiply_by_keys(plan, q, ldq, p.d, kt, s, bias_rows(p, b, h, plan));
    distances.template add<T>(plan, q, s);
    const A* const lse = static_cast<const A*>(params.lse) + head * p.tq + queries.begin;
    for (int64_t r = 0; r < plan.rows(); ++r) {
      const int64_t g = r / kRowGroup;
      const Range columns = plan.columns[g];
      if (is_empty(columns)) continue;
      const RowScore<A> score{
          p,        b, h, queries.begin + r, keys.begin, plan.masked[g] ? plan.visible[r] : nullptr,
          registers};
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

// Weights of one query for the first `count` of 64 keys, from its products x; added to `sums`.
template <class T>
void weigh_few(const AttentionWeightsParams& params, const RowScore<compute_t<T>>& score,
               int64_t count, compute_t<T>* x, compute_t<T>* sums) {
  using A = compute_t<T>;
  using V = Vec<A>;
  const AttentionProblem& p = params.problem;
  const int64_t row = (score.b * p.hq + score.h) * p.tq + score.q;
  score.to_logits(x, {0, count});
  const A shift = lse_in_logits(p.score, static_cast<const A*>(params.lse)[row]);
  with_weight(p.score, shift, [&](auto weight) {
    for_columns<A>({0, count}, [&](int64_t n) {
      const V w = weight(load(x + n)).value;
      store(x + n, w);
      store(sums + n, load(sums + n) + w);
    });
  });
  if (params.weights == nullptr) return;
  store_row(x, A(1), count, static_cast<T*>(params.weights) + row * p.tk + score.key);
}

template <class T>
void few_rows_item(const AttentionWeightsParams& params, void* scratch, int64_t item) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.problem;
  const int64_t splits = decode_splits(p), head = item / splits, ldq = padded_row(p.d);
  const int64_t b = head / p.hkv, kv = head % p.hkv, group = group_size(p), rows = group * p.tq;
  const auto head_of = [&](int64_t r) { return kv * group + r / p.tq; };

  Arena<A> arena{static_cast<A*>(scratch), few_rows_scratch_elements(p)};
  A* const q = arena.take(rows * ldq);
  A* const s = arena.take(rows * kKeyPanel);
  A* const sums = arena.take(kKeyPanel);
  A* const registers = arena.take(program_elements(p));
  for (int64_t r = 0; r < rows; ++r) {
    pack_rows<T>(row_of<T>(p.q, b, r % p.tq, head_of(r)), 0, 1, p.d, query_factor<A>(p, head_of(r)),
                 q + r * ldq);
  }
  int64_t at[kKeyPanel];
  for (int64_t n = 0; n < kKeyPanel; ++n) at[n] = n * p.k.stride_t;
  const Range split = block(item % splits, split_keys(p), p.tk);
  for (int64_t key = split.begin; key < split.end; key += kKeyPanel) {
    const Range keys = intersect(split, {key, key + kKeyPanel});
    KeyTile<T> x{};
    x.k = row_of<T>(p.k, b, key, kv);
    x.at_k = at;
    x.count = keys.end - keys.begin;
    x.q = q;
    x.s = s;
    dot_rows(p, rows, x, [](int64_t) {});
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t h = head_of(r), query = r % p.tq;
      if (query == 0) fill_zero(sums, kKeyPanel);
      const bool masked = !sees_all(p.mask, b, h, {query, query + 1}, keys);
      uint64_t visible[kMaskWords] = {};
      if (masked) visible[0] = seen_bits(p.mask, b, h, query, key);
      const RowScore<A> score{p, b, h, query, key, masked ? visible : nullptr, registers};
      weigh_few<T>(params, score, x.count, s + r * kKeyPanel, sums);
      if (params.sums == nullptr || query + 1 < p.tq) continue;
      A* const row = static_cast<A*>(params.sums) + (b * p.hq + h) * p.tk + key;
      for (int64_t n = 0; n < x.count; ++n) row[n] = sums[n];
    }
  }
}

void few_rows(const AttentionWeightsParams& p, void* scratch, int64_t begin, int64_t end) {
  dispatch(p.problem.dtype, [&](auto type) {
    for (int64_t i = begin; i < end; ++i) few_rows_item<decltype(type)>(p, scratch, i);
  });
}

void weights(const AttentionWeightsParams& p, void* scratch, int64_t begin, int64_t end) {
  dispatch(p.problem.dtype, [&](auto type) {
    for (int64_t i = begin; i < end; ++i) weights_item<decltype(type)>(p, scratch, i);
  });
}

}  // namespace

extern const AttentionWeightsKernels attention_weights_kernels_table = {weights, few_rows};

}  // namespace omniattn::OMNIATTN_ISA
