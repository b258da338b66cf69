// load and load_n of vec.h for Int8.
#pragma once

#include "runtime/int8.h"
#include "runtime/vec.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

#if defined(__AVX512F__)

OMNIATTN_INLINE VecD widen_int8_double(__m128i x) {
  return VecD(_mm512_cvtepi32_pd(_mm256_cvtepi8_epi32(x)));
}
OMNIATTN_INLINE VecF widen_int8_float(__m128i x) {
  return VecF(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)));
}
OMNIATTN_INLINE VecD load(const Int8<double>* p) {
  return widen_int8_double(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
OMNIATTN_INLINE VecF load(const Int8<float>* p) {
  return widen_int8_float(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
OMNIATTN_INLINE VecD load_n(const Int8<double>* p, int64_t n) {
  return widen_int8_double(_mm_maskz_loadu_epi8(first8(n), p));
}
OMNIATTN_INLINE VecF load_n(const Int8<float>* p, int64_t n) {
  return widen_int8_float(_mm_maskz_loadu_epi8(first16(n), p));
}

#elif defined(__AVX2__) && !defined(OMNIATTN_WIDE_VECTORS)

OMNIATTN_INLINE VecD load(const Int8<double>* p) {
  int32_t four;
  __builtin_memcpy(&four, p, sizeof(four));
  return VecD(_mm256_cvtepi32_pd(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(four))));
}
OMNIATTN_INLINE VecF load(const Int8<float>* p) {
  return VecF(_mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))));
}

template <class A>
[[gnu::noinline]] Vec<A> load_part(const Int8<A>* p, int64_t n) {
  Int8<A> lanes[Vec<A>::kWidth] = {};
  for (int i = 0; i < Vec<A>::kWidth && i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
template <class A>
OMNIATTN_INLINE Vec<A> load_n(const Int8<A>* p, int64_t n) {
  return n >= Vec<A>::kWidth ? load(p) : load_part(p, n);
}

#endif

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
