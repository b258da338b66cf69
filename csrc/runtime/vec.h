// SIMD vectors of float and double for the per-ISA kernel files. The instruction set is the one the
// including file is compiled for; everything is local to that file, so that objects built with
// different flags never share a function.
//
//   sections   vectors | masks | backend: AVX-512, AVX2, portable | bf16 pairs | transpose |
//              reductions | functions
//   storage    load(p) and store(p, v) take double, float, bf16 or f16 pointers and convert to and
//              from the compute type; narrowing rounds to nearest even and keeps NaN
//   partial    load_n(p, n), store_n(p, v, n) touch the first n elements and nothing behind them;
//              missing lanes read as 0; any n <= 0 is none, any n >= kWidth is all
//   NaN        max(a, b) and min(a, b) give b where either is NaN: put the data second
#pragma once

#include <cstdint>
#include <utility>  // std::integer_sequence, a type without code

#if defined(__AVX2__)
#pragma GCC diagnostic push
#if !defined(__clang__)  // gcc 12 warns inside this header
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#include "runtime/dtype.h"

#define OMNIATTN_INLINE [[gnu::always_inline]] inline

namespace omniattn::OMNIATTN_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kVecBytes = 64;
#elif defined(__AVX2__)
constexpr int kVecBytes = 32;
#else
constexpr int kVecBytes = 16;
#endif

// ---- vectors ------------------------------------------------------------------------------------

template <class T>
struct Lanes;
template <>
struct Lanes<float> {
  typedef float Raw __attribute__((vector_size(kVecBytes)));
  typedef int32_t Bits __attribute__((vector_size(kVecBytes)));
  static constexpr int32_t kSignBit = INT32_MIN;
};
template <>
struct Lanes<double> {
  typedef double Raw __attribute__((vector_size(kVecBytes)));
  typedef int64_t Bits __attribute__((vector_size(kVecBytes)));
  static constexpr int64_t kSignBit = INT64_MIN;
};

template <class T>
struct Mask;

template <class T>
struct Vec {
  static constexpr int kWidth = kVecBytes / sizeof(T);
  using Raw = typename Lanes<T>::Raw;
  using Bits = typename Lanes<T>::Bits;

  Raw v;

  Vec() = default;
  OMNIATTN_INLINE Vec(T scalar) : v(scalar - Raw{}) {}  // not +, which would lose the sign of -0
  OMNIATTN_INLINE explicit Vec(Raw raw) : v(raw) {}
  OMNIATTN_INLINE static Vec from_bits(Bits bits) { return Vec(reinterpret_cast<Raw>(bits)); }
  OMNIATTN_INLINE Bits bits() const { return reinterpret_cast<Bits>(v); }

  OMNIATTN_INLINE friend Vec operator+(Vec a, Vec b) { return Vec(a.v + b.v); }
  OMNIATTN_INLINE friend Vec operator-(Vec a, Vec b) { return Vec(a.v - b.v); }
  OMNIATTN_INLINE friend Vec operator*(Vec a, Vec b) { return Vec(a.v * b.v); }
  OMNIATTN_INLINE friend Vec operator/(Vec a, Vec b) { return Vec(a.v / b.v); }
  OMNIATTN_INLINE friend Vec operator-(Vec a) { return Vec(-a.v); }
  OMNIATTN_INLINE Vec& operator+=(Vec b) { return *this = *this + b; }
  OMNIATTN_INLINE Vec& operator-=(Vec b) { return *this = *this - b; }
  OMNIATTN_INLINE Vec& operator*=(Vec b) { return *this = *this * b; }

  OMNIATTN_INLINE friend Vec abs(Vec a) { return from_bits(a.bits() & ~sign_bit()); }
  OMNIATTN_INLINE friend Vec copysign(Vec magnitude, Vec sign) {
    return from_bits((magnitude.bits() & ~sign_bit()) | (sign.bits() & sign_bit()));
  }

 private:
  OMNIATTN_INLINE static Bits sign_bit() { return Bits{} + Lanes<T>::kSignBit; }
};

using VecF = Vec<float>;
using VecD = Vec<double>;

