// Rows of tiles with the weights of softpick (Zuhri et al., Softpick: No Attention Sink, No Massive
// Activations with Rectified Softmax, arXiv 2504.20966):
//
//   w_j = relu(e^z_j - 1) / sum over the visible keys k of |e^z_k - 1|
//
// A row keeps m = max(0, largest z) and l = sum |e^z - 1| e^-m like a softmax, and its lse is
// m + ln l. A row whose visible logits are all 0 has l = 0, like a row without keys. With
// Delta = sum of w dP and r = dL/dlse,
//
//   dL/dz_j = e^(z_j - lse) times  dP_j - Delta + r  if z_j > 0,  Delta - r  if z_j < 0,  0 if 0
//
// The functions for whole rows are out of line: inlined, they slow the rows of a softmax.
#pragma once

#include "kernels/attention/attention_row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// (e^x - 1) e^-shift and its derivative e^x e^-shift, for finite e^-shift.
template <class A>
struct ShiftedPower {
  Vec<A> shift, one;  // one: e^-shift

  // The sum of a row of logits near 0 can be so small that its inverse overflows.
  explicit ShiftedPower(A s) : shift(s < A(-87) ? A(-87) : s), one(exp(-shift)) {}

  OMNIATTN_INLINE ValueAndSlope<Vec<A>> operator()(Vec<A> x) const {
    const Vec<A> e = exp2((x - shift) * Vec<A>(static_cast<A>(kLog2E)));
    if constexpr (sizeof(A) == 8) {  // tanh(x / 2) = (e^x - 1) / (e^x + 1)
      return {tanh(x * 0.5) * (e + one), e};
    } else {  // Taylor's polynomial within 2^-25 where the difference would cancel
      const VecF near =
          one * x *
          horner(x, 1.0f, 1.0f / 2, 1.0f / 6, 1.0f / 24, 1.0f / 120, 1.0f / 720, 1.0f / 5040);
      return {select(abs(x) < VecF(0.35f), near, e - one), e};
    }
  }
};

// Replaces the logits of a row by the numerators of their weights, calls f(n, weights) to store
// them and returns the denominator, one part per lane. Hidden keys have logits of -inf.
template <class A, class F>
OMNIATTN_INLINE Vec<A> pick_weights(const A* s, Range columns, A shift, const F& f) {
  using V = Vec<A>;
  const ShiftedPower<A> power(shift);
  V sum = zero<A>();
  for_columns<A>(columns, [&](int64_t n) {
    const V x = load(s + n), value = power(x).value;
    sum += select(x == V(negative_infinity<A>()), zero<A>(), abs(value));
    f(n, max(zero<A>(), value));
  });
  return sum;
}

// Turns the logits and dP of a row into weights and dS. `mean` is sum P dP - dL/dlse.
template <class A>
[[gnu::noinline]] void pick_gradients(A* weights, A* ds, Range columns, A shift, A mean) {
  using V = Vec<A>;
  const ShiftedPower<A> power(shift);
  for_columns<A>(columns, [&](int64_t n) {
    const V x = load(weights + n), none = zero<A>();
    const auto [value, slope] = power(x);
    store(weights + n, max(none, value));
    const V below = select(x < none, V(mean), x);  // NaN stays
    const V grad = select(x > none, load(ds + n) - V(mean), select(x == none, none, below));
    // A hidden key has no part in its row, which may be NaN.
    store(ds + n, select(x == V(negative_infinity<A>()), none, slope * grad));
  });
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
