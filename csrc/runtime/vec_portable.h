// vec.h in the compiler's vector extensions, for any machine.
#pragma once

#include "runtime/vec_lanes.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class T, class F>
OMNIATTN_INLINE Vec<T> map_lanes_unrolled(F f) {
  Vec<T> r;
#pragma GCC unroll 16
  for (int i = 0; i < Vec<T>::kWidth; ++i) r.v[i] = f(i);
  return r;
}

#if defined(__FP_FAST_FMAF)
OMNIATTN_INLINE VecF fma(VecF a, VecF b, VecF c) {
  return map_lanes_unrolled<float>([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
OMNIATTN_INLINE VecD fma(VecD a, VecD b, VecD c) {
  return map_lanes_unrolled<double>([&](int i) { return __builtin_fma(a.v[i], b.v[i], c.v[i]); });
}
#else  // two roundings where the machine has no fused instruction
OMNIATTN_INLINE VecF fma(VecF a, VecF b, VecF c) { return a * b + c; }
OMNIATTN_INLINE VecD fma(VecD a, VecD b, VecD c) { return a * b + c; }
#endif
OMNIATTN_INLINE VecF max(VecF a, VecF b) { return select(a > b, a, b); }
OMNIATTN_INLINE VecD max(VecD a, VecD b) { return select(a > b, a, b); }
OMNIATTN_INLINE VecF min(VecF a, VecF b) { return select(a < b, a, b); }
OMNIATTN_INLINE VecD min(VecD a, VecD b) { return select(a < b, a, b); }
OMNIATTN_INLINE VecF sqrt(VecF a) {
  return map_lanes_unrolled<float>([&](int i) { return __builtin_sqrtf(a.v[i]); });
}
OMNIATTN_INLINE VecD sqrt(VecD a) {
  return map_lanes_unrolled<double>([&](int i) { return __builtin_sqrt(a.v[i]); });
}
// Adding and subtracting 1.5 * 2^mantissa gives the nearest integer; larger numbers are integers.
OMNIATTN_INLINE VecF round(VecF a) {
  const VecF magic = 0x1.8p23f;
  return select(abs(a) < VecF(0x1p22f), copysign((a + magic) - magic, a), a);
}
OMNIATTN_INLINE VecD round(VecD a) {
  const VecD magic = 0x1.8p52;
  return select(abs(a) < VecD(0x1p51), copysign((a + magic) - magic, a), a);
}
OMNIATTN_INLINE VecF floor(VecF a) {
  const VecF r = round(a);
  return select(r > a, r - 1.0f, r);
}
OMNIATTN_INLINE VecD floor(VecD a) {
  const VecD r = round(a);
  return select(r > a, r - 1.0, r);
}

// Conversions of 16-bit types are calls: they take dozens of instructions per lane, and inlining
// them into every kernel doubled the time of a build.
template <class S>
[[gnu::noinline]] Vec<compute_t<S>> load_widened(const S* p) {
  return map_lanes_unrolled<compute_t<S>>([&](int i) { return widen(p[i]); });
}
template <class S>
[[gnu::noinline]] void store_narrowed(S* p, Vec<compute_t<S>> x) {
#pragma GCC unroll 16
  for (int i = 0; i < x.kWidth; ++i) p[i] = narrow<S>(x.v[i]);
}
template <class S>
OMNIATTN_INLINE Vec<compute_t<S>> load(const S* p) {
  if constexpr (sizeof(S) == sizeof(compute_t<S>)) {
    Vec<S> x;
    __builtin_memcpy(&x.v, p, sizeof(x.v));
    return x;
  } else {
    return load_widened(p);
  }
}
template <class S>
OMNIATTN_INLINE void store(S* p, Vec<compute_t<S>> x) {
  if constexpr (sizeof(S) == sizeof(compute_t<S>)) {
    __builtin_memcpy(p, &x.v, sizeof(x.v));
  } else {
    store_narrowed(p, x);
  }
}
template <class S>
OMNIATTN_INLINE void stream(S* p, Vec<compute_t<S>> x) {
  store(p, x);
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