template <class T>
OMNIATTN_INLINE Vec<T> set1(T scalar) {
  return Vec<T>(scalar);
}
template <class T>
OMNIATTN_INLINE Vec<T> zero() {
  return Vec<T>(T{0});
}

template <class T>
OMNIATTN_INLINE typename Vec<T>::Bits lane_index_bits() {
  typename Vec<T>::Bits index = {};
#pragma GCC unroll 16
  for (int i = 0; i < Vec<T>::kWidth; ++i) index[i] = i;
  return index;
}
// 0, 1, 2, ... as numbers.
template <class T>
OMNIATTN_INLINE Vec<T> lane_index() {
  return Vec<T>(__builtin_convertvector(lane_index_bits<T>(), typename Vec<T>::Raw));
}

template <class V>
struct VecPair {
  V first, second;
};
// The lanes of a, then of b: those of even index and those of odd index.
template <class T>
OMNIATTN_INLINE VecPair<Vec<T>> deinterleave(Vec<T> a, Vec<T> b) {
  return [&]<int... I>(std::integer_sequence<int, I...>) -> VecPair<Vec<T>> {
    return {Vec<T>(__builtin_shufflevector(a.v, b.v, (2 * I)...)),
            Vec<T>(__builtin_shufflevector(a.v, b.v, (2 * I + 1)...))};
  }(std::make_integer_sequence<int, Vec<T>::kWidth>{});
}
// Its inverse: a0, b0, a1, b1, ...
template <class T>
OMNIATTN_INLINE VecPair<Vec<T>> interleave(Vec<T> a, Vec<T> b) {
  constexpr int kWidth = Vec<T>::kWidth;
  return [&]<int... I>(std::integer_sequence<int, I...>) -> VecPair<Vec<T>> {
    return {Vec<T>(__builtin_shufflevector(a.v, b.v, (I / 2 + I % 2 * kWidth)...)),
            Vec<T>(__builtin_shufflevector(a.v, b.v, ((I + kWidth) / 2 + I % 2 * kWidth)...))};
  }(std::make_integer_sequence<int, kWidth>{});
}

// ---- masks --------------------------------------------------------------------------------------
// One truth value per lane: a predicate register on AVX-512, lanes of all ones or zeros elsewhere.

#if defined(__AVX512F__)

template <class T>
struct Mask {
  static constexpr unsigned kAll = (1u << Vec<T>::kWidth) - 1;
  unsigned m;
  OMNIATTN_INLINE friend Mask operator&(Mask a, Mask b) { return {a.m & b.m}; }
  OMNIATTN_INLINE friend Mask operator|(Mask a, Mask b) { return {a.m | b.m}; }
  OMNIATTN_INLINE friend Mask operator!(Mask a) { return {~a.m & kAll}; }
  OMNIATTN_INLINE friend bool any(Mask a) { return a.m != 0; }
  OMNIATTN_INLINE friend bool all(Mask a) { return a.m == kAll; }
};

// Lanes with index < n.
template <class T>
OMNIATTN_INLINE Mask<T> lanes_below(int64_t n) {
  return {n <= 0 ? 0u : n >= Vec<T>::kWidth ? Mask<T>::kAll : (1u << n) - 1u};
}

OMNIATTN_INLINE VecF select(Mask<float> m, VecF a, VecF b) {
  return VecF(_mm512_mask_blend_ps(static_cast<__mmask16>(m.m), b.v, a.v));
}
OMNIATTN_INLINE VecD select(Mask<double> m, VecD a, VecD b) {
  return VecD(_mm512_mask_blend_pd(static_cast<__mmask8>(m.m), b.v, a.v));
}

#define OMNIATTN_COMPARE(op, predicate)                               \
  OMNIATTN_INLINE Mask<float> operator op(VecF a, VecF b) {           \
    return {_cvtmask16_u32(_mm512_cmp_ps_mask(a.v, b.v, predicate))}; \
  }                                                                   \
  OMNIATTN_INLINE Mask<double> operator op(VecD a, VecD b) {          \
    return {_cvtmask8_u32(_mm512_cmp_pd_mask(a.v, b.v, predicate))};  \
  }
