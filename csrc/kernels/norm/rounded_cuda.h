// Rounds values to the dtype of a row between two steps, for the norms' CUDA kernels.
#pragma once

#include "runtime/gpu.h"

namespace omniattn {
namespace {

// x, rounded to T if `cast`.
template <class T>
__device__ __forceinline__ compute_t<T> rounded_if(bool cast, compute_t<T> x) {
  return cast ? gpu::widen(gpu::narrow<T>(x)) : x;
}

}  // namespace
}  // namespace omniattn
