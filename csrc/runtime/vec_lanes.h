// Masks of backends without predicate registers: lanes of all ones or zeros.
#pragma once

#include "runtime/vec_core.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

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
  // Index of the first lane that is set; at least one must be.
  OMNIATTN_INLINE friend int first(Mask a) {
    int lane = 0;
    while (a.m[lane] == 0) ++lane;
    return lane;
  }
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

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
