// Trigonometric functions of vec.h, for the few kernels that need them.
#pragma once

#include "runtime/vec.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Sine and cosine of x + low, with |low| far below |x|, within an absolute error of 2^-23, and
// within 1.5 ULP in [-pi / 4, pi / 4]. The nearest multiple of pi / 2 is subtracted from x in three
// parts, two of which have so few bits that this is exact even where fma rounds twice.
template <class T>
struct SinCos {
  Vec<T> sin, cos;
};
template <class T>  // an out-of-line call: rare
[[gnu::noinline]] SinCos<T> sincos_lanes(Vec<T> x, Vec<T> low) {
  T angles[x.kWidth], rests[x.kWidth], sines[x.kWidth], cosines[x.kWidth];
  store(angles, x);
  store(rests, low);
  for (int i = 0; i < x.kWidth; ++i) {
    const double angle = static_cast<double>(angles[i]) + static_cast<double>(rests[i]);
    sines[i] = static_cast<T>(__builtin_sin(angle));
    cosines[i] = static_cast<T>(__builtin_cos(angle));
  }
  return {load(sines), load(cosines)};
}
OMNIATTN_INLINE SinCos<float> sincos(VecF x, VecF low = VecF(0.0f)) {
  if (any(abs(x) > VecF(8192.0f))) [[unlikely]]
    return sincos_lanes(x, low);
  const VecF n = round(x * 6.366197724e-01f);
  VecF r = fma(n, VecF(-0x1.92p0f), x);
  r = fma(n, VecF(-0x1.fb4p-12f), r);
  r = fma(n, VecF(-0x1.4442d2p-24f), r) + low;
  const VecF u = r * r;
  const VecF sine =
      fma(r * u, horner(u, -1.666665524e-01f, 8.332176134e-03f, -1.951702434e-04f), r);
  const VecF cosine = fma(u * u, horner(u, 4.166664556e-02f, -1.388736535e-03f, 2.443814265e-05f),
                          fma(u, VecF(-0.5f), VecF(1.0f)));
  const VecF::Bits quarter = __builtin_convertvector(n.v, VecF::Bits), odd = -(quarter & 1);
  const VecF::Bits s = (cosine.bits() & odd) | (sine.bits() & ~odd);
  const VecF::Bits c = (sine.bits() & odd) | (cosine.bits() & ~odd);
  return {VecF::from_bits(s ^ ((quarter & 2) << 30)),
          VecF::from_bits(c ^ (((quarter + 1) & 2) << 30))};
}
OMNIATTN_INLINE SinCos<double> sincos(VecD x, VecD low = VecD(0.0)) { return sincos_lanes(x, low); }

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
