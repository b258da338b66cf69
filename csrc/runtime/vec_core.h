// The vector type that the backends of vec.h share, and operations that compile to good code on all
// of them.
#pragma once

#include <cstdint>
#include <type_traits>
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

// Vectors of pairs of 16-bit numbers (PairVec) need 512 bits. OMNIATTN_WIDE_VECTORS builds them
// from shorter ones, for software tiles on machines without AVX-512.
#if defined(__AVX512F__) || defined(OMNIATTN_WIDE_VECTORS)
#define OMNIATTN_PAIRS
#endif

// A release builds the baseline for size (cmake/isa.cmake): there the compiler decides on inlining,
// and row.h walks rows in a single way.
#if defined(__OPTIMIZE_SIZE__)
#define OMNIATTN_INLINE inline
#define OMNIATTN_FOR_SIZE true
#else
#define OMNIATTN_INLINE [[gnu::always_inline]] inline
#define OMNIATTN_FOR_SIZE false
#endif

namespace omniattn::OMNIATTN_ISA {
namespace {

#if defined(OMNIATTN_PAIRS)
constexpr int kVecBytes = 64;
#elif defined(__AVX2__)
constexpr int kVecBytes = 32;
#else
constexpr int kVecBytes = 16;
#endif

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
  OMNIATTN_INLINE Vec(T scalar) : v(scalar - Raw{}) {}  // a + would lose the sign of -0
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
// Lane indices 0, 1, 2, ... as numbers.
template <class T>
OMNIATTN_INLINE Vec<T> lane_index() {
  return Vec<T>(__builtin_convertvector(lane_index_bits<T>(), typename Vec<T>::Raw));
}

template <class V>
struct VecPair {
  V first, second;
};
// Concatenates the lanes of a and b and separates the even from the odd lanes.
template <class T>
OMNIATTN_INLINE VecPair<Vec<T>> deinterleave(Vec<T> a, Vec<T> b) {
  return [&]<int... I>(std::integer_sequence<int, I...>) -> VecPair<Vec<T>> {
    return {Vec<T>(__builtin_shufflevector(a.v, b.v, (2 * I)...)),
            Vec<T>(__builtin_shufflevector(a.v, b.v, (2 * I + 1)...))};
  }(std::make_integer_sequence<int, Vec<T>::kWidth>{});
}
// Inverse of deinterleave: a0, b0, a1, b1, ...
template <class T>
OMNIATTN_INLINE VecPair<Vec<T>> interleave(Vec<T> a, Vec<T> b) {
  constexpr int kWidth = Vec<T>::kWidth;
  return [&]<int... I>(std::integer_sequence<int, I...>) -> VecPair<Vec<T>> {
    return {Vec<T>(__builtin_shufflevector(a.v, b.v, (I / 2 + I % 2 * kWidth)...)),
            Vec<T>(__builtin_shufflevector(a.v, b.v, ((I + kWidth) / 2 + I % 2 * kWidth)...))};
  }(std::make_integer_sequence<int, kWidth>{});
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
