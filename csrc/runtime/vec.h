// SIMD vectors of float and double for the per-ISA kernel files. The instruction set is that of the
// including file, and everything is local to that file, so that objects built with different flags
// never share a function.
//
//   files      vec_core.h has the vectors; vec_avx512.h, vec_avx2.h and vec_portable.h have masks,
//              fma, max, min, sqrt, round, floor, load, store and stream, and their own versions of
//              scale2, scale2_to_normal, reciprocal, partial loads and stores, and reductions where
//              these are better;
//              vectors of 16-bit pairs come from vec_avx512.h, or from vec_pairs.h without AVX-512
//   storage    load(p) and store(p, v) take double, float, bf16 or f16 pointers and convert to and
//              from the compute type; narrowing rounds to nearest even and keeps NaN
//   partial    load_n(p, n), store_n(p, v, n) access the first n elements and nothing past them;
//              missing lanes read as 0; n <= 0 means none, n >= kWidth means all
//   NaN        max(a, b) and min(a, b) return b where either is NaN: pass the data second
#pragma once

#if defined(__AVX512F__)
#include "runtime/vec_avx512.h"
#elif defined(__AVX2__) && !defined(OMNIATTN_WIDE_VECTORS)
#include "runtime/vec_avx2.h"
#else
#include "runtime/vec_portable.h"
#endif
#if defined(OMNIATTN_WIDE_VECTORS)
#include "runtime/vec_pairs.h"
#endif

