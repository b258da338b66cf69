// Computes and stores the rows of attention weights (see AttentionWeightsParams).
#pragma once

#include "kernels/attention/attention_pack.h"
#include "kernels/attention/attention_params.h"
#include "kernels/attention/attention_row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Turns the products x of a row into weights, given its lse in logits, and adds them to `sums`.
template <class A>
void weigh_row(const RowScore<A>& score, A* x, Range columns, A factor, A shift, A* sums) {
  using V = Vec<A>;
  score.to_logits(x, columns, factor);
  with_weight(score.p.score, shift, [&](auto weight) {
    for_columns<A>(columns, [&](int64_t n) {
      const V w = weight(load(x + n)).value;
      store(x + n, w);
      store(sums + n, load(sums + n) + w);
    });
  });
}

// Writes `count` weights of one query from `key` on, or adds them to the weights of other heads.
template <class T>
void store_weights(const AttentionWeightsParams& w, int64_t head, int64_t query, int64_t key,
                   int64_t count, const compute_t<T>* x) {
  using A = compute_t<T>;
  if (w.column_sums) return;
  const int64_t at = (head * w.problem.tq + query) * w.problem.tk + key;
  if (!w.group_sums) {
    store_row(x, A(1), count, static_cast<T*>(w.out) + at);
    return;
  }
  A* const row = static_cast<A*>(w.out) + at;
  for (int64_t n = 0; n < count; n += Vec<A>::kWidth) {
    store_n(row + n, load_n(row + n, count - n) + load_n(x + n, count - n), count - n);
  }
}

template <class A>
void store_column_sums(const AttentionWeightsParams& w, int64_t head, int64_t key, int64_t count,
                       const A* sums) {
  if (!w.column_sums) return;
  A* const row = static_cast<A*>(w.out) + head * w.problem.tk + key;
  for (int64_t n = 0; n < count; ++n) row[n] = sums[n];
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
