// Step between the two products of an expert on the CPU, see moe.h: gate and
// up of a row of features, and h.
#pragma once

#include "kernels/moe/moe.h"
#include "runtime/row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Gate and up of one row and one group of features.
template <class C>
struct HiddenRow {
  C gate[kMoeFeatures];
  C up[kMoeFeatures];
};

// Calls f(first column of pre, its place in a group's row of pre, columns) for the one or two runs
// of columns that determine `n` features from `first` on.
template <class F>
OMNIATTN_INLINE void for_runs(const MoeHidden& h, int64_t first, int64_t n, const F& f) {
  if (h.gate == MoeGate::interleaved) {
    f(2 * first, int64_t{0}, 2 * n);
  } else {
    f(first, int64_t{0}, n);
    if (h.gate == MoeGate::halves) f(h.features + first, kMoeFeatures, n);
  }
}

// Splits a group's row of pre into gate and up; without a gate, gate is the row and up is 1.
template <class C>
OMNIATTN_INLINE void split_row(MoeGate gate, const C* pre, int64_t n, HiddenRow<C>& row) {
  for_row<C>(n, [&](int64_t i, auto part) {
    if (gate == MoeGate::interleaved) {
      const auto [even, odd] =
          deinterleave(part.first_of_pairs().load(pre + 2 * i),
                       part.template second_of_pairs<C>().load(pre + 2 * i + Vec<C>::kWidth));
      part.store(row.gate + i, even);
      part.store(row.up + i, odd);
    } else {
      part.store(row.gate + i, part.load(pre + i));
      part.store(row.up + i,
                 gate == MoeGate::none ? Vec<C>(C(1)) : part.load(pre + kMoeFeatures + i));
    }
  });
}

// The inverse of split_row; without a gate there is no up.
template <class C>
OMNIATTN_INLINE void join_row(MoeGate gate, const HiddenRow<C>& row, int64_t n, C* pre) {
  for_row<C>(n, [&](int64_t i, auto part) {
    const Vec<C> first = part.load(row.gate + i), second = part.load(row.up + i);
    if (gate == MoeGate::interleaved) {
      const auto [low, high] = interleave(first, second);
      part.first_of_pairs().store(pre + 2 * i, low);
      part.template second_of_pairs<C>().store(pre + 2 * i + Vec<C>::kWidth, high);
    } else {
      part.store(pre + i, first);
      if (gate == MoeGate::halves) part.store(pre + kMoeFeatures + i, second);
    }
  });
}

template <class C, class Act>
struct Product {
  OMNIATTN_INLINE Gated<Vec<C>> operator()(Vec<C> gate, Vec<C> up) const {
    const auto [value, slope] = Act::at(gate);
    return {value * up, slope * up, value};
  }
};

template <class C, class F>
OMNIATTN_INLINE void with_hidden(const MoeHidden& h, const F& f) {
  if (h.clamp.limit > 0) {
    f(ClampedProduct<C>(h.clamp));
  } else {
    with_activation(h.act, [&]<class Act>(Act) { f(Product<C, Act>{}); });
  }
}

template <class C, class T>
void hidden_row(const MoeHidden& p, const HiddenRow<C>& row, int64_t n, T* hidden) {
  with_hidden<C>(p, [&](const auto& f) {
    for_row<C>(n, [&](int64_t i, auto part) {
      part.store(hidden + i, f(part.load(row.gate + i), part.load(row.up + i)).value);
    });
  });
}

// Replaces the row by its gradients, from the gradient t of h without its routing weight;
// stores weight * h and returns t . h.
template <class C, class T>
C hidden_row_backward(const MoeHidden& p, HiddenRow<C>& row, const C* t, C weight, int64_t n,
                      T* weighted) {
  Vec<C> sum = zero<C>();
  with_hidden<C>(p, [&](const auto& f) {
    for_row<C>(n, [&](int64_t i, auto part) {
      const Vec<C> grad = part.load(t + i);
      const Gated<Vec<C>> v = f(part.load(row.gate + i), part.load(row.up + i));
      sum += part.zero_beyond(grad * v.value);
      part.store(weighted + i, weight * v.value);
      part.store(row.gate + i, weight * grad * v.by_gate);
      part.store(row.up + i, weight * grad * v.by_up);
    });
  });
  return reduce_add(sum);
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
