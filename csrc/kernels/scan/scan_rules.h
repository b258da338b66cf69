// Arithmetic of one step of the scans, written once for vectors of the CPU and for CUDA.
#pragma once

#if defined(OMNIATTN_ISA)
#include "runtime/vec.h"
#else
#include "runtime/gpu.h"
#endif
#include "semantics/macros.h"
#include "semantics/value_and_slope.h"

#if defined(OMNIATTN_ISA)
namespace omniattn::OMNIATTN_ISA {
namespace {

// ln(1 + x) of x in [0, 1] within 2 ULP: 2 atanh(x / (2 + x)), at half the cost of a logarithm.
OMNIATTN_INLINE VecF log1p_of_unit(VecF x) {
  const VecF s = x * reciprocal(x + 2.0f), twice = s + s, square = s * s;
  const VecF p =
      horner(square, 3.333320808e-01f, 2.001076400e-01f, 1.400090200e-01f, 1.400599700e-01f);
  return fma(twice * square, p, twice);
}
OMNIATTN_INLINE VecD log1p_of_unit(VecD x) {
  return map_lanes(x, [](double lane) { return __builtin_log1p(lane); });
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
#endif

namespace omniattn::scan_rules {

#if !defined(OMNIATTN_ISA)
template <class C>
OMNIATTN_FN C select(bool condition, C a, C b) {
  return condition ? a : b;
}
template <class C>
OMNIATTN_FN C reciprocal(C x) {
  return C(1) / x;
}
template <class C>
OMNIATTN_FN C log1p_of_unit(C x) {
  const C sum = C(1) + x;
  return fma(x - (sum - C(1)), C(1) / sum, log(sum));  // restores the digits that sum lost
}
#endif

// e^(x - max(x, 0)) and e^(0 - max(x, 0)): one of them is 1.
template <class V>
struct Weights {
  V past, now;
};
template <class V>
OMNIATTN_FN Weights<V> weights(V x) {
  const V e = exp(-abs(x));
  const auto past_is_larger = x > V(0);
  return {select(past_is_larger, V(1), e), select(past_is_larger, e, V(1))};
}

// Numerator and denominator of a weighted mean, times e^-(top - age w). The maximum is kept as the
// key that set it and the number of steps since: subtracting w at each step would be rounded away
// at large keys, for example near 1e4, where fp32 numbers are multiples of 0.001.
template <class V>
struct WkvState {
  V num, den, top, age;
};
// The maximum minus k; w may be infinite.
template <class V>
OMNIATTN_FN V wkv_past(const WkvState<V>& s, V w, V k) {
  const V top = s.top - k;
  return select(s.age == V(0), top, fma(-s.age, w, top));
}
template <class V>
OMNIATTN_FN V wkv_read(const WkvState<V>& s, V past, V u, V v) {
  const Weights<V> e = weights(past - u);
  return fma(e.now, v, e.past * s.num) / fma(e.past, s.den, e.now);
}
template <class V>
OMNIATTN_FN void wkv_advance(WkvState<V>& s, V past, V w, V k, V v) {
  const V x = past - w;
  const Weights<V> e = weights(x);
  s.num = fma(e.now, v, e.past * s.num);
  s.den = fma(e.past, s.den, e.now);
  const auto stays = x > V(0);
  s.top = select(stays, s.top, k);
  s.age = select(stays, s.age + V(1), V(0));
}

// Gradients of a state. Results depend on num e^top and den e^top only, so the gradient of top is
// num dnum + den dden, unless the caller also uses the state itself. `excess` is the remainder of
// the gradient of top, which goes to the key that set it.
template <class V>
struct WkvGradient {
  V num, den, excess;
};
template <class V>
struct WkvStepGradient {
  V dk, dv, du, dw;
};
// Takes the state before a step and the gradient of the state after it, which it turns into
// the gradient of the state before.
template <class V>
OMNIATTN_FN WkvStepGradient<V> wkv_back(V num, V den, V past, V w, V u, V v, V dy,
                                        WkvGradient<V>& g) {
  const Weights<V> read = weights(past - u);
  const V scale = V(1) / fma(read.past, den, read.now);
  const V y = fma(read.now, v, read.past * num) * scale;
  const V dnum = dy * scale, of_past = read.past * dnum, of_now = read.now * dnum;
  const V du = of_now * (v - y);

  const V x = past - w;
  const Weights<V> e = weights(x);
  const auto stays = x > V(0);
  const V top = select(stays, g.excess, V(0));
  const WkvStepGradient<V> d{
      .dk = fma(e.now, fma(g.num, v, g.den), du) + (g.excess - top),
      .dv = fma(e.now, g.num, of_now),
      .du = du,
      .dw = -fma(e.past, fma(g.num, num, g.den * den), top),
  };
  g.num = fma(e.past, g.num, of_past);
  g.den = fma(e.past, g.den, -of_past * y);
  g.excess = top;
  return d;
}

// State of the gates of gates.h. The maximum is kept as the i that set it and the sum of g since,
// which preserves the digits of small decays at large gates.
template <class V>
struct GatesState {
  V top, sum;
};
template <class V>
struct Gated {
  V decay, factor;
};
template <class V>
OMNIATTN_FN Gated<V> gates_step(GatesState<V>& s, V g, V i) {
  const V lead = (s.top - i) + (s.sum + g);  // (g + m of the step before) - i
  const auto stays = lead > V(0);
  s.top = select(stays, s.top, i);
  s.sum = select(stays, s.sum + g, V(0));
  return {select(stays, V(0), lead), select(stays, exp(-lead), V(1))};
}
// Gradients of g (also the gradient of the previous m) and of i; dm includes later steps.
template <class V>
struct GatesGradient {
  V dg, di;
};
template <class V>
OMNIATTN_FN GatesGradient<V> gates_back(V decay, V factor, V ddecay, V dfactor, V dm) {
  const V of_factor = dfactor * factor, most = dm - ddecay - of_factor;
  const V kept = select(decay < V(0), V(0), select(factor < V(1), V(1), V(0.5)));
  return {fma(most, kept, ddecay), fma(most, V(1) - kept, of_factor)};
}

// softplus(x) = log(1 + e^x), or x itself above 20 as in torch, and its derivative.
template <class V>
OMNIATTN_FN ValueAndSlope<V> softplus(V x) {
  const V e = exp(-abs(x)), part = reciprocal(V(1) + e);
  const auto is_positive = x > V(0), is_linear = x > V(20);
  return {select(is_linear, x, select(is_positive, x, V(0)) + log1p_of_unit(e)),
          select(is_linear, V(1), select(is_positive, V(1), e) * part)};
}

// 1 / (1 + square + e^-x), Longhorn's step size for x and |B|^2, and its derivative by x; by the
// square it is minus the value squared. Below -80 the size vanishes in sums, and e^-x is limited.
template <class V>
OMNIATTN_FN ValueAndSlope<V> longhorn_step(V x, V square) {
  const V e = exp(-select(x < V(-80), V(-80), x)), size = V(1) / (V(1) + square + e);
  return {size, size * (e * size)};
}

// silu(z) = z sigmoid(z) and its derivative.
template <class V>
OMNIATTN_FN ValueAndSlope<V> silu(V z) {
  const V e = exp(-abs(z));
  const V share = select(z > V(0), V(1), e) * reciprocal(V(1) + e), value = z * share;
  return {value, fma(value, V(1) - share, share)};
}

// sLSTM, see slstm.h. A state with n = 0 is empty: none of it is kept.
template <class V>
struct SlstmState {
  V h, c, n, m;
};
// Gates after their activations, and the derivative of the logarithm of the forget gate.
template <class V>
struct SlstmGates {
  V input, forget, z, o, slope;
};
template <class V>
OMNIATTN_FN SlstmGates<V> slstm_step(SlstmState<V>& s, V i, V f, V z, V o, bool exp_forget) {
  SlstmGates<V> y;
  V log_forget = f;
  y.slope = V(1);
  if (!exp_forget) {
    const V e = exp(-abs(f)), sum = V(1) + e;
    const auto positive = f > V(0);
    log_forget = select(positive, V(0), f) - log(sum);
    y.slope = select(positive, e, V(1)) / sum;
  }
  const V kept = log_forget + s.m;
  const auto is_empty = s.n == V(0);
  s.m = select(is_empty, i, select(i > kept, i, kept));
  y.input = exp(i - s.m);
  y.forget = select(is_empty, V(0), exp(kept - s.m));
  y.z = tanh(z);
  y.o = V(1) / (V(1) + exp(-o));
  s.c = fma(y.forget, s.c, y.input * y.z);
  s.n = fma(y.forget, s.n, y.input);
  s.h = y.o * (s.c / s.n);
  return y;
}

// Gradients of c and n, and the excess of m's gradient over c dc + n dn, as in WkvGradient.
template <class V>
struct SlstmGradient {
  V c, n, excess;
};
template <class V>
struct SlstmStepGradient {
  V i, f, z, o;
};
// Takes a step's gates, c and n, the c and n before it, and the gradients of its h and of its
// state, which it turns into the gradients of the state before.
template <class V>
OMNIATTN_FN SlstmStepGradient<V> slstm_back(const SlstmGates<V>& y, V c, V n, V c_before,
                                            V n_before, V dh, SlstmGradient<V>& g) {
  const V scale = V(1) / n, mean = c * scale, of_mean = dh * y.o * scale;
  const V dc = g.c + of_mean, dn = g.n - of_mean * mean;
  const V kept = select(y.forget == V(1), g.excess, V(0));
  const SlstmStepGradient<V> d{
      .i = fma(y.input, fma(dc, y.z, dn), g.excess - kept),
      // f gets no gradient from an empty state, and no NaN either.
      .f = select(y.forget == V(0), V(0), fma(y.forget, fma(dc, c_before, dn * n_before), kept)) *
           y.slope,
      .z = dc * y.input * (V(1) - y.z * y.z),
      .o = dh * mean * y.o * (V(1) - y.o),
  };
  g = {y.forget * dc, y.forget * dn, kept};
  return d;
}

}  // namespace omniattn::scan_rules
