// Sums of poles in conjugate pairs, the generating functions of S4, forward and backward:
//
//   y_l = sum_n v_n / (z_l - w_n) + conj(v_n) / (z_l - conj(w_n))
//
// With r = 1 / (z - w) and s = 1 / (z - conj(w)) at each l and n, and the gradient g of y,
//
//   dv_n = sum_l conj(conj(g) r) + conj(g) s
//   dw_n = conj(v_n) sum_l conj(conj(g) r^2) + conj(g) s^2
//
// Complex numbers are pairs of (real, imaginary).
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"
#include "runtime/stream.h"
#include "semantics/macros.h"

namespace omniattn {

// All tensors are contiguous and of dtype, f32 or f64.
struct Cauchy {
  DType dtype;
  int64_t rows, terms, length;  // H, N, L
  const void *v, *w;            // (H, N, 2)
  const void* z;                // (L, 2)
};

struct CauchyParams {
  Cauchy sums;
  void* y;  // (H, L, 2)
};

struct CauchyBackwardParams {
  Cauchy sums;
  const void* grad_y;  // (H, L, 2)
  void *dv, *dw;       // (H, N, 2)
};
static_assert(std::is_trivially_copyable_v<CauchyParams>);
static_assert(std::is_trivially_copyable_v<CauchyBackwardParams>);

struct CauchyKernels {
  // An item is a row. `memory` has bytes(sums).
  int64_t (*bytes)(const Cauchy&);
  void (*forward)(const CauchyParams&, void* memory, int64_t begin, int64_t end);
  void (*backward)(const CauchyBackwardParams&, void* memory, int64_t begin, int64_t end);
};
OMNIATTN_KERNEL_TABLE(CauchyKernels, cauchy_kernels)

Status launch_cauchy(const CauchyParams& p, Stream stream);
Status launch_cauchy_backward(const CauchyBackwardParams& p, Stream stream);

namespace {
namespace cauchy_rules {

template <class V>
struct Complex {
  V re, im;
};

// Half of the sum of a term's two fractions, as one: v (z - conj(w)) + conj(v) (z - w) is 2 (Re v
// (Re z - Re w) - Im v Im w) + 2 i Re v Im z.
template <class V>
OMNIATTN_FN Complex<V> half_of_pair(Complex<V> z, V vr, V vi, V wr, V wi) {
  const V d = z.re - wr;
  const V over_re = vr * d - vi * wi, over_im = vr * z.im;
  const V re = d * d - (z.im - wi) * (z.im + wi), half_im = d * z.im, im = half_im + half_im;
  const V inverse = V(1) / (re * re + im * im);
  return {(over_re * re + over_im * im) * inverse, (over_im * re - over_re * im) * inverse};
}

// Contributions of one l to dv, and to dw / conj(v).
template <class V>
struct CauchyGradient {
  Complex<V> v, w;
};
template <class V>
OMNIATTN_FN CauchyGradient<V> cauchy_back(Complex<V> z, Complex<V> g, V wr, V wi) {
  const V d = z.re - wr, below = z.im - wi, above = z.im + wi;
  const V size_r = d * d + below * below, size_s = d * d + above * above;
  const V both = V(1) / (size_r * size_s);
  const V to_r = both * size_s, to_s = both * size_r;
  const V rr = d * to_r, ri = -(below * to_r), sr = d * to_s, si = -(above * to_s);
  const Complex<V> a{g.re * rr + g.im * ri, g.re * ri - g.im * rr};  // conj(g) r
  const Complex<V> b{g.re * sr + g.im * si, g.re * si - g.im * sr};  // conj(g) s
  return {{a.re + b.re, b.im - a.im},
          {(a.re * rr - a.im * ri) + (b.re * sr - b.im * si),
           (b.re * si + b.im * sr) - (a.re * ri + a.im * rr)}};
}

}  // namespace cauchy_rules
}  // namespace

}  // namespace omniattn
