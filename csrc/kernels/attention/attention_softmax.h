// The online softmax of the rows of a tile: running maximum, sum and unnormalised output.
#pragma once

#include "kernels/attention/attention_row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class A>
struct SoftmaxRow {
  A* s;           // logits / factor in, probabilities out
  A factor;       // 1 unless products are of 16-bit operands
  A* o;           // unnormalised output
  int64_t width;  // of o, padded
  A* m;           // running maximum
  A* l;           // running sum, one part per lane
};

// The logits of a row, where M are the operands of products.
template <class M, class A>
OMNIATTN_INLINE Vec<A> load_logits(const SoftmaxRow<A>& row, int64_t n) {
  if constexpr (sizeof(M) < sizeof(A)) return load(row.s + n) * Vec<A>(row.factor);
  return load(row.s + n);
}

template <class M, class A>
OMNIATTN_INLINE A row_maximum(const SoftmaxRow<A>& row, Range columns) {
  using V = Vec<A>;
  V top = load_logits<M>(row, columns.begin);
  for (int64_t n = columns.begin + V::kWidth; n < columns.end; n += V::kWidth) {
    top = max(top, load_logits<M>(row, n));
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

// Stores weights as computed operands M: narrow ones in the first half of the memory of their row.
template <class M, class A>
OMNIATTN_INLINE void store_weights(A* s, int64_t n, Vec<A> w) {
  if constexpr (sizeof(M) < sizeof(A)) {
    store_factors(reinterpret_cast<M*>(s) + n, w);
  } else {
    store(s + n, w);
  }
}

// The weights of one row, not yet normalised, stored as To.
template <class M, class To, class A>
OMNIATTN_INLINE void weigh(const Score& score, const SoftmaxRow<A>& row, Range columns) {
  using V = Vec<A>;
  with_weight(score, softmax_shift(*row.m), [&](auto weight) {
    V sum = load(row.l);
    for (int64_t n = columns.begin; n < columns.end; n += V::kWidth) {
      const V w = weight(load_logits<M>(row, n)).value;
      store_weights<To>(row.s, n, w);
      sum += w;
    }
    store(row.l, sum);
  });
}

constexpr int64_t kRowsAtOnce = 4;  // whose maxima are taken together, so that latencies overlap

// Stores the probabilities of one row as operands.
template <class M, class A>
OMNIATTN_INLINE void narrow_row(A* s, Range columns) {
  if constexpr (sizeof(M) < sizeof(A)) {
    for_columns<A>(columns, [&](int64_t n) { store_weights<M>(s, n, load(s + n)); });
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
