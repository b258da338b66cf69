// Loops over one row for the per-ISA kernel files: the body is written once and instantiated for
// whole vectors and for the tail.
//
//   for_row<T>(n, [&](int64_t i, auto part) { part.store(y + i, part.load(x + i) * 2.0f); });
#pragma once

#include "runtime/vec.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// The kWidth elements from a position on.
struct Whole {
  template <class S>
  OMNIATTN_INLINE auto load(const S* p) const {
    return OMNIATTN_ISA::load(p);
  }
  template <class S>
  OMNIATTN_INLINE void store(S* p, Vec<compute_t<S>> x) const {
    OMNIATTN_ISA::store(p, x);
  }
  // x with the lanes beyond the row set to zero.
  template <class T>
  OMNIATTN_INLINE Vec<T> zero_beyond(Vec<T> x) const {
    return x;
  }
  // Where every element of the row is a pair: the two vectors that hold the pairs of this part.
  OMNIATTN_INLINE Whole first_of_pairs() const { return {}; }
  template <class T>
  OMNIATTN_INLINE Whole second_of_pairs() const {
    return {};
  }
};

// The first n of them.
struct First {
  int64_t n;

  template <class S>
  OMNIATTN_INLINE auto load(const S* p) const {
    return load_n(p, n);
  }
  template <class S>
  OMNIATTN_INLINE void store(S* p, Vec<compute_t<S>> x) const {
    store_n(p, x, n);
  }
  template <class T>
  OMNIATTN_INLINE Vec<T> zero_beyond(Vec<T> x) const {
    return select(lanes_below<T>(n), x, Vec<T>(T{0}));
  }
  OMNIATTN_INLINE First first_of_pairs() const { return {2 * n}; }
  template <class T>
  OMNIATTN_INLINE First second_of_pairs() const {
    return {2 * n - Vec<T>::kWidth};
  }
};

// body(i, part) for i = 0, W, 2W, ... below n; T is the storage or the compute type.
template <class T, class F>
OMNIATTN_INLINE void for_row(int64_t n, const F& body) {
  constexpr int kWidth = Vec<compute_t<T>>::kWidth;
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) body(i, Whole{});
  if (i < n) body(i, First{n - i});
}

// Sum over the row of term(i, part), whose lanes beyond the row are ignored. Four sums in flight
// hide the latency of the addition; the order of additions depends on n only.
template <class T, class F>
OMNIATTN_INLINE compute_t<T> row_sum(int64_t n, const F& term) {
  using V = Vec<compute_t<T>>;
  constexpr int kWidth = V::kWidth;
  V sums[4] = {V(0), V(0), V(0), V(0)};
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) sums[k] += term(i + k * kWidth, Whole{});
  }
  for (; i + kWidth <= n; i += kWidth) sums[0] += term(i, Whole{});
  if (i < n) sums[0] += First{n - i}.zero_beyond(term(i, First{n - i}));
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
