// Online softmax. A row keeps its running maximum m in the unit of logits (see score.h), the sum l
// of e^(s - m) and the unnormalised output. The result of a row without a visible key is defined
// only here: output 0, lse -inf, gradients 0. A logit of NaN or +inf makes l NaN, and
// with it the output and lse of its row; m alone may miss a NaN. A sink is a key with value 0
// that a row sees before all others. Other normalizers (see score_rules.h) need neither m nor l;
// their lse is 0. A row of softpick keeps a maximum of at least 0 and a sum of |e^s - 1|. A row
// that breaks a stick keeps its cost in m and l, and its lse is the logarithm of the remainder.
#pragma once

#include "semantics/macros.h"
#include "semantics/score.h"
#include "semantics/stick_breaking.h"

namespace omniattn {

template <class T>
OMNIATTN_FN T negative_infinity() {
  return -static_cast<T>(__builtin_inf());
}

// The shift in the exponent: m, or 0 for a row that has seen no key yet, whose 2^(-inf) must be 0
// rather than NaN.
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
OMNIATTN_FN T softmax_normalizer(T l) {
  return l == T(0) ? T(0) : T(1) / l;
}

// a * b, rounded: no compiler can fuse it with a sum.
template <class T>
OMNIATTN_FN T rounded_product(T a, T b) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return __builtin_fmaf(a, b, T(0));
  } else {
    return __builtin_fma(a, b, T(0));
  }
}

// The lse of a row in the unit of logits, always rounded in the same way; +inf for a fully masked
// row, so that its probabilities e^(s - lse) are 0.
template <class T>
OMNIATTN_FN T lse_in_logits(const Score& score, T lse) {
  if (lse == negative_infinity<T>()) return -lse;
  return score.natural ? lse : rounded_product(lse, T(kLog2E));
}

// The lse of a row in natural units, and the part of m + ln l that lse_in_logits rounds away, in
// the unit of logits. At large logits this may be all of ln l. Only value and tail together give
// probabilities whose sum is 1.
template <class T>
struct Lse {
  T value, tail;
};
template <class T>
OMNIATTN_FN Lse<T> softmax_lse(const Score& score, T m, T l, T ln_l) {
  if (l == T(0)) return {negative_infinity<T>(), T(0)};
  const T value = from_logit(score, m) + ln_l;
  return {value, (m - lse_in_logits(score, value)) + to_logit(score, ln_l)};
}

// The backward's probabilities are e^(s - shift) times 2^exponent, a factor of their row. shift is
// the sum of lse and tail, exponent its rounding error.
template <class T>
struct BackwardShift {
  T shift, exponent;
};
template <class T>
OMNIATTN_FN BackwardShift<T> softmax_backward_shift(const Score& score, const Lse<T>& lse) {
  const T value = lse_in_logits(score, lse.value), shift = value + lse.tail;
  if (lse.value == negative_infinity<T>()) return {value, T(0)};
  return {shift, ((shift - value) - lse.tail) * exponent_factor<T>(score)};
}

// Final factor and lse of a row, for any normalizer.
template <class T>
OMNIATTN_FN T row_factor(const Score& score, T l) {
  return divides_rows(score) ? softmax_normalizer(l) : T(1);
}
template <class T>
OMNIATTN_FN Lse<T> row_lse(const Score& score, T m, T l, T ln_l) {
  if (is_stick(score)) return {-(m + l), -((m - (m + l)) + l)};
  if (!divides_rows(score)) return {T(0), T(0)};
  return softmax_lse(score, m, l, ln_l);
}

}  // namespace omniattn