OMNIATTN_COMPARE(<, _CMP_LT_OQ)
OMNIATTN_COMPARE(<=, _CMP_LE_OQ)
OMNIATTN_COMPARE(>, _CMP_GT_OQ)
OMNIATTN_COMPARE(>=, _CMP_GE_OQ)
OMNIATTN_COMPARE(==, _CMP_EQ_OQ)
OMNIATTN_COMPARE(!=, _CMP_NEQ_UQ)
#undef OMNIATTN_COMPARE

#else

template <class T>
struct Mask {
  typename Vec<T>::Bits m;
  OMNIATTN_INLINE friend Mask operator&(Mask a, Mask b) { return {a.m & b.m}; }
  OMNIATTN_INLINE friend Mask operator|(Mask a, Mask b) { return {a.m | b.m}; }
  OMNIATTN_INLINE friend Mask operator!(Mask a) { return {~a.m}; }
  OMNIATTN_INLINE friend bool any(Mask a) {
    bool set = false;
    for (int i = 0; i < Vec<T>::kWidth; ++i) set |= a.m[i] != 0;
    return set;
  }
  OMNIATTN_INLINE friend bool all(Mask a) { return !any(!a); }
  OMNIATTN_INLINE friend Vec<T> select(Mask s, Vec<T> a, Vec<T> b) {
    return Vec<T>::from_bits((a.bits() & s.m) | (b.bits() & ~s.m));
  }
};

template <class T>
OMNIATTN_INLINE Mask<T> lanes_below(int64_t n) {
  const int clamped = n < 0 ? 0 : n > Vec<T>::kWidth ? Vec<T>::kWidth : static_cast<int>(n);
  return {lane_index_bits<T>() < clamped};
}

#define OMNIATTN_COMPARE(op)                                                       \
  OMNIATTN_INLINE Mask<float> operator op(VecF a, VecF b) { return {a.v op b.v}; } \
  OMNIATTN_INLINE Mask<double> operator op(VecD a, VecD b) { return {a.v op b.v}; }
OMNIATTN_COMPARE(<)
OMNIATTN_COMPARE(<=)
OMNIATTN_COMPARE(>)
OMNIATTN_COMPARE(>=)
OMNIATTN_COMPARE(==)
OMNIATTN_COMPARE(!=)
#undef OMNIATTN_COMPARE

#endif

// ---- backend: AVX-512 ---------------------------------------------------------------------------
// Every backend gives fma, max, min, sqrt, round, floor, scale2, reciprocal, whole and partial
// loads and stores of each storage type, and stream.

#if defined(__AVX512F__)

OMNIATTN_INLINE VecF fma(VecF a, VecF b, VecF c) { return VecF(_mm512_fmadd_ps(a.v, b.v, c.v)); }
OMNIATTN_INLINE VecD fma(VecD a, VecD b, VecD c) { return VecD(_mm512_fmadd_pd(a.v, b.v, c.v)); }
OMNIATTN_INLINE VecF max(VecF a, VecF b) { return VecF(_mm512_max_ps(a.v, b.v)); }
OMNIATTN_INLINE VecD max(VecD a, VecD b) { return VecD(_mm512_max_pd(a.v, b.v)); }
OMNIATTN_INLINE VecF min(VecF a, VecF b) { return VecF(_mm512_min_ps(a.v, b.v)); }
OMNIATTN_INLINE VecD min(VecD a, VecD b) { return VecD(_mm512_min_pd(a.v, b.v)); }
OMNIATTN_INLINE VecF sqrt(VecF a) { return VecF(_mm512_sqrt_ps(a.v)); }
OMNIATTN_INLINE VecD sqrt(VecD a) { return VecD(_mm512_sqrt_pd(a.v)); }
OMNIATTN_INLINE VecF round(VecF a) { return VecF(_mm512_roundscale_ps(a.v, 8)); }
OMNIATTN_INLINE VecD round(VecD a) { return VecD(_mm512_roundscale_pd(a.v, 8)); }
OMNIATTN_INLINE VecF floor(VecF a) { return VecF(_mm512_roundscale_ps(a.v, 9)); }
OMNIATTN_INLINE VecD floor(VecD a) { return VecD(_mm512_roundscale_pd(a.v, 9)); }

