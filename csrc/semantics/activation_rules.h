// Activations: the value and the derivative of each at x, written once for vectors on the CPU and
// for numbers on CUDA.
//
// To add an activation, write its struct here and a line in OMNIATTN_ACTIVATIONS. A struct without
// `at` does not compile.
#pragma once

#include <math.h>  // with the float overloads in the global namespace

#include <cstdint>

#include "semantics/macros.h"
#include "semantics/value_and_slope.h"

namespace omniattn {

// name, number in the arguments of ops, struct
#define OMNIATTN_ACTIVATIONS(rule)                                                          \
  rule(identity, 0, Identity) rule(relu, 1, Relu) rule(silu, 2, Silu) rule(gelu, 3, Gelu)   \
      rule(gelu_tanh, 4, GeluTanh) rule(sigmoid, 5, Sigmoid) rule(quick_gelu, 6, QuickGelu) \
          rule(relu_squared, 7, ReluSquared)

enum class Activation : int32_t {
#define OMNIATTN_RULE(name, number, Rule) name = number,
  OMNIATTN_ACTIVATIONS(OMNIATTN_RULE)
#undef OMNIATTN_RULE
};
#define OMNIATTN_RULE(name, number, Rule) +1
inline constexpr int64_t kActivationCount = OMNIATTN_ACTIVATIONS(OMNIATTN_RULE);
#undef OMNIATTN_RULE

namespace activation_rules {

// Scalar functions under the names that runtime/vec.h uses. As on vectors, `max` and `min` give
// their second argument if one is NaN.

template <class C>
OMNIATTN_FN C max(C a, C b) {
  return a > b ? a : b;
}
template <class C>
OMNIATTN_FN C min(C a, C b) {
  return a < b ? a : b;
}
template <class C>
OMNIATTN_FN C select(bool condition, C a, C b) {
  return condition ? a : b;
}
template <class C>
OMNIATTN_FN C sigmoid(C x) {
  return C(1) / (C(1) + exp(-x));
}
// Distribution function of the normal distribution, and its density times sqrt(2 pi).
template <class C>
struct Normal {
  C below, bell;
};
template <class C>
OMNIATTN_FN Normal<C> normal(C x) {
  constexpr C kInvSqrt2 = C(0.70710678118654752440);
  return {C(0.5) * erfc(-x * kInvSqrt2), exp(x * x * C(-0.5))};  // erfc resolves the left tail
}

struct Identity {
  template <class V>
  OMNIATTN_FN static ValueAndSlope<V> at(V x) {
    return {x, V(1)};
  }
};

struct Relu {
  template <class V>
  OMNIATTN_FN static ValueAndSlope<V> at(V x) {
    return {max(V(0), x), select(x > V(0), V(1), V(0))};
  }
};

struct Silu {
  template <class V>
  OMNIATTN_FN static ValueAndSlope<V> at(V x) {
    const V s = sigmoid(x);
    return {x * s, fma(x * s, V(1) - s, s)};
  }
};

struct Gelu {
  template <class V>
  OMNIATTN_FN static ValueAndSlope<V> at(V x) {
    const V inverse_sqrt_2_pi = V(0.39894228040143267794);
    const auto [below, bell] = normal(x);
    return {x * below, fma(x * inverse_sqrt_2_pi, bell, below)};
  }
};

// (1 + tanh u) / 2 = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanh {
  template <class V>
  OMNIATTN_FN static ValueAndSlope<V> at(V x) {
    const V scale = V(1.59576912160573071176), cubic = V(0.044715);  // 2 sqrt(2 / pi)
    const V xx = x * x;
    const V below = sigmoid(scale * x * fma(cubic, xx, V(1)));
    const V slope = scale * fma(V(3) * cubic, xx, V(1));
    return {x * below, fma(x * below * (V(1) - below), slope, below)};
  }
};

struct Sigmoid {
  template <class V>
  OMNIATTN_FN static ValueAndSlope<V> at(V x) {
    const V s = sigmoid(x);
    return {s, s * (V(1) - s)};
  }
};

// x sigmoid(1.702 x)
struct QuickGelu {
  template <class V>
  OMNIATTN_FN static ValueAndSlope<V> at(V x) {
    const V scale = V(1.702);
    const V s = sigmoid(scale * x);
    return {x * s, fma(scale * x * s, V(1) - s, s)};
  }
};

// max(x, 0)^2
struct ReluSquared {
  template <class V>
  OMNIATTN_FN static ValueAndSlope<V> at(V x) {
    const V r = max(V(0), x);
    return {r * r, r + r};
  }
};

}  // namespace activation_rules

// Calls f(Rule{}) with the struct of an activation.
template <class F>
OMNIATTN_FN auto with_activation(Activation act, const F& f) {
  switch (act) {
#define OMNIATTN_RULE(name, number, Rule) \
  case Activation::name:                  \
    return f(activation_rules::Rule{});
    OMNIATTN_ACTIVATIONS(OMNIATTN_RULE)
#undef OMNIATTN_RULE
  }
  OMNIATTN_UNREACHABLE();
}

// act(x) and act'(x).
template <class V>
OMNIATTN_FN ValueAndSlope<V> activate(Activation act, V x) {
  return with_activation(act, [&](auto rule) OMNIATTN_LAMBDA { return rule.at(x); });
}

// Product of gate and up, and its derivatives.
template <class V>
struct Gated {
  V value, by_gate, by_up;
};

// Limits of the clamped product g sigmoid(alpha g) (u + 1), g = min(gate, limit), u = up within
// [-limit, limit]; a clamped input has no gradient. limit 0: not clamped.
struct Clamp {
  double alpha, limit;
};

template <class C>
struct ClampedProduct {
  C alpha, limit;

  OMNIATTN_FN explicit ClampedProduct(const Clamp& clamp)
      : alpha(static_cast<C>(clamp.alpha)), limit(static_cast<C>(clamp.limit)) {}

  template <class V>
  OMNIATTN_FN Gated<V> operator()(V gate, V up) const {
    using namespace activation_rules;
    const V bound = limit;
    const auto [value, slope] = Silu::at(V(alpha) * min(bound, gate));
    const V swish = value * V(C(1) / alpha);
    const V shifted = V(1) + max(-bound, min(bound, up));
    return {swish * shifted, select(gate <= bound, slope * shifted, V(0)),
            select(abs(up) <= bound, swish, V(0))};
  }
};

}  // namespace omniattn
