// act(x) and act'(x) on CUDA, for the kernels that apply an activation.
#pragma once

#include "kernels/activation/activation.h"
#include "runtime/gpu.h"

namespace omniattn {
namespace {

template <class C>
struct ValueAndSlope {
  C value, slope;
};

// act(x) and act'(x); the compiler drops the slope if only the value is used.
template <class C>
__device__ __forceinline__ ValueAndSlope<C> activate(Activation act, C x) {
  switch (act) {
    case Activation::identity:
      return {x, C(1)};
    case Activation::relu:
      return {x > C(0) || x != x ? x : C(0), x > C(0) ? C(1) : C(0)};
    case Activation::silu: {
      const C s = C(1) / (C(1) + exp(-x));
      return {x * s, s + x * s * (C(1) - s)};
    }
    case Activation::gelu: {
      constexpr auto kInvSqrt2 = static_cast<C>(0.70710678118654752440);
      constexpr auto kInvSqrt2Pi = static_cast<C>(0.39894228040143267794);
      // erfc keeps the precision of the left tail.
      const C below = C(0.5) * erfc(-x * kInvSqrt2);
      return {x * below, below + x * kInvSqrt2Pi * exp(x * x * C(-0.5))};
    }
    case Activation::sigmoid: {
      const C s = C(1) / (C(1) + exp(-x));
      return {s, s * (C(1) - s)};
    }
    case Activation::quick_gelu: {
      constexpr auto kScale = static_cast<C>(1.702);
      const C s = C(1) / (C(1) + exp(-kScale * x));
      return {x * s, s + kScale * x * s * (C(1) - s)};
    }
    case Activation::relu_squared: {
      const C r = x > C(0) || x != x ? x : C(0);
      return {r * r, r + r};
    }
    case Activation::gelu_tanh: {
      constexpr auto kScale = static_cast<C>(0.79788456080286535588);  // sqrt(2 / pi)
      constexpr auto kCubic = static_cast<C>(0.044715);
      const C t = tanh(kScale * x * (C(1) + kCubic * x * x));
      const C below = C(0.5) * (C(1) + t);
      const C inner = kScale * (C(1) + 3 * kCubic * x * x);
      return {x * below, below + C(0.5) * x * (C(1) - t * t) * inner};
    }
  }
  OMNIATTN_UNREACHABLE();
}

// Product of gate and up, and its derivatives.
template <class C>
struct Gated {
  C value, by_gate, by_up;
};

template <class C>
__device__ __forceinline__ Gated<C> clamped_product(const Clamp& clamp, C gate, C up) {
  const C alpha = static_cast<C>(clamp.alpha), limit = static_cast<C>(clamp.limit);
  const auto swish = activate(Activation::silu, alpha * (gate > limit ? limit : gate));
  const C value = swish.value / alpha;
  const C shifted = 1 + (up > limit ? limit : up < -limit ? -limit : up);
  return {value * shifted, gate <= limit ? swish.slope * shifted : C(0),
          fabs(up) <= limit ? value : C(0)};
}

}  // namespace
}  // namespace omniattn
