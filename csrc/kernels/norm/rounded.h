// Rounds values to the dtype of a row between two steps, for the norms' kernels.
#pragma once

#include "runtime/row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// x rounded to T by a store to, and a load from, elements of a row that is overwritten later.
template <class T, class V>
OMNIATTN_INLINE V rounded_in(T* row, int64_t i, auto part, V x) {
  if constexpr (sizeof(T) == sizeof(compute_t<T>)) return x;
  part.store(row + i, x);
  return part.load(row + i);
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
