// GLU family, see activation.h.
#include "kernels/activation/activation.h"

#include "runtime/dispatch.h"
#include "runtime/row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class V>
struct ValueAndSlope {
  V value, slope;
};

// act(x) and act'(x); the compiler drops the slope where only the value is used.
template <Activation kAct, class T>
OMNIATTN_INLINE ValueAndSlope<Vec<T>> activate(Vec<T> x) {
  using V = Vec<T>;
  if constexpr (kAct == Activation::identity) {
    return {x, V(T{1})};
  } else if constexpr (kAct == Activation::relu) {
    return {max(V(T{0}), x), select(x > V(T{0}), V(T{1}), V(T{0}))};
  } else if constexpr (kAct == Activation::silu) {
    // Beyond this the float sigmoid stops falling; a large x would bring its last value to light.
    constexpr T kTail = sizeof(T) == 4 ? T(-87) : T(-1000);
    const V s = select(x < V(kTail), V(T{0}), sigmoid(x));
    return {x * s, fma(x * s, T{1} - s, s)};
  } else if constexpr (kAct == Activation::gelu) {
    constexpr auto kInvSqrt2 = static_cast<T>(0.70710678118654752440);
    constexpr auto kInvSqrt2Pi = static_cast<T>(0.39894228040143267794);
    const V below = T(0.5) * (T{1} + erf(x * kInvSqrt2));
    return {x * below, fma(x * kInvSqrt2Pi, exp(x * x * T(-0.5)), below)};
  } else {
    static_assert(kAct == Activation::gelu_tanh);
    constexpr auto kScale = static_cast<T>(0.79788456080286535588);  // sqrt(2 / pi)
    constexpr auto kCubic = static_cast<T>(0.044715);
    const V xx = x * x;
    const V t = tanh(kScale * x * fma(V(kCubic), xx, V(T{1})));
    const V below = T(0.5) * (T{1} + t);
    const V inner = kScale * fma(V(3 * kCubic), xx, V(T{1}));
    return {x * below, fma(T(0.5) * x * (T{1} - t * t), inner, below)};
  }
}

// f(row, first column, columns) for each item of the range.
template <class F>
OMNIATTN_INLINE void for_blocks(int64_t cols, int64_t begin, int64_t end, const F& f) {
  const int64_t blocks = (cols + kGluBlock - 1) / kGluBlock;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / blocks, first = (item - row * blocks) * kGluBlock;
    f(row, first, cols - first < kGluBlock ? cols - first : kGluBlock);
  }
}

template <class T, Activation kAct>
void glu(const GluParams& p, int64_t begin, int64_t end) {
  for_blocks(p.cols, begin, end, [&](int64_t row, int64_t first, int64_t n) {
    const T* const gate = static_cast<const T*>(p.gate) + row * p.gate_row + first;
    const T* const up = static_cast<const T*>(p.up) + row * p.up_row + first;
    T* const y = static_cast<T*>(p.y) + row * p.y_row + first;
    for_row<T, Order::any>(n, [&](int64_t i, auto part) {
      const auto act =
          lanewise([](auto x) { return activate<kAct>(x).value; }, part.load(gate + i));
      part.store(y + i, act * part.load(up + i));
    });
  });
}

template <class T, Activation kAct>
void glu_backward(const GluBackwardParams& p, int64_t begin, int64_t end) {
  for_blocks(p.cols, begin, end, [&](int64_t row, int64_t first, int64_t n) {
    const T* const grad_y = static_cast<const T*>(p.grad_y) + row * p.grad_y_row + first;
    const T* const gate = static_cast<const T*>(p.gate) + row * p.gate_row + first;
    const T* const up = static_cast<const T*>(p.up) + row * p.up_row + first;
    T* const dgate = static_cast<T*>(p.dgate) + row * p.dgate_row + first;
    T* const dup = static_cast<T*>(p.dup) + row * p.dup_row + first;
    for_row<T, Order::any>(n, [&](int64_t i, auto part) {
      const auto g = part.load(grad_y + i), x = part.load(gate + i);
      const auto value = lanewise([](auto v) { return activate<kAct>(v).value; }, x);
      const auto slope = lanewise([](auto v) { return activate<kAct>(v).slope; }, x);
      part.store(dgate + i, g * part.load(up + i) * slope);
      part.store(dup + i, g * value);
    });
  });
}

// f.template operator()<T, act>() for the run-time dtype and activation.
template <class F>
OMNIATTN_INLINE void dispatch_activation(DType dtype, Activation act, const F& f) {
  dispatch(dtype, [&]<class T>(T) {
    switch (act) {
      case Activation::identity:
        return f.template operator()<T, Activation::identity>();
      case Activation::relu:
        return f.template operator()<T, Activation::relu>();
      case Activation::silu:
        return f.template operator()<T, Activation::silu>();
      case Activation::gelu:
        return f.template operator()<T, Activation::gelu>();
      case Activation::gelu_tanh:
        return f.template operator()<T, Activation::gelu_tanh>();
    }
  });
}

void glu_any(const GluParams& p, int64_t begin, int64_t end) {
  dispatch_activation(p.dtype, p.act,
                      [&]<class T, Activation kAct> { glu<T, kAct>(p, begin, end); });
}
void glu_backward_any(const GluBackwardParams& p, int64_t begin, int64_t end) {
  dispatch_activation(p.dtype, p.act,
                      [&]<class T, Activation kAct> { glu_backward<T, kAct>(p, begin, end); });
}

}  // namespace

extern const ActivationKernels activation_kernels_table;
const ActivationKernels activation_kernels_table{glu_any, glu_backward_any};

}  // namespace omniattn::OMNIATTN_ISA
