// Online softmax of the rows of a tile: running maximum, sum and unnormalised output.
#pragma once

#include "kernels/attention/attention_row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class A>
struct SoftmaxRow {
  A* s;           // logits / factor in, probabilities out
  A factor;       // positive; 1 unless products have 16-bit operands
  A* o;           // unnormalised output
  int64_t width;  // of o, padded
  A* m;           // running maximum
  A* l;           // running sum, one part per lane
};

// Logits of a row, where M is the type of the products' operands. They are rounded like their
// maximum: in a product fused with the subtraction, the largest logit would not cancel.
template <class M, class A>
OMNIATTN_INLINE Vec<A> load_logits(const SoftmaxRow<A>& row, int64_t n) {
  if constexpr (sizeof(M) < sizeof(A)) {
    return rounded_product(load(row.s + n), Vec<A>(row.factor));
  }
  return load(row.s + n);
}

// Largest x of each lane.
template <class A>
OMNIATTN_INLINE Vec<A> lane_maxima(const A* x, Range columns) {
  using V = Vec<A>;
  V top = load(x + columns.begin);
  for (int64_t n = columns.begin + V::kWidth; n < columns.end; n += V::kWidth) {
    top = max(top, load(x + n));
  }
  return top;
}

// Vector whose lane i is the largest lane of rows[i].
template <int kStep = 1, class A>
OMNIATTN_INLINE Vec<A> maxima_of_rows(Vec<A>* rows) {
  constexpr int kWidth = Vec<A>::kWidth;
  if constexpr (kStep == kWidth) {
    return rows[0];
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < kWidth; i += 2 * kStep) {
      swap_blocks<kStep>(rows[i], rows[i + kStep], typename MakeIndices<kWidth>::type{});
      rows[i] = max(rows[i], rows[i + kStep]);
    }
    return maxima_of_rows<2 * kStep>(rows);
  }
}

// Rescales sums made with another maximum.
template <class A>
OMNIATTN_INLINE void scale_sums(const SoftmaxRow<A>& row, A alpha) {
  using V = Vec<A>;
  store(row.l, load(row.l) * V(alpha));
  for (int64_t c = 0; c < row.width; c += V::kWidth) store(row.o + c, load(row.o + c) * V(alpha));
}

// Raises the running maximum to `top` and rescales the sums made with the old one.
template <class A>
OMNIATTN_INLINE void raise_maximum(const Score& score, const SoftmaxRow<A>& row, A top) {
  using V = Vec<A>;
  if (!(top > *row.m)) return;
  scale_sums(row, exp2(V((*row.m - top) * exponent_factor<A>(score))).v[0]);
  *row.m = top;
}

// Stores weights as computed operands M: narrow weights in the first half of their row's memory.
template <class M, class A>
OMNIATTN_INLINE void store_weights(A* s, int64_t n, Vec<A> w) {
  if constexpr (sizeof(M) < sizeof(A)) {
    store_factors(reinterpret_cast<M*>(s) + n, w);
  } else {
    store(s + n, w);
  }
}

// Computes the unnormalised weights of one row and stores them as To.
template <class M, class To, class A>
OMNIATTN_INLINE void weigh(const Score& score, const SoftmaxRow<A>& row, Range columns) {
  using V = Vec<A>;
  with_weight(score, softmax_shift(*row.m), [&](auto weight) {
    V sum = load(row.l), other = zero<A>();
    int64_t n = columns.begin;
    if constexpr (std::is_same_v<To, bf16>) {  // narrowed two vectors at a time
      for (; n + 2 * V::kWidth <= columns.end; n += 2 * V::kWidth) {
        const V w = weight(load_logits<M>(row, n)).value;
        const V next = weight(load_logits<M>(row, n + V::kWidth)).value;
        store_factors(reinterpret_cast<To*>(row.s) + n, w, next);
        sum += w;
        other += next;
      }
    }
    for (; n < columns.end; n += V::kWidth) {
      const V w = weight(load_logits<M>(row, n)).value;
      store_weights<To>(row.s, n, w);
      sum += w;
    }
    if constexpr (std::is_same_v<To, bf16>) sum += other;
    store(row.l, sum);
  });
}

// Stores the probabilities of one row as operands.
template <class M, class A>
OMNIATTN_INLINE void narrow_row(A* s, Range columns) {
  if constexpr (sizeof(M) < sizeof(A)) {
    for_columns<A>(columns, [&](int64_t n) { store_weights<M>(s, n, load(s + n)); });
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