// a * 2^n for integral n in [-160, 160], rounded once.
OMNIATTN_INLINE VecF scale2(VecF a, VecF n) { return VecF(_mm512_scalef_ps(a.v, n.v)); }

// 1 / a within 1 ULP for |a| in [2^-126, 2^126]. A division holds its unit for 16 cycles.
OMNIATTN_INLINE VecF reciprocal(VecF a) {
  const VecF r(_mm512_rcp14_ps(a.v));
  return fma(r, fma(-a, r, VecF(1.0f)), r);
}

OMNIATTN_INLINE __mmask16 first16(int64_t n) {
  return static_cast<__mmask16>(lanes_below<float>(n).m);
}
OMNIATTN_INLINE __mmask8 first8(int64_t n) {
  return static_cast<__mmask8>(lanes_below<double>(n).m);
}
OMNIATTN_INLINE VecF widen_bf16(__m256i h) {
  return VecF(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)));
}
OMNIATTN_INLINE VecF widen_f16(__m256i h) { return VecF(_mm512_cvtph_ps(h)); }
OMNIATTN_INLINE __m256i narrow_bf16(VecF x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i upper = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, nan, upper, _mm512_set1_epi32(0x40)));
}
OMNIATTN_INLINE __m256i narrow_f16(VecF x) {
  return _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

OMNIATTN_INLINE VecD load(const double* p) { return VecD(_mm512_loadu_pd(p)); }
OMNIATTN_INLINE VecF load(const float* p) { return VecF(_mm512_loadu_ps(p)); }
OMNIATTN_INLINE VecF load(const bf16* p) { return widen_bf16(_mm256_loadu_epi16(p)); }
OMNIATTN_INLINE VecF load(const f16* p) { return widen_f16(_mm256_loadu_epi16(p)); }
OMNIATTN_INLINE VecD load_n(const double* p, int64_t n) {
  return VecD(_mm512_maskz_loadu_pd(first8(n), p));
}
OMNIATTN_INLINE VecF load_n(const float* p, int64_t n) {
  return VecF(_mm512_maskz_loadu_ps(first16(n), p));
}
OMNIATTN_INLINE VecF load_n(const bf16* p, int64_t n) {
  return widen_bf16(_mm256_maskz_loadu_epi16(first16(n), p));
}
OMNIATTN_INLINE VecF load_n(const f16* p, int64_t n) {
  return widen_f16(_mm256_maskz_loadu_epi16(first16(n), p));
}

OMNIATTN_INLINE void store(double* p, VecD x) { _mm512_storeu_pd(p, x.v); }
OMNIATTN_INLINE void store(float* p, VecF x) { _mm512_storeu_ps(p, x.v); }
OMNIATTN_INLINE void store(bf16* p, VecF x) { _mm256_storeu_epi16(p, narrow_bf16(x)); }
OMNIATTN_INLINE void store(f16* p, VecF x) { _mm256_storeu_epi16(p, narrow_f16(x)); }
OMNIATTN_INLINE void store_n(double* p, VecD x, int64_t n) {
  _mm512_mask_storeu_pd(p, first8(n), x.v);
}
OMNIATTN_INLINE void store_n(float* p, VecF x, int64_t n) {
  _mm512_mask_storeu_ps(p, first16(n), x.v);
}
OMNIATTN_INLINE void store_n(bf16* p, VecF x, int64_t n) {
  _mm256_mask_storeu_epi16(p, first16(n), narrow_bf16(x));
}
OMNIATTN_INLINE void store_n(f16* p, VecF x, int64_t n) {
  _mm256_mask_storeu_epi16(p, first16(n), narrow_f16(x));
}

OMNIATTN_INLINE void stream(double* p, VecD x) { _mm512_stream_pd(p, x.v); }
OMNIATTN_INLINE void stream(float* p, VecF x) { _mm512_stream_ps(p, x.v); }
OMNIATTN_INLINE void stream(bf16* p, VecF x) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(x));
}
OMNIATTN_INLINE void stream(f16* p, VecF x) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow_f16(x));
}

