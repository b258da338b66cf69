// Online softmax in units of log2(e): a row keeps its running maximum m, the sum l of 2^(s - m) and
// the unnormalised output. What a row without a visible key gives is defined here and nowhere else:
// output 0, lse -inf, gradients 0.
#pragma once

#include "semantics/macros.h"
#include "semantics/score.h"

namespace omniattn {

template <class T>
OMNIATTN_FN T negative_infinity() {
  return -static_cast<T>(__builtin_inf());
}

// Subtracted in the exponent; a row that has seen no key yet subtracts 0, so that 2^(-inf) = 0,
// never NaN.
template <class T>
OMNIATTN_FN T softmax_shift(T m) {
  return m == negative_infinity<T>() ? T(0) : m;
}

// Factor of the unnormalised output at the end.
template <class T>
OMNIATTN_FN T softmax_normaliser(T l) {
  return l > T(0) ? T(1) / l : T(0);
}

// Natural-log lse from m (log2 units), l and ln(l).
template <class T>
OMNIATTN_FN T softmax_lse(T m, T l, T ln_l) {
  return l > T(0) ? m * T(kLn2) + ln_l : negative_infinity<T>();
}

// Shift of the backward's 2^(s - shift): +inf makes every probability of a fully masked row 0.
template <class T>
OMNIATTN_FN T softmax_backward_shift(T lse) {
  return lse == negative_infinity<T>() ? -negative_infinity<T>() : lse * T(kLog2E);
}

}  // namespace omniattn
