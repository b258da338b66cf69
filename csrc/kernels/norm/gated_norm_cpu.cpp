// Gated and grouped normalisation, see gated_norm.h.
#include "kernels/norm/gated_norm.h"

#include <algorithm>

#include "kernels/norm/rounded.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "runtime/row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

constexpr Order kAny = Order::any;

// sigmoid(z) u with u = z for SiLU and u = 1 for the sigmoid, and its slope. u is selected at run
// time: a template argument would double the code of the largest file in this folder.
template <class C>
struct Gate {
  Mask<C> silu;

  explicit Gate(Activation act)
      : silu(lanes_below<C>(act == Activation::silu ? Vec<C>::kWidth : 0)) {}

  template <class V>
  OMNIATTN_INLINE ValueAndSlope<V> operator()(V z) const {
    return with_sigmoid(z, sigmoid_of(z));
  }
  template <class V>
  OMNIATTN_INLINE V sigmoid_of(V z) const {
    return lanewise([](Vec<C> x) { return sigmoid(x); }, z);
  }
  template <class V>
  OMNIATTN_INLINE ValueAndSlope<V> with_sigmoid(V z, V s) const {
    const Vec<C> one = C(1);
    const V u = lanewise([&](Vec<C> x) { return select(silu, x, one); }, z);
    const V du = lanewise([&](Vec<C>) { return select(silu, one, zero<C>()); }, z);
    return {s * u, s * fma(u, C(1) - s, du)};
  }
};

// The values of one group before normalisation.
template <class T, GatePlace kPlace>
struct Normalised {
  const T *x, *z;
  Gate<compute_t<T>> gate;

  OMNIATTN_INLINE auto load(int64_t i, auto part) const {
    if constexpr (kPlace == GatePlace::before) {
      return part.load(x + i) * gate(part.load(z + i)).value;
    } else {
      return part.load(x + i);
    }
  }
};

// The weight, or 1 if there is none.
template <class T>
OMNIATTN_INLINE auto weight_at(const T* weight, int64_t i, auto part) {
  using V = decltype(part.load(weight));
  return weight != nullptr ? part.load(weight + i) : V(compute_t<T>(1));
}

template <class T, GatePlace kPlace>
OMNIATTN_INLINE void forward_group(const GatedNormParams& p, int64_t row, int64_t group) {
  using C = compute_t<T>;
  const int64_t n = p.cols, first = group * n;
  const auto inverse_n = C(1) / static_cast<C>(n > 0 ? n : 1);
  const Gate<C> gate(p.act);
  const T* const z = static_cast<const T*>(p.z) + row * p.z_stride + first;
  const Normalised<T, kPlace> v{static_cast<const T*>(p.x) + row * p.x_stride + first, z, gate};
  const T* const weight = p.weight ? static_cast<const T*>(p.weight) + first : nullptr;
  const T* const bias = p.bias ? static_cast<const T*>(p.bias) + first : nullptr;
  T* const y = static_cast<T*>(p.y) + (row * p.groups + group) * n;

  C mean = 0;
  if (p.center) {
    mean = inverse_n * row_sum<T, kAny>(n, [&](int64_t i, auto part) { return v.load(i, part); });
  }
  const C variance = inverse_n * row_sum<T, kAny>(n, [&](int64_t i, auto part) {
                       const auto d = v.load(i, part) - mean;
                       return d * d;
                     });
  const C rstd = C(1) / sqrt(Vec<C>(variance + static_cast<C>(p.eps))).v[0];
  for_row<T, kAny>(n, [&](int64_t i, auto part) {
    auto out = (v.load(i, part) - mean) * rstd;
    if (p.cast_first) out = rounded_in(y, i, part, out);
    out = out * weight_at(weight, i, part);
    if (bias != nullptr) out += part.load(bias + i);
    if constexpr (kPlace == GatePlace::after) {
      if (p.cast_first) out = rounded_in(y, i, part, out);
      out = out * gate(part.load(z + i)).value;
    }
    part.store(y + i, out);
  });
  if (p.stats != nullptr) {
    C* const stats = static_cast<C*>(p.stats) + (row * p.groups + group) * 2;
    stats[0] = mean;
    stats[1] = rstd;
  }
}