// Lanes whose byte is not zero.
template <class T>
OMNIATTN_INLINE Mask<T> load_mask_n(const uint8_t* p, int64_t n) {
  const __m128i bytes = _mm_maskz_loadu_epi8(static_cast<__mmask16>(lanes_below<T>(n).m), p);
  return {_cvtmask16_u32(_mm_test_epi8_mask(bytes, bytes))};
}

// ---- backend: AVX2 ------------------------------------------------------------------------------

#elif defined(__AVX2__)

OMNIATTN_INLINE VecF fma(VecF a, VecF b, VecF c) { return VecF(_mm256_fmadd_ps(a.v, b.v, c.v)); }
OMNIATTN_INLINE VecD fma(VecD a, VecD b, VecD c) { return VecD(_mm256_fmadd_pd(a.v, b.v, c.v)); }
OMNIATTN_INLINE VecF max(VecF a, VecF b) { return VecF(_mm256_max_ps(a.v, b.v)); }
OMNIATTN_INLINE VecD max(VecD a, VecD b) { return VecD(_mm256_max_pd(a.v, b.v)); }
OMNIATTN_INLINE VecF min(VecF a, VecF b) { return VecF(_mm256_min_ps(a.v, b.v)); }
OMNIATTN_INLINE VecD min(VecD a, VecD b) { return VecD(_mm256_min_pd(a.v, b.v)); }
OMNIATTN_INLINE VecF sqrt(VecF a) { return VecF(_mm256_sqrt_ps(a.v)); }
OMNIATTN_INLINE VecD sqrt(VecD a) { return VecD(_mm256_sqrt_pd(a.v)); }
OMNIATTN_INLINE VecF round(VecF a) { return VecF(_mm256_round_ps(a.v, 8)); }
OMNIATTN_INLINE VecD round(VecD a) { return VecD(_mm256_round_pd(a.v, 8)); }
OMNIATTN_INLINE VecF floor(VecF a) { return VecF(_mm256_round_ps(a.v, 9)); }
OMNIATTN_INLINE VecD floor(VecD a) { return VecD(_mm256_round_pd(a.v, 9)); }

OMNIATTN_INLINE VecF widen_bf16(__m128i h) {
  return VecF(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)));
}
OMNIATTN_INLINE VecF widen_f16(__m128i h) { return VecF(_mm256_cvtph_ps(h)); }
OMNIATTN_INLINE __m128i narrow_bf16(VecF x) {
  const __m256i bits = _mm256_castps_si256(x.v);
  const __m256i upper = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  const __m256i half = _mm256_blendv_epi8(rounded, quiet, nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}
OMNIATTN_INLINE __m128i narrow_f16(VecF x) {
  return _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

OMNIATTN_INLINE VecD load(const double* p) { return VecD(_mm256_loadu_pd(p)); }
OMNIATTN_INLINE VecF load(const float* p) { return VecF(_mm256_loadu_ps(p)); }
OMNIATTN_INLINE VecF load(const bf16* p) {
  return widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
OMNIATTN_INLINE VecF load(const f16* p) {
  return widen_f16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
OMNIATTN_INLINE VecD load_n(const double* p, int64_t n) {
  return VecD(_mm256_maskload_pd(p, reinterpret_cast<__m256i>(lanes_below<double>(n).m)));
}
OMNIATTN_INLINE VecF load_n(const float* p, int64_t n) {
  return VecF(_mm256_maskload_ps(p, reinterpret_cast<__m256i>(lanes_below<float>(n).m)));
}

OMNIATTN_INLINE void store(double* p, VecD x) { _mm256_storeu_pd(p, x.v); }
OMNIATTN_INLINE void store(float* p, VecF x) { _mm256_storeu_ps(p, x.v); }
OMNIATTN_INLINE void store(bf16* p, VecF x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_bf16(x));
}
OMNIATTN_INLINE void store(f16* p, VecF x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_f16(x));
}
OMNIATTN_INLINE void store_n(double* p, VecD x, int64_t n) {
  _mm256_maskstore_pd(p, reinterpret_cast<__m256i>(lanes_below<double>(n).m), x.v);
}
OMNIATTN_INLINE void store_n(float* p, VecF x, int64_t n) {
  _mm256_maskstore_ps(p, reinterpret_cast<__m256i>(lanes_below<float>(n).m), x.v);
}

OMNIATTN_INLINE void stream(double* p, VecD x) { _mm256_stream_pd(p, x.v); }
OMNIATTN_INLINE void stream(float* p, VecF x) { _mm256_stream_ps(p, x.v); }
OMNIATTN_INLINE void stream(bf16* p, VecF x) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), narrow_bf16(x));
}
OMNIATTN_INLINE void stream(f16* p, VecF x) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), narrow_f16(x));
}

