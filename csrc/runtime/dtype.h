// Storage types and their scalar conversions. Half types are plain bit patterns: arithmetic is in
// compute_t<T>; narrowing rounds to nearest, ties to even, and keeps NaN.
#pragma once

#include <cstdint>

#include "semantics/macros.h"

namespace omniattn {

enum class DType : int32_t { f64, f32, bf16, f16 };

struct bf16 {
  uint16_t bits;
};

struct f16 {
  uint16_t bits;
};

template <class T>
struct TypeTraits;
template <>
struct TypeTraits<double> {
  using Compute = double;
  static constexpr DType kDType = DType::f64;
};
template <>
struct TypeTraits<float> {
  using Compute = float;
  static constexpr DType kDType = DType::f32;
};
template <>
struct TypeTraits<bf16> {
  using Compute = float;
  static constexpr DType kDType = DType::bf16;
};
template <>
struct TypeTraits<f16> {
  using Compute = float;
  static constexpr DType kDType = DType::f16;
};

// The type in which values of type T are computed and accumulated.
template <class T>
using compute_t = typename TypeTraits<T>::Compute;

OMNIATTN_FN int64_t size_of(DType dtype) {
  return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2;
}

OMNIATTN_FN double widen(double x) { return x; }
OMNIATTN_FN float widen(float x) { return x; }
OMNIATTN_FN float widen(bf16 x) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16);
}
OMNIATTN_FN float widen(f16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude < 0x0400u) {  // zero or subnormal: a multiple of 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, value) | sign);
  }
  const uint32_t rebias = magnitude >= 0x7c00u ? 224u << 23 : 112u << 23;
  return __builtin_bit_cast(float, ((magnitude << 13) + rebias) | sign);
}

// narrow<T>(x): from the compute type to T.
template <class T>
OMNIATTN_FN T narrow(compute_t<T> x) {
  return x;
}
template <>
OMNIATTN_FN bf16 narrow<bf16>(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
OMNIATTN_FN f16 narrow<f16>(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half = 0;
  if (magnitude > 0x7f800000u) {  // NaN becomes quiet
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // subnormal: the addition rounds to a multiple of 2^-24
    const float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
    half = __builtin_bit_cast(uint32_t, shifted) - 0x3f000000u;
  } else {
    half = ((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) >> 13) - (112u << 10);
  }
  return {static_cast<uint16_t>(half | sign)};
}

}  // namespace omniattn
