// Rows of int8 with a factor each: a storage type whose numbers are multiplied in the type A.
#pragma once

#include "runtime/dtype.h"

namespace omniattn {

template <class A>
struct Int8 {
  int8_t value;
};
template <class A>
struct TypeTraits<Int8<A>> {
  using Compute = A;
};

template <class A>
OMNIATTN_FN A widen(Int8<A> x) {
  return static_cast<A>(x.value);
}

}  // namespace omniattn
