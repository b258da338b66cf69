// vec.h with AVX2, FMA and F16C.
#pragma once

#include "runtime/vec_lanes.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

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

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