// With xh = (v - mean) rstd, g = grad_y (times act(z) if the gate comes after) and m = g weight:
//   dv = rstd (m - avg(m) [if centred] - xh avg(m xh))
//   dweight += g xh, dbias += g
//   before:  dx = dv act(z), dz = dv x act'(z)
//   after:   dx = dv,        dz = grad_y (xh weight + bias) act'(z)
template <class T, GatePlace kPlace>
OMNIATTN_INLINE void backward_group(const GatedNormBackwardParams& p, compute_t<T>* dweight,
                                    compute_t<T>* dbias, int64_t row, int64_t group) {
  using C = compute_t<T>;
  const int64_t n = p.cols, first = group * n;
  const auto inverse_n = C(1) / static_cast<C>(n > 0 ? n : 1);
  const T* const gy = static_cast<const T*>(p.grad_y) + row * p.grad_y_stride + first;
  const T* const x = static_cast<const T*>(p.x) + row * p.x_stride + first;
  const T* const z = static_cast<const T*>(p.z) + row * p.z_stride + first;
  const Gate<C> gate(p.act);
  const Normalised<T, kPlace> v{x, z, gate};
  const T* const weight = p.weight ? static_cast<const T*>(p.weight) + first : nullptr;
  const T* const bias = p.bias ? static_cast<const T*>(p.bias) + first : nullptr;
  T* const dx = static_cast<T*>(p.dx) + (row * p.groups + group) * n;
  T* const dz = static_cast<T*>(p.dz) + (row * p.groups + group) * n;
  const C* const stats = static_cast<const C*>(p.stats) + (row * p.groups + group) * 2;
  const C mean = stats[0], rstd = stats[1];
  C* const dw = dweight ? dweight + first : nullptr;
  C* const db = dbias ? dbias + first : nullptr;

  // Gate of element i, if there is a gate, and its slope. For 16-bit rows the first sweep keeps
  // up to kKept sigmoids for the second: a bf16 backward with the gate after the norm took 0.78
  // of the time; fp32 gains nothing.
  constexpr int64_t kKept = sizeof(T) == 2 ? 4096 : 0;
  alignas(64) C kept[std::max<int64_t>(kKept, 1)];
  const auto gate_at = [&](int64_t i, auto part, bool first_sweep) {
    using V = decltype(part.load(z + i));
    if constexpr (kPlace == GatePlace::none) return ValueAndSlope<V>{V(C(1)), V(C(0))};
    const V zi = part.load(z + i);
    if (i >= kKept) return gate(zi);
    if (first_sweep) part.store_sums(kept + i, gate.sigmoid_of(zi));
    return gate.with_sigmoid(zi, part.load_sums(kept + i));
  };
  const auto upstream = [&](int64_t i, auto part, const auto& act) {
    return kPlace == GatePlace::after ? part.load(gy + i) * act.value : part.load(gy + i);
  };
  RowSum<C> m_d, m_sum;
  for_row_by_four<T, kAny>(n, [&](int64_t i, auto part, int k) {
    const auto m = upstream(i, part, gate_at(i, part, true)) * weight_at(weight, i, part);
    m_d.add(k, part.zero_beyond(m * (v.load(i, part) - mean)));
    m_sum.add(k, part.zero_beyond(m));
  });
  const C slope = m_d.total() * inverse_n * rstd * rstd;
  const C shift = p.center ? m_sum.total() * inverse_n : C(0);

  for_row<T, kAny>(n, [&](int64_t i, auto part) {
    const auto act = gate_at(i, part, false);
    const auto g = upstream(i, part, act), w = weight_at(weight, i, part);
    const auto d = v.load(i, part) - mean;
    const auto dv = (g * w - shift - d * slope) * rstd;
    if constexpr (kPlace == GatePlace::before) {
      part.store(dz + i, dv * part.load(x + i) * act.slope);
      part.store(dx + i, dv * act.value);
    } else {
      if constexpr (kPlace == GatePlace::after) {
        auto normed = d * rstd * w;
        if (bias != nullptr) normed += part.load(bias + i);
        part.store(dz + i, part.load(gy + i) * normed * act.slope);
      }
      part.store(dx + i, dv);
    }
    if (dw != nullptr) part.store_sums(dw + i, part.load_sums(dw + i) + g * (d * rstd));
    if (db != nullptr) part.store_sums(db + i, part.load_sums(db + i) + g);
  });
}

// Calls f.template operator()<T, place>().
template <class P, class F>
void dispatch_place(const P& p, const F& f) {
  dispatch(p.dtype, [&]<class T>(T) {
    switch (p.place) {
      case GatePlace::none:
        return f.template operator()<T, GatePlace::none>();
      case GatePlace::before:
        return f.template operator()<T, GatePlace::before>();
      case GatePlace::after:
        return f.template operator()<T, GatePlace::after>();
    }
    OMNIATTN_FAIL("the place of a gate is unknown");
  });
}

void forward_any(const GatedNormParams& p, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, p.rows);
  OMNIATTN_ASSERT_ROWS(p.x, p.x_stride, p.rows, p.groups * p.cols);
  dispatch_place(p, [&]<class T, GatePlace kPlace> {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t g = 0; g < p.groups; ++g) forward_group<T, kPlace>(p, row, g);
    }
  });
}
void backward_any(const GatedNormBackwardParams& p, void* dweight, void* dbias, int64_t begin,
                  int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, p.rows);
  OMNIATTN_ASSERT_ROWS(p.grad_y, p.grad_y_stride, p.rows, p.groups * p.cols);
  OMNIATTN_ASSERT_ROWS(p.x, p.x_stride, p.rows, p.groups * p.cols);
  OMNIATTN_ASSERT_HAS(p.stats, p.rows);
  dispatch_place(p, [&]<class T, GatePlace kPlace> {
    auto* const dw = static_cast<compute_t<T>*>(dweight);
    auto* const db = static_cast<compute_t<T>*>(dbias);
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t g = 0; g < p.groups; ++g) backward_group<T, kPlace>(p, dw, db, row, g);
    }
  });
}

}  // namespace

extern const GatedNormKernels gated_norm_kernels_table;
const GatedNormKernels gated_norm_kernels_table{forward_any, backward_any};

}  // namespace omniattn::OMNIATTN_ISA