// ---- backend: portable --------------------------------------------------------------------------

#else

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
// Adding and subtracting 1.5 * 2^mantissa leaves the nearest integer; larger numbers are integers.
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

template <class S>
OMNIATTN_INLINE Vec<compute_t<S>> load(const S* p) {
  return map_lanes_unrolled<compute_t<S>>([&](int i) { return widen(p[i]); });
}
template <class S>
OMNIATTN_INLINE void store(S* p, Vec<compute_t<S>> x) {
#pragma GCC unroll 16
  for (int i = 0; i < x.kWidth; ++i) p[i] = narrow<S>(x.v[i]);
}
template <class S>
OMNIATTN_INLINE void stream(S* p, Vec<compute_t<S>> x) {
  store(p, x);
}

#endif

// ---- what several backends share ----------------------------------------------------------------

OMNIATTN_INLINE VecD reciprocal(VecD a) { return 1.0 / a; }

#if !defined(__AVX512F__)

OMNIATTN_INLINE VecF reciprocal(VecF a) { return 1.0f / a; }

// Two steps, so that subnormal results and 2^128 are reached without an out-of-range factor.
OMNIATTN_INLINE VecF scale2(VecF a, VecF n) {
  const VecF::Bits whole = __builtin_convertvector(n.v, VecF::Bits);
  const VecF::Bits half = whole >> 1;
  return a * VecF::from_bits((half + 127) << 23) * VecF::from_bits((whole - half + 127) << 23);
}

template <class S>
OMNIATTN_INLINE Vec<compute_t<S>> load_n(const S* p, int64_t n) {
  constexpr int kWidth = Vec<compute_t<S>>::kWidth;
  if (n >= kWidth) return load(p);
  S lanes[kWidth] = {};
  for (int i = 0; i < kWidth && i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
template <class S>
OMNIATTN_INLINE void store_n(S* p, Vec<compute_t<S>> x, int64_t n) {
  if (n >= x.kWidth) return store(p, x);
  S lanes[x.kWidth];
  store(lanes, x);
  for (int i = 0; i < x.kWidth && i < n; ++i) p[i] = lanes[i];
}

template <class T>
OMNIATTN_INLINE Mask<T> load_mask_n(const uint8_t* p, int64_t n) {
  Mask<T> r = {};
  for (int i = 0; i < Vec<T>::kWidth && i < n; ++i) r.m[i] = p[i] != 0 ? -1 : 0;
  return r;
}

#endif

template <class T>
OMNIATTN_INLINE Mask<T> load_mask(const uint8_t* p) {
  return load_mask_n<T>(p, Vec<T>::kWidth);
}

// Brings the cache line of p near; any address is allowed.
OMNIATTN_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

// Orders stream() stores before whatever another thread is told afterwards.
OMNIATTN_INLINE void stream_fence() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

// ---- bf16 pairs ---------------------------------------------------------------------------------
// One 32-bit lane holds two consecutive terms of a dot product, the first in the low half.

#if defined(__AVX512BF16__) || defined(OMNIATTN_EMULATE_BF16_DOT)

constexpr bool kHasBf16Dot = true;

struct PairVec {
  __m512i v;
};

OMNIATTN_INLINE PairVec load_pairs(const bf16* p) { return {_mm512_loadu_si512(p)}; }
// Both terms of one pair in every lane.
OMNIATTN_INLINE PairVec broadcast_pair(const bf16* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, sizeof(pair));
  return {_mm512_set1_epi32(pair)};
}
// The first term of a pair, with 0 behind it, in every lane.
OMNIATTN_INLINE PairVec broadcast_half_pair(const bf16* p) { return {_mm512_set1_epi32(p->bits)}; }
OMNIATTN_INLINE void store_pairs(bf16* p, PairVec x) { _mm512_storeu_si512(p, x.v); }
OMNIATTN_INLINE void store_pairs_n(bf16* p, PairVec x, int64_t pairs) {
  _mm512_mask_storeu_epi32(p, first16(pairs), x.v);
}
// The 32-bit lanes as they are, to be moved about.
OMNIATTN_INLINE VecF as_lanes(PairVec x) { return VecF(_mm512_castsi512_ps(x.v)); }
OMNIATTN_INLINE PairVec as_pairs(VecF x) { return {_mm512_castps_si512(x.v)}; }
OMNIATTN_INLINE PairVec load_pairs_n(const bf16* p, int64_t pairs) {
  return {_mm512_maskz_loadu_epi32(first16(pairs), p)};
}
OMNIATTN_INLINE PairVec load_terms_n(const bf16* p, int64_t terms) {
  const uint32_t first = terms <= 0 ? 0u : terms >= 32 ? ~0u : (1u << terms) - 1u;
  return {_mm512_maskz_loadu_epi16(first, p)};
}
OMNIATTN_INLINE PairVec interleave(__m256i first, __m256i second) {
  return {_mm512_or_si512(_mm512_cvtepu16_epi32(first),
                          _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16))};
}
// Lane i pairs element i of two rows, of which the first n and the first n_second are read.
OMNIATTN_INLINE PairVec load_pairs_of_rows_n(const bf16* first, int64_t n, const bf16* second,
                                             int64_t n_second) {
  return interleave(_mm256_maskz_loadu_epi16(first16(n), first),
                    _mm256_maskz_loadu_epi16(first16(n_second), second));
}
OMNIATTN_INLINE PairVec narrow_to_pairs(VecF first, VecF second) {
  return interleave(narrow_bf16(first), narrow_bf16(second));
}

