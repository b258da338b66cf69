// Maps a run-time dtype to a storage type.
#pragma once

#include "runtime/assert.h"
#include "runtime/isa.h"

namespace omniattn {

namespace {

// True if this object has kernels for T: product-only ISAs have them for some types only, and one
// ISA alone has them for double.
template <class T>
#if defined(OMNIATTN_ISA)
constexpr bool kIsBuiltFor = has_kernels_for(OMNIATTN_ISA::kIsa, TypeTraits<T>::kDType);
#else
constexpr bool kIsBuiltFor = true;
#endif

}  // namespace

// Calls f(T{}) with T = double, float, bf16 or f16.
template <class F>
[[gnu::always_inline]] inline void dispatch(DType dtype, const F& f) {
  switch (dtype) {
    case DType::f64:
      if constexpr (kIsBuiltFor<double>) return f(double{});
      break;
    case DType::f32:
      if constexpr (kIsBuiltFor<float>) return f(float{});
      break;
    case DType::bf16:
      if constexpr (kIsBuiltFor<bf16>) return f(bf16{});
      break;
    case DType::f16:
      if constexpr (kIsBuiltFor<f16>) return f(f16{});
      break;
  }
  OMNIATTN_FAIL("a kernel was called with a dtype that it was not built for");
}

// Calls f(C{}) with the compute type of a dtype.
template <class F>
[[gnu::always_inline]] inline void dispatch_compute(DType dtype, const F& f) {
  if (dtype != DType::f64) return f(float{});
  if constexpr (kIsBuiltFor<double>) {
    f(double{});
  } else {
    OMNIATTN_FAIL("a kernel was called with float64, which it was not built for");
  }
}

}  // namespace omniattn
