// Feature maps of linear attention, and the divisor of its outputs.
#pragma once

#include <cstdint>

#include "semantics/macros.h"

namespace omniattn {

// Numbered as in python/omniattn/ops/recurrence.py. Each slope is computed from the map's value.
enum class FeatureMap : int32_t {
  identity = 0,
  elu1 = 1,  // elu(x) + 1: e^x for x <= 0, else x + 1
  relu = 2,
  squared_relu = 3,
  exp = 4,
};
inline constexpr int64_t kFeatureMapCount = 5;

// Divisor of an output, and its slopes in the sum of weights and in `min_denominator`:
// max(|sum|, min_denominator) + eps. Without `min_denominator` (null) the divisor is the sum
// itself, its size raised to eps if it is smaller.
template <class C>
struct Divisor {
  C value, by_sum, by_min_denominator;
};
template <class C>
OMNIATTN_FN Divisor<C> divisor(C sum, const C* min_denominator, C eps) {
  const bool negative = sum < C(0), given = min_denominator != nullptr;
  const C size = negative ? -sum : sum, bound = given ? *min_denominator : eps;
  const bool small = size < bound;  // false for NaN
  const C value = small ? bound : size, sign = negative ? C(-1) : C(1);
  if (given) return {value + eps, small ? C(0) : sign, small ? C(1) : C(0)};
  return {sign * value, small ? C(0) : C(1), C(0)};
}

}  // namespace omniattn
