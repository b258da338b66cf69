// The online softmax of the rows of a tile: running maximum, sum and unnormalised output.
#pragma once

#include "kernels/attention/attention_row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class A>
struct SoftmaxRow {
  A* s;           // logits in, probabilities out
  A* o;           // unnormalised output
  int64_t width;  // of o, padded
  A* m;           // running maximum
  A* l;           // running sum, one part per lane
};

template <class A>
OMNIATTN_INLINE A row_maximum(const A* s, Range columns) {
  using V = Vec<A>;
  V top = load(s + columns.begin);
  for (int64_t n = columns.begin + V::kWidth; n < columns.end; n += V::kWidth) {
    top = max(top, load(s + n));
  }
  return reduce_max(top);
}

// Raises the running maximum to `top` and rescales the sums made with the old one.
template <class A>
OMNIATTN_INLINE void raise_maximum(const Score& score, const SoftmaxRow<A>& row, A top) {
  using V = Vec<A>;
  if (!(top > *row.m)) return;
  const V alpha = exp2(V((*row.m - top) * exponent_factor<A>(score)));
  store(row.l, load(row.l) * alpha);
  for (int64_t c = 0; c < row.width; c += V::kWidth) store(row.o + c, load(row.o + c) * alpha);
  *row.m = top;
}

// The weights of one row, not yet normalised.
template <class A>
OMNIATTN_INLINE void weigh(const Score& score, const SoftmaxRow<A>& row, Range columns) {
  using V = Vec<A>;
  with_weight(score, softmax_shift(*row.m), [&](auto weight) {
    V sum = load(row.l);
    for (int64_t n = columns.begin; n < columns.end; n += V::kWidth) {
      const V w = weight(load(row.s + n)).value;
      store(row.s + n, w);
      sum += w;
    }
    store(row.l, sum);
  });
}

constexpr int64_t kRowsAtOnce = 4;  // whose maxima are taken together, so that latencies overlap

// Stores the probabilities of one row as operands, in the first half of their own memory.
template <class M, class A>
OMNIATTN_INLINE void narrow_row(A* s, Range columns) {
  if constexpr (sizeof(M) < sizeof(A)) {
    M* const narrow = reinterpret_cast<M*>(s);
    for_columns<A>(columns, [&](int64_t n) { store(narrow + n, load(s + n)); });
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
