// act(x) and act'(x) on vectors, for the kernels that apply an activation.
#pragma once

#include "kernels/activation/activation.h"
#include "runtime/assert.h"
#include "runtime/vec.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class V>
struct ValueAndSlope {
  V value, slope;
};

// act(x) and act'(x); the compiler drops the slope if only the value is used.
template <Activation kAct, class T>
OMNIATTN_INLINE ValueAndSlope<Vec<T>> activate(Vec<T> x) {
  using V = Vec<T>;
  if constexpr (kAct == Activation::identity) {
    return {x, V(T{1})};
  } else if constexpr (kAct == Activation::relu) {
    return {max(V(T{0}), x), select(x > V(T{0}), V(T{1}), V(T{0}))};
  } else if constexpr (kAct == Activation::silu) {
    const V s = sigmoid(x);
    return {x * s, fma(x * s, T{1} - s, s)};
  } else if constexpr (kAct == Activation::gelu) {
    constexpr auto kInvSqrt2Pi = static_cast<T>(0.39894228040143267794);
    const auto [below, bell] = normal(x);
    return {x * below, fma(x * kInvSqrt2Pi, bell, below)};
  } else if constexpr (kAct == Activation::sigmoid) {
    const V s = sigmoid(x);
    return {s, s * (T{1} - s)};
  } else if constexpr (kAct == Activation::quick_gelu) {
    constexpr auto kScale = static_cast<T>(1.702);
    const V s = sigmoid(kScale * x);
    return {x * s, fma(kScale * x * s, T{1} - s, s)};
  } else if constexpr (kAct == Activation::relu_squared) {
    const V r = max(V(T{0}), x);
    return {r * r, r + r};
  } else {
    static_assert(kAct == Activation::gelu_tanh);
    // (1 + tanh u) / 2 = sigmoid(2 u)
    constexpr auto kScale = static_cast<T>(1.59576912160573071176);  // 2 sqrt(2 / pi)
    constexpr auto kCubic = static_cast<T>(0.044715);
    const V xx = x * x;
    const V below = sigmoid(kScale * x * fma(V(kCubic), xx, V(T{1})));
    const V slope = kScale * fma(V(3 * kCubic), xx, V(T{1}));
    return {x * below, fma(x * below * (T{1} - below), slope, below)};
  }
}

// Product of gate and up, and its derivatives.
template <class V>
struct Gated {
  V value, by_gate, by_up;
};

template <class C>
struct ClampedProduct {
  C alpha, limit;

  OMNIATTN_INLINE explicit ClampedProduct(const Clamp& clamp)
      : alpha(static_cast<C>(clamp.alpha)), limit(static_cast<C>(clamp.limit)) {}

  OMNIATTN_INLINE Gated<Vec<C>> operator()(Vec<C> gate, Vec<C> up) const {
    const Vec<C> bound = limit;
    const auto [value, slope] = activate<Activation::silu>(alpha * min(bound, gate));
    const Vec<C> swish = value * (C(1) / alpha);
    const Vec<C> shifted = C(1) + max(-bound, min(bound, up));
    return {swish * shifted, select(gate <= bound, slope * shifted, zero<C>()),
            select(abs(up) <= bound, swish, zero<C>())};
  }
};

// Calls f.template operator()<act>() with the run-time activation as a constant.
template <class F>
OMNIATTN_INLINE void with_activation(Activation act, const F& f) {
  switch (act) {
    case Activation::identity:
      return f.template operator()<Activation::identity>();
    case Activation::relu:
      return f.template operator()<Activation::relu>();
    case Activation::silu:
      return f.template operator()<Activation::silu>();
    case Activation::gelu:
      return f.template operator()<Activation::gelu>();
    case Activation::gelu_tanh:
      return f.template operator()<Activation::gelu_tanh>();
    case Activation::sigmoid:
      return f.template operator()<Activation::sigmoid>();
    case Activation::quick_gelu:
      return f.template operator()<Activation::quick_gelu>();
    case Activation::relu_squared:
      return f.template operator()<Activation::relu_squared>();
  }
  OMNIATTN_FAIL("an activation is none of those that kernels have");
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