namespace omniattn::OMNIATTN_ISA {
namespace {

OMNIATTN_INLINE VecD reciprocal(VecD a) { return 1.0 / a; }

#if !defined(__AVX512F__)  // AVX-512 has instructions for these

OMNIATTN_INLINE VecF reciprocal(VecF a) { return 1.0f / a; }

// Multiplies in two steps, so that subnormal results and 2^128 need no out-of-range factor.
OMNIATTN_INLINE VecF scale2(VecF a, VecF n) {
  const VecF::Bits whole = __builtin_convertvector(n.v, VecF::Bits);
  const VecF::Bits half = whole >> 1;
  return a * VecF::from_bits((half + 127) << 23) * VecF::from_bits((whole - half + 127) << 23);
}

// Multiplies in one step, for normal results.
OMNIATTN_INLINE VecF scale2_to_normal(VecF a, VecF n) {
  return VecF::from_bits(a.bits() + (__builtin_convertvector(n.v, VecF::Bits) << 23));
}

// Accesses to the end of a row are out-of-line calls, which shortens builds.
template <class S>
[[gnu::noinline]] Vec<compute_t<S>> load_part(const S* p, int64_t n) {
  constexpr int kWidth = Vec<compute_t<S>>::kWidth;
  S lanes[kWidth] = {};
  for (int i = 0; i < kWidth && i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
template <class S>
[[gnu::noinline]] void store_part(S* p, Vec<compute_t<S>> x, int64_t n) {
  S lanes[x.kWidth];
  store(lanes, x);
  for (int i = 0; i < x.kWidth && i < n; ++i) p[i] = lanes[i];
}
template <class S>
OMNIATTN_INLINE Vec<compute_t<S>> load_n(const S* p, int64_t n) {
  return n >= Vec<compute_t<S>>::kWidth ? load(p) : load_part(p, n);
}
template <class S>
OMNIATTN_INLINE void store_n(S* p, Vec<compute_t<S>> x, int64_t n) {
  n >= x.kWidth ? store(p, x) : store_part(p, x, n);
}

template <class T>
OMNIATTN_INLINE Mask<T> load_mask_n(const uint8_t* p, int64_t n) {
  Mask<T> r = {};
  for (int i = 0; i < Vec<T>::kWidth && i < n; ++i) r.m[i] = p[i] != 0 ? -1 : 0;
  return r;
}

// Reduces in a fixed tree: folds the upper half of the lanes onto the lower one until one is left.
template <class T, class F>
OMNIATTN_INLINE T reduce(Vec<T> x, F combine) {
  T lanes[x.kWidth];
  store(lanes, x);
#pragma GCC unroll 4
  for (int half = x.kWidth / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) lanes[i] = combine(lanes[i], lanes[i + half]);
  }
  return lanes[0];
}

template <class T>
OMNIATTN_INLINE T reduce_add(Vec<T> x) {
  return reduce(x, [](T a, T b) { return a + b; });
}
template <class T>
OMNIATTN_INLINE T reduce_max(Vec<T> x) {
  return reduce(x, [](T a, T b) { return a > b ? a : b; });
}

#endif

template <class T>
OMNIATTN_INLINE Mask<T> load_mask(const uint8_t* p) {
  return load_mask_n<T>(p, Vec<T>::kWidth);
}

// Prefetches the cache line of p; any address is allowed.
OMNIATTN_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

// Orders stream() stores before any later signal to another thread.
OMNIATTN_INLINE void stream_fence() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

// Transpose.

template <int... I>
struct Indices {};
template <int kCount, int... I>
struct MakeIndices : MakeIndices<kCount - 1, kCount - 1, I...> {};
template <int... I>
struct MakeIndices<0, I...> {
  using type = Indices<I...>;
};

// Swaps the upper kStep-wide blocks of a with the lower ones of b.
template <int kStep, class T, int... I>
OMNIATTN_INLINE void swap_blocks(Vec<T>& a, Vec<T>& b, Indices<I...>) {
  const typename Vec<T>::Raw upper =
      __builtin_shufflevector(a.v, b.v, ((I & kStep) != 0 ? Vec<T>::kWidth + I - kStep : I)...);
  b.v = __builtin_shufflevector(a.v, b.v, ((I & kStep) != 0 ? Vec<T>::kWidth + I : I + kStep)...);
  a.v = upper;
}
template <int kStep, class T>
OMNIATTN_INLINE void transpose_from(Vec<T>* rows) {
  if constexpr (kStep < Vec<T>::kWidth) {
#pragma GCC unroll 16
    for (int i = 0; i < Vec<T>::kWidth; ++i) {
      if ((i & kStep) == 0) {
        swap_blocks<kStep>(rows[i], rows[i + kStep], typename MakeIndices<Vec<T>::kWidth>::type{});
      }
    }
    transpose_from<2 * kStep>(rows);
  }
}
// Transposes kWidth rows in registers: rows[i] lane j <-> rows[j] lane i.
template <class T>
OMNIATTN_INLINE void transpose(Vec<T> (&rows)[Vec<T>::kWidth]) {
  transpose_from<1>(rows);
}

// Functions.
// float: minimax polynomials fitted for these ranges; the tests hold each bound on every ISA.
// double: the C library, lane by lane.

// c0 + c1 x + c2 x^2 + ...
template <class T>
OMNIATTN_INLINE Vec<T> horner(Vec<T>, T c0) {
  return Vec<T>(c0);
}
template <class T, class... Rest>
OMNIATTN_INLINE Vec<T> horner(Vec<T> x, T c0, Rest... rest) {
  return fma(x, horner(x, rest...), Vec<T>(c0));
}

template <class F>
OMNIATTN_INLINE VecD map_lanes(VecD x, F f) {
  double lanes[VecD::kWidth];
  store(lanes, x);
  for (double& lane : lanes) lane = f(lane);
  return load(lanes);
}

// e^x as a number in [0.7, 1.42] and a power of 2, for x in [-105, 89].
struct ScaledExp {
  VecF value, power;

  OMNIATTN_INLINE explicit ScaledExp(VecF x) : value(x), power(round(x * 1.442695041f)) {
    const VecF high = fma(power, VecF(-0x1.62e4p-1f), x);
    const VecF r = fma(power, VecF(-0x1.7f7d1cp-20f), high);
    const VecF p = horner(r, 4.999999404e-01f, 1.666651517e-01f, 4.166845605e-02f, 8.369418792e-03f,
                          1.381314476e-03f);
    value = fma(r * r, p, r) + 1.0f;
  }
};

// e^x within 2 ULP; -inf gives 0.
OMNIATTN_INLINE VecF exp(VecF x) {
  const ScaledExp e(min(VecF(89.0f), max(VecF(-105.0f), x)));
  return scale2(e.value, e.power);
}
OMNIATTN_INLINE VecD exp(VecD x) {
  return map_lanes(x, [](double lane) { return __builtin_exp(lane); });
}

// 2^x for the softmax of attention within relative error 4e-7, exact at integers; -inf gives 0.
OMNIATTN_INLINE VecF exp2(VecF x) {
#if defined(__AVX512F__)
  const VecF n = x;  // the instruction takes the floor and saturates
  const VecF f(_mm512_reduce_ps(x.v, 9));
#else
  const VecF clamped = min(VecF(129.0f), max(VecF(-151.0f), x));
  const VecF n = floor(clamped);
  const VecF f = clamped - n;
#endif
  return scale2(horner(f, 1.0f, 6.931512952e-01f, 2.401644439e-01f, 5.579991266e-02f,
                       9.017030708e-03f, 1.867130050e-03f),
                n);
}
OMNIATTN_INLINE VecD exp2(VecD x) {
  return map_lanes(x, [](double lane) { return __builtin_exp2(lane); });
}

// ln x within 2 ULP: x = m * 2^e with m in [sqrt(1/2), sqrt(2)).
OMNIATTN_INLINE VecF log(VecF x) {
  const Mask<float> tiny = x < VecF(0x1p-126f);
  const VecF scaled = select(tiny, x * 0x1p23f, x);
  constexpr int32_t kSqrtHalf = 0x3f3504f3;
  const VecF::Bits offset = abs(scaled).bits() - kSqrtHalf;  // would overflow for -0
  const VecF exponent(__builtin_convertvector(offset >> 23, VecF::Raw));
  const VecF e = exponent - select(tiny, VecF(23.0f), VecF(0.0f));
  const VecF f = VecF::from_bits((offset & 0x7fffff) + kSqrtHalf) - 1.0f;
  const VecF q = horner(f, 3.333331048e-01f, -2.500000894e-01f, 2.000216693e-01f, -1.666809022e-01f,
                        1.421855390e-01f, -1.240308359e-01f, 1.189351231e-01f, -1.169433519e-01f,
                        6.757570058e-02f);
  const VecF ff = f * f;
  const VecF tail = fma(e, VecF(0x1.7f7d1cp-20f), fma(ff, f * q, ff * -0.5f));
  const VecF y = fma(e, VecF(0x1.62e4p-1f), f + tail);
  const VecF infinity = __builtin_inff();
  const VecF positive = select(x == infinity, infinity, y);
  const VecF outside = select(x == VecF(0.0f), -infinity, VecF(__builtin_nanf("")));
  return select(x > VecF(0.0f), positive, outside);
}
OMNIATTN_INLINE VecD log(VecD x) {
  return map_lanes(x, [](double lane) { return __builtin_log(lane); });
}

// Within 4 ULP: an odd polynomial near 0, 1 - 2 / (e^2|x| + 1) beyond.
OMNIATTN_INLINE VecF tanh(VecF x) {
  const VecF a = abs(x);
  const VecF u = x * x;
  const VecF p = horner(u, -3.333327770e-01f, 1.333132833e-01f, -5.372922868e-02f, 2.060200833e-02f,
                        -5.660789087e-03f);
  const VecF large = 1.0f - 2.0f * reciprocal(exp(min(VecF(40.0f), a + a)) + 1.0f);
  return copysign(select(a < VecF(0.625f), fma(a * u, p, a), large), x);
}
OMNIATTN_INLINE VecD tanh(VecD x) {
  return map_lanes(x, [](double lane) { return __builtin_tanh(lane); });
}

// Phi(x), the distribution function of the normal distribution, and e^(-x^2 / 2), its density times
// sqrt(2 pi), within relative errors of 2^-21 + 2^-25 x^2. The tail is e^(-x^2 / 2) times a
// polynomial in 1 / (1 + 0.3 |x|), which keeps the precision of small values.
template <class T>
struct Normal {
  Vec<T> below, bell;
};
OMNIATTN_INLINE Normal<float> normal(VecF x) {
  const VecF bell = exp(x * x * -0.5f);
  const VecF t = reciprocal(fma(min(VecF(20.0f), abs(x)), VecF(0.3f), VecF(1.0f)));
  const VecF tail =
      bell * t *
      horner(t, 1.196251656e-01f, 1.208168915e-01f, 9.952306540e-02f, 1.298434198e-01f,
             -5.609590580e-02f, 2.089646414e-01f, -1.587136563e-01f, 3.603631743e-02f);
  return {select(x < VecF(0.0f), tail, 1.0f - tail), bell};
}
OMNIATTN_INLINE Normal<double> normal(VecD x) {
  constexpr double kInvSqrt2 = 0.70710678118654752440;
  const VecD twice = map_lanes(x * -kInvSqrt2, [](double lane) { return __builtin_erfc(lane); });
  return {0.5 * twice, exp(x * x * -0.5)};
}

// 1 / (1 + e^-x) within 4 ULP; 0 for x < -87, where e^-x leaves the range of reciprocal.
OMNIATTN_INLINE VecF sigmoid(VecF x) {
  const ScaledExp e(min(VecF(87.0f), max(VecF(-87.0f), -x)));
  return select(x < VecF(-87.0f), VecF(0.0f),
                reciprocal(1.0f + scale2_to_normal(e.value, e.power)));
}
OMNIATTN_INLINE VecD sigmoid(VecD x) { return 1.0 / (1.0 + exp(-x)); }

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
