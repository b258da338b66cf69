// From a run-time dtype to a storage type.
#pragma once

#include "runtime/assert.h"
#include "runtime/dtype.h"

namespace omniattn {

// f(T{}) with T = double, float, bf16 or f16. Objects for a dot product of bf16 know only bf16, see
// runtime/cpu_isa.h.
template <class F>
[[gnu::always_inline]] inline void dispatch(DType dtype, const F& f) {
#if defined(__AVX512BF16__) || defined(OMNIATTN_EMULATE_BF16_DOT)
  if (dtype == DType::bf16) return f(bf16{});
#else
  switch (dtype) {
    case DType::f64:
      return f(double{});
    case DType::f32:
      return f(float{});
    case DType::bf16:
      return f(bf16{});
    case DType::f16:
      return f(f16{});
  }
#endif
  OMNIATTN_FAIL("a kernel was called with a dtype that it was not built for");
}

}  // namespace omniattn
