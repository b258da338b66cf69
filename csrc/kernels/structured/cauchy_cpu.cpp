// Sums of poles on the CPU, see cauchy.h: one vector of z at a time, term by term.
#include "kernels/structured/cauchy.h"

#include "runtime/assert.h"
#include "runtime/denormals.h"
#include "runtime/dispatch.h"
#include "runtime/row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

using cauchy_rules::Complex;

// Pairs i, i + 1, ... of a tensor.
template <class C>
OMNIATTN_INLINE Complex<Vec<C>> load_pairs(const C* from, int64_t i, auto part) {
  const auto second = part.template second_of_pairs<C>();
  const auto [re, im] = deinterleave(part.first_of_pairs().load(from + 2 * i),
                                     second.load(from + 2 * i + Vec<C>::kWidth));
  return {re, im};
}
template <class C>
OMNIATTN_INLINE void store_pairs(C* to, int64_t i, auto part, const Complex<Vec<C>>& x) {
  const auto [first, second] = interleave(x.re, x.im);
  part.first_of_pairs().store(to + 2 * i, first);
  part.template second_of_pairs<C>().store(to + 2 * i + Vec<C>::kWidth, second);
}

template <class C>
void forward_row(const CauchyParams& params, int64_t h) {
  const Cauchy& p = params.sums;
  const C *const v = static_cast<const C*>(p.v) + h * 2 * p.terms, *const w =
                                                                       static_cast<const C*>(p.w) +
                                                                       h * 2 * p.terms;
  C* const y = static_cast<C*>(params.y) + h * 2 * p.length;
  for_row<C>(p.length, [&](int64_t l, auto part) {
    using V = Vec<C>;
    const Complex<V> z = load_pairs(static_cast<const C*>(p.z), l, part);
    Complex<V> sum{C(0), C(0)};
    for (int64_t n = 0; n < 2 * p.terms; n += 2) {
      const auto term = cauchy_rules::half_of_pair<V>(z, v[n], v[n + 1], w[n], w[n + 1]);
      sum.re += term.re;
      sum.im += term.im;
    }
    store_pairs<C>(y, l, part, {sum.re + sum.re, sum.im + sum.im});
  });
}

template <class C>
void backward_row(const CauchyBackwardParams& params, C* sums, int64_t h) {
  using V = Vec<C>;
  constexpr int64_t kSums = 4 * V::kWidth;
  const Cauchy& p = params.sums;
  const C *const v = static_cast<const C*>(p.v) + h * 2 * p.terms, *const w =
                                                                       static_cast<const C*>(p.w) +
                                                                       h * 2 * p.terms;
  const C* const g = static_cast<const C*>(params.grad_y) + h * 2 * p.length;
  for (int64_t i = 0; i < p.terms * kSums; ++i) sums[i] = 0;
  for_row<C>(p.length, [&](int64_t l, auto part) {
    const Complex<V> z = load_pairs(static_cast<const C*>(p.z), l, part);
    const Complex<V> gradient = load_pairs(g, l, part);
    for (int64_t n = 0; n < p.terms; ++n) {
      const auto d = cauchy_rules::cauchy_back<V>(z, gradient, w[2 * n], w[2 * n + 1]);
      C* to = sums + n * kSums;
      for (const V x : {d.v.re, d.v.im, d.w.re, d.w.im}) {
        store(to, load(to) + part.zero_beyond(x));
        to += V::kWidth;
      }
    }
  });
  C *const dv = static_cast<C*>(params.dv) + h * 2 * p.terms, *const dw =
                                                                  static_cast<C*>(params.dw) +
                                                                  h * 2 * p.terms;
  for (int64_t n = 0; n < p.terms; ++n) {
    const auto total = [&](int i) { return reduce_add(load(sums + n * kSums + i * V::kWidth)); };
    const C vr = v[2 * n], vi = v[2 * n + 1], re = total(2), im = total(3);
    dv[2 * n] = total(0);
    dv[2 * n + 1] = total(1);
    dw[2 * n] = vr * re + vi * im;
    dw[2 * n + 1] = vr * im - vi * re;
  }
}

int64_t bytes(const Cauchy& p) { return 4 * kVecBytes * p.terms; }

void forward(const CauchyParams& p, void*, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, p.sums.rows);
  const FlushDenormals flush;
  dispatch_compute(p.sums.dtype, [&]<class C>(C) {
    for (int64_t h = begin; h < end; ++h) forward_row<C>(p, h);
  });
}
void backward(const CauchyBackwardParams& p, void* memory, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, p.sums.rows);
  OMNIATTN_ASSERT_HAS(memory, bytes(p.sums));
  const FlushDenormals flush;
  dispatch_compute(p.sums.dtype, [&]<class C>(C) {
    for (int64_t h = begin; h < end; ++h) backward_row(p, static_cast<C*>(memory), h);
  });
}

}  // namespace

extern const CauchyKernels cauchy_kernels_table;
const CauchyKernels cauchy_kernels_table{bytes, forward, backward};

}  // namespace omniattn::OMNIATTN_ISA
