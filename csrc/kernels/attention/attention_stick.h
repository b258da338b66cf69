// Rows of tiles whose weights break a stick (see semantics/stick_breaking.h). The functions that
// compute whole rows are out of line: inlined, their arrays slow the rows of a softmax.
#pragma once

#include "kernels/attention/attention_row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// sigmoid(z) and softplus(z), each with a small relative error for any z.
template <class A>
struct StickKey {
  Vec<A> share, cost;
};
OMNIATTN_INLINE StickKey<float> stick_key(VecF z) {
  const VecF e = exp(-abs(z)), one = e + 1.0f, two = e + 2.0f;
  const VecF both = reciprocal(one * two), share = both * two;
  // ln(1 + e) = 2 atanh(s) with s = e / (2 + e), by a minimax polynomial within 2^-27.
  const VecF s = e * one * both;
  const VecF log = s * horner(s * s, 2.000000008e+00f, 6.666631469e-01f, 4.002491003e-01f,
                              2.796060531e-01f, 2.817832681e-01f);
  return {select(z < VecF(0.0f), e * share, share), max(VecF(0.0f), z) + log};
}
OMNIATTN_INLINE StickKey<double> stick_key(VecD z) {
  const VecD e = exp(-abs(z)), share = reciprocal(e + 1.0);
  const VecD log = map_lanes(e, [](double lane) { return __builtin_log1p(lane); });
  return {select(z < VecD(0.0), e * share, share), max(VecD(0.0), z) + log};
}

// Lanes moved kStep places down or, if it is negative, up; zeros take the free places.
template <int kStep, class A>
OMNIATTN_INLINE Vec<A> moved_lanes(Vec<A> x) {
  constexpr int kWidth = Vec<A>::kWidth;
  return [&]<int... I>(std::integer_sequence<int, I...>) -> Vec<A> {
    return Vec<A>(__builtin_shufflevector(
        x.v, zero<A>().v, (0 <= I + kStep && I + kStep < kWidth ? I + kStep : kWidth)...));
  }(std::make_integer_sequence<int, kWidth>{});
}
// Sums of each lane and all lanes after it or, if kStep is negative, before it.
template <int kStep, class A>
OMNIATTN_INLINE Vec<A> lane_scan(Vec<A> x) {
  constexpr int kWidth = Vec<A>::kWidth;
  if constexpr (-kWidth < kStep && kStep < kWidth) {
    return lane_scan<2 * kStep>(x + moved_lanes<kStep>(x));
  } else {
    return x;
  }
}

// Share of each key of a row, and the cost of the keys after it in the tile.
template <class A>
struct StickRow {
  A share[kKeyBlock], after[kKeyBlock];

  // Returns the cost of all keys, whose logits are z.
  OMNIATTN_INLINE A set(const A* z, Range columns) {
    using V = Vec<A>;
    V cost = zero<A>();
    for (int64_t n = columns.end - V::kWidth; n >= columns.begin; n -= V::kWidth) {
      const StickKey<A> key = stick_key(load(z + n));
      const V later = lane_scan<1>(moved_lanes<1>(key.cost));
      store(share + n, key.share);
      store(after + n, cost + later);
      cost = V((cost + (later + key.cost)).v[0]);
    }
    return cost.v[0];
  }
  // Weights of the keys from column n on. `beyond` is the cost of the keys after the tile.
  OMNIATTN_INLINE Vec<A> weights(int64_t n, A beyond) const {
    return load(share + n) * exp(-(Vec<A>(beyond) + load(after + n)));
  }
};

// Turns the logits and dP of a row into weights and dS. `left` is the cost of this tile's keys and
// all keys after them, `before` dL/d(-cost) and the sum of w dP over all keys before them.
template <class A>
[[gnu::noinline]] void stick_gradients(A* weights, A* ds, Range columns, ExactSum<A>& left,
                                       A& before) {
  using V = Vec<A>;
  StickRow<A> row;
  left.add(-row.set(weights, columns));
  const A beyond = left.total();
  V sum(before);
  for_columns<A>(columns, [&](int64_t n) {
    const V w = row.weights(n, beyond), g = w * load(ds + n);
    const V until = sum + lane_scan<-1>(g);
    store(weights + n, w);
    store(ds + n, g - load(row.share + n) * until);
    sum = V(until.v[V::kWidth - 1]);
  });
  before = sum.v[0];
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
