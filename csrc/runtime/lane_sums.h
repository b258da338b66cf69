// Sums over the lanes of several vectors at once.
#pragma once

#include <utility>  // std::integer_sequence, a type without code

#include "runtime/vec.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Sums pairs of adjacent lanes. Each four lanes of the result hold two sums of a, then two of b.
template <class A>
OMNIATTN_INLINE Vec<A> fold(Vec<A> a, Vec<A> b) {
  constexpr int kWidth = Vec<A>::kWidth;
  return [&]<int... I>(std::integer_sequence<int, I...>) {
    return Vec<A>(
        __builtin_shufflevector(a.v, b.v, (I / 4 * 4 + I % 2 * 2 + I / 2 % 2 * kWidth)...) +
        __builtin_shufflevector(a.v, b.v, (I / 4 * 4 + I % 2 * 2 + I / 2 % 2 * kWidth + 1)...));
  }(std::make_integer_sequence<int, kWidth>{});
}
// p[i] = the sum of the lanes of x[i]. Four calls of reduce_add, which took a quarter of dot_tile,
// need 4 times the instructions; a masked store of the sums takes 20 micro-ops on Zen 3.
template <class A>
OMNIATTN_INLINE void store_sums(A* p, const Vec<A> (&x)[4]) {
  constexpr int kWidth = Vec<A>::kWidth;
  if constexpr (kWidth < 4) {
    for (int i = 0; i < 4; ++i) p[i] = reduce_add(x[i]);
  } else {
    const Vec<A> sums = fold(fold(x[0], x[1]), fold(x[2], x[3]));
    typedef A Four __attribute__((vector_size(4 * sizeof(A))));
    Four four = __builtin_shufflevector(sums.v, sums.v, 0, 1, 2, 3);
    [&]<int... I>(std::integer_sequence<int, I...>) {
      ((four +=
        __builtin_shufflevector(sums.v, sums.v, 4 * I + 4, 4 * I + 5, 4 * I + 6, 4 * I + 7)),
       ...);
    }(std::make_integer_sequence<int, kWidth / 4 - 1>{});
    __builtin_memcpy(p, &four, sizeof(four));
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
