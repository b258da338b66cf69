// The storage type of a residual stream, for the norms' kernels.
#pragma once

#include "runtime/dtype.h"

namespace omniattn {

// Calls f(H{}) with the type of a stream that accumulates values of
// T: T, or float if T has 16 bits.
template <class T, class F>
[[gnu::always_inline]] inline void dispatch_stream(DType dtype, const F& f) {
  if constexpr (sizeof(T) == 2) {
    if (dtype == DType::f32) return f(float{});
  }
  f(T{});
}

}  // namespace omniattn
