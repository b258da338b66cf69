// Online softmax: a row keeps its running maximum m in the unit of logits (see score.h), the sum l
// of e^(s - m) and the unnormalised output. The result of a row without a visible key is defined
// here and nowhere else: output 0, lse -inf, gradients 0. A logit of NaN or +inf makes l NaN, and
// with it the output and lse of its row; m alone may have lost a NaN. A sink is a key with value 0
// that a row sees before all others. Other normalisers (see score_rules.h) need no m and l; their
// lse is 0.
#pragma once

#include "semantics/macros.h"
#include "semantics/score.h"

namespace omniattn {

template <class T>
OMNIATTN_FN T negative_infinity() {
  return -static_cast<T>(__builtin_inf());
}

// The shift in the exponent: m, or 0 for a row that has seen no key yet, so that its 2^(-inf) is 0
// and not NaN.
template <class T>
OMNIATTN_FN T softmax_shift(T m) {
  return m == negative_infinity<T>() ? T(0) : m;
}

// l of a row before its first key: e^(m - m) for a sink with logit m, 0 without a sink (m = -inf).
template <class T>
OMNIATTN_FN T softmax_initial_sum(T m) {
  return m == negative_infinity<T>() ? T(0) : T(1) + (m - m);
}

// The final factor of the unnormalised output.
template <class T>
OMNIATTN_FN T softmax_normaliser(T l) {
  return l == T(0) ? T(0) : T(1) / l;
}

// The lse of a row in natural units, and what was lost in rounding it: near the ends of the range
// of m, that may be all of ln l. Only value + tail gives probabilities whose sum is 1.
template <class T>
struct Lse {
  T value, tail;
};
template <class T>
OMNIATTN_FN Lse<T> softmax_lse(const Score& score, T m, T l, T ln_l) {
  if (l == T(0)) return {negative_infinity<T>(), T(0)};
  const T value = from_logit(score, m) + ln_l;
  return {value, score.natural ? (m - value) + ln_l : T(0)};
}

// The backward's probabilities are e^(s - shift) times a row's factor, e^-tail = 2^exponent. A
// shift of +inf makes every probability of a fully masked row 0.
template <class T>
OMNIATTN_FN T softmax_backward_shift(const Score& score, T lse) {
  return lse == negative_infinity<T>() ? -negative_infinity<T>() : to_logit(score, lse);
}
template <class T>
OMNIATTN_FN T softmax_tail_exponent(T tail) {
  return tail * -T(kLog2E);
}

// The final factor and the lse of a row, for any normaliser.
template <class T>
OMNIATTN_FN T row_factor(const Score& score, T l) {
  return is_softmax(score) ? softmax_normaliser(l) : T(1);
}
template <class T>
OMNIATTN_FN Lse<T> row_lse(const Score& score, T m, T l, T ln_l) {
  if (!is_softmax(score)) return {T(0), T(0)};
  return softmax_lse(score, m, l, ln_l);
}

}  // namespace omniattn
