// vec.h with AVX-512 F, BW, VL and DQ: a mask is a predicate register.
#pragma once

#include "runtime/vec_core.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class T>
struct Mask {
  static constexpr unsigned kAll = (1u << Vec<T>::kWidth) - 1;
  unsigned m;
  OMNIATTN_INLINE friend Mask operator&(Mask a, Mask b) { return {a.m & b.m}; }
  OMNIATTN_INLINE friend Mask operator|(Mask a, Mask b) { return {a.m | b.m}; }
  OMNIATTN_INLINE friend Mask operator!(Mask a) { return {~a.m & kAll}; }
  OMNIATTN_INLINE friend bool any(Mask a) { return a.m != 0; }
  OMNIATTN_INLINE friend bool all(Mask a) { return a.m == kAll; }
  // Index of the first lane that is set; at least one must be.
  OMNIATTN_INLINE friend int first(Mask a) { return __builtin_ctz(a.m); }
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
OMNIATTN_INLINE VecF scale2_to_normal(VecF a, VecF n) { return scale2(a, n); }

// 1 / a within 1 ULP for |a| in [2^-126, 2^126]; a division occupies its unit for 16 cycles.
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
#if defined(__AVX512BF16__)
  constexpr int kDenormal = 0x20;  // the instruction narrows denormals to 0
  if (__builtin_expect(_mm512_fpclass_ps_mask(x.v, kDenormal) == 0, 1)) {
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v));
  }
#endif
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

OMNIATTN_INLINE float reduce_add(VecF x) { return _mm512_reduce_add_ps(x.v); }
OMNIATTN_INLINE double reduce_add(VecD x) { return _mm512_reduce_add_pd(x.v); }
OMNIATTN_INLINE float reduce_max(VecF x) { return _mm512_reduce_max_ps(x.v); }
OMNIATTN_INLINE double reduce_max(VecD x) { return _mm512_reduce_max_pd(x.v); }

// Pairs of 16-bit numbers, H = bf16 or f16.
// One 32-bit lane holds two consecutive terms of a dot product, the first in the low half.

struct PairVec {
  __m512i v;
};

template <class H>
OMNIATTN_INLINE PairVec load_pairs(const H* p) {
  return {_mm512_loadu_si512(p)};
}
// Broadcasts both terms of a pair to every lane.
OMNIATTN_INLINE PairVec broadcast_pair(const bf16* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, sizeof(pair));
  return {_mm512_set1_epi32(pair)};
}
// Broadcasts the first term of a pair, paired with 0, to every lane.
OMNIATTN_INLINE PairVec broadcast_half_pair(const bf16* p) { return {_mm512_set1_epi32(p->bits)}; }
template <class H>
OMNIATTN_INLINE void store_pairs(H* p, PairVec x) {
  _mm512_storeu_si512(p, x.v);
}
template <class H>
OMNIATTN_INLINE void store_pairs_n(H* p, PairVec x, int64_t pairs) {
  _mm512_mask_storeu_epi32(p, first16(pairs), x.v);
}
// Reinterprets the 32-bit lanes, to move them between vectors.
OMNIATTN_INLINE VecF as_lanes(PairVec x) { return VecF(_mm512_castsi512_ps(x.v)); }
OMNIATTN_INLINE PairVec as_pairs(VecF x) { return {_mm512_castps_si512(x.v)}; }
template <class H>
OMNIATTN_INLINE PairVec load_pairs_n(const H* p, int64_t pairs) {
  return {_mm512_maskz_loadu_epi32(first16(pairs), p)};
}
template <class H>
OMNIATTN_INLINE PairVec load_terms_n(const H* p, int64_t terms) {
  const uint32_t first = terms <= 0 ? 0u : terms >= 32 ? ~0u : (1u << terms) - 1u;
  return {_mm512_maskz_loadu_epi16(first, p)};
}
OMNIATTN_INLINE PairVec interleave(__m256i first, __m256i second) {
  return {_mm512_or_si512(_mm512_cvtepu16_epi32(first),
                          _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16))};
}
// Pairs element i of two rows in lane i; reads the first n and n_second elements.
template <class H>
OMNIATTN_INLINE PairVec load_pairs_of_rows_n(const H* first, int64_t n, const H* second,
                                             int64_t n_second) {
  return interleave(_mm256_maskz_loadu_epi16(first16(n), first),
                    _mm256_maskz_loadu_epi16(first16(n_second), second));
}

// Narrows factors of products. Products read denormal bf16 as 0, so denormals may become 0 here.
OMNIATTN_INLINE __m256i narrow_factors(VecF x) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v));
#else
  return narrow_bf16(x);
#endif
}
OMNIATTN_INLINE void store_factors(bf16* p, VecF x) { _mm256_storeu_epi16(p, narrow_factors(x)); }
// Stores x, followed by y.
OMNIATTN_INLINE void store_factors(bf16* p, VecF x, VecF y) {
#if defined(__AVX512BF16__)
  _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(y.v, x.v)));
#else
  store_factors(p, x);
  store_factors(p + VecF::kWidth, y);
#endif
}
template <class H>
OMNIATTN_INLINE PairVec narrow_to_pairs(VecF first, VecF second) {
  if constexpr (std::is_same_v<H, f16>) return interleave(narrow_f16(first), narrow_f16(second));
#if defined(__AVX512BF16__)
  // Lane i takes elements i and 16 + i.
  alignas(64) static constexpr uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second.v, first.v));
  return {_mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both)};
#else
  return interleave(narrow_factors(first), narrow_factors(second));
#endif
}

// Terms of each pair as floats.
template <class H>
OMNIATTN_INLINE VecF first_terms(PairVec x) {
  if constexpr (std::is_same_v<H, f16>) return widen_f16(_mm512_cvtepi32_epi16(x.v));
  return VecF(_mm512_castsi512_ps(_mm512_slli_epi32(x.v, 16)));
}
template <class H>
OMNIATTN_INLINE VecF second_terms(PairVec x) {
  if constexpr (std::is_same_v<H, f16>) {
    return widen_f16(_mm512_cvtepi32_epi16(_mm512_srli_epi32(x.v, 16)));
  }
  const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
  return VecF(_mm512_castsi512_ps(_mm512_and_si512(x.v, upper)));
}

// acc + a.second * b.second + a.first * b.first per lane, in the instruction's order.
OMNIATTN_INLINE VecF dot_bf16(VecF acc, PairVec a, PairVec b) {
#if defined(__AVX512BF16__)
  return VecF(
      _mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v)));
#else
  return fma(first_terms<bf16>(a), first_terms<bf16>(b),
             fma(second_terms<bf16>(a), second_terms<bf16>(b), acc));
#endif
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