// acc + a.second * b.second + a.first * b.first per lane, in the instruction's order.
OMNIATTN_INLINE VecF dot_bf16(VecF acc, PairVec a, PairVec b) {
#if defined(OMNIATTN_EMULATE_BF16_DOT)
  const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
  const VecF a_second(_mm512_castsi512_ps(_mm512_and_si512(a.v, upper)));
  const VecF b_second(_mm512_castsi512_ps(_mm512_and_si512(b.v, upper)));
  const VecF a_first(_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16)));
  const VecF b_first(_mm512_castsi512_ps(_mm512_slli_epi32(b.v, 16)));
  return fma(a_first, b_first, fma(a_second, b_second, acc));
#else
  return VecF(
      _mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v)));
#endif
}

#else

constexpr bool kHasBf16Dot = false;

#endif

// ---- transpose ----------------------------------------------------------------------------------

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
// rows[i] lane j <-> rows[j] lane i, for kWidth rows in registers.
template <class T>
OMNIATTN_INLINE void transpose(Vec<T> (&rows)[Vec<T>::kWidth]) {
  transpose_from<1>(rows);
}

// ---- reductions ---------------------------------------------------------------------------------
// A fixed tree: the upper half of the lanes is folded onto the lower one until one lane is left.

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
#if defined(__AVX512F__)
OMNIATTN_INLINE float reduce_add(VecF x) { return _mm512_reduce_add_ps(x.v); }
OMNIATTN_INLINE double reduce_add(VecD x) { return _mm512_reduce_add_pd(x.v); }
OMNIATTN_INLINE float reduce_max(VecF x) { return _mm512_reduce_max_ps(x.v); }
OMNIATTN_INLINE double reduce_max(VecD x) { return _mm512_reduce_max_pd(x.v); }
#else
template <class T>
OMNIATTN_INLINE T reduce_add(Vec<T> x) {
  return reduce(x, [](T a, T b) { return a + b; });
}
template <class T>
OMNIATTN_INLINE T reduce_max(Vec<T> x) {
  return reduce(x, [](T a, T b) { return a > b ? a : b; });
}
#endif

// ---- functions ----------------------------------------------------------------------------------
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

// e^x within 2 ULP; -inf gives 0.
OMNIATTN_INLINE VecF exp(VecF x) {
  const VecF clamped = min(VecF(89.0f), max(VecF(-105.0f), x));
  const VecF n = round(clamped * 1.442695041f);
  const VecF high = fma(n, VecF(-0x1.62e4p-1f), clamped);
  const VecF r = fma(n, VecF(-0x1.7f7d1cp-20f), high);
  const VecF p = horner(r, 4.999999404e-01f, 1.666651517e-01f, 4.166845605e-02f, 8.369418792e-03f,
                        1.381314476e-03f);
  return scale2(fma(r * r, p, r) + 1.0f, n);
}
OMNIATTN_INLINE VecD exp(VecD x) {
  return map_lanes(x, [](double lane) { return __builtin_exp(lane); });
}

// 2^x for the softmax of attention, with relative error 4e-7 (degree 5) or 4e-6 (degree 4: below
// half a bf16 step). 2^x is exact at integers; -inf gives 0.
template <int kDegree = 5>
OMNIATTN_INLINE VecF exp2(VecF x) {
  static_assert(kDegree == 4 || kDegree == 5);
#if defined(__AVX512F__)
  const VecF n = x;  // the instruction takes the floor and saturates by itself
  const VecF f(_mm512_reduce_ps(x.v, 9));
#else
  const VecF clamped = min(VecF(129.0f), max(VecF(-151.0f), x));
  const VecF n = floor(clamped);
  const VecF f = clamped - n;
#endif
  if constexpr (kDegree == 5) {
    return scale2(horner(f, 1.0f, 6.931512952e-01f, 2.401644439e-01f, 5.579991266e-02f,
                         9.017030708e-03f, 1.867130050e-03f),
                  n);
  } else {
    return scale2(
        horner(f, 1.0f, 6.930448413e-01f, 2.412801981e-01f, 5.224247277e-02f, 1.342668477e-02f), n);
  }
}
template <int kDegree = 5>
OMNIATTN_INLINE VecD exp2(VecD x) {
  return map_lanes(x, [](double lane) { return __builtin_exp2(lane); });
}

// ln x within 2 ULP: x = m * 2^e with m in [sqrt(1/2), sqrt(2)).
OMNIATTN_INLINE VecF log(VecF x) {
  const Mask<float> tiny = x < VecF(0x1p-126f);
  const VecF scaled = select(tiny, x * 0x1p23f, x);
  constexpr int32_t kSqrtHalf = 0x3f3504f3;
  const VecF::Bits offset = scaled.bits() - kSqrtHalf;
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

// Within 4 ULP: an odd polynomial up to 1, 1 - e^p(|x|) with p ~ ln erfc beyond.
OMNIATTN_INLINE VecF erf(VecF x) {
  const VecF a = abs(x);
  const VecF u = x * x;
  const VecF small =
      x * horner(u, 1.128379226e+00f, -3.761263788e-01f, 1.128378138e-01f, -2.686537616e-02f,
                 5.220858846e-03f, -8.481280529e-04f, 1.124372066e-04f, -9.598259567e-06f);
  const VecF t = min(VecF(4.0f), a) - 2.0f;
  const VecF log_erfc =
      horner(t, -5.364941120e+00f, -4.418160915e+00f, -9.237509966e-01f, -1.646581478e-02f,
             3.570502624e-03f, -7.302207523e-04f, 1.377205917e-04f, -2.168676838e-05f);
  return select(a < VecF(1.0f), small, copysign(1.0f - exp(log_erfc), x));
}
OMNIATTN_INLINE VecD erf(VecD x) {
  return map_lanes(x, [](double lane) { return __builtin_erf(lane); });
}

// 1 / (1 + e^-x) within 4 ULP, as e^x / (1 + e^x) for x < 0: the divisor stays in [1, 2].
OMNIATTN_INLINE VecF sigmoid(VecF x) {
  const VecF e = exp(-abs(x));
  const VecF r = reciprocal(1.0f + e);
  return select(x < VecF(0.0f), e * r, r);
}
OMNIATTN_INLINE VecD sigmoid(VecD x) { return 1.0 / (1.0 + exp(-x)); }

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
