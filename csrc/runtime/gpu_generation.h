// The generation of the current GPU: the major number of its compute capability.
#pragma once

#include "runtime/gpu.h"

namespace omniattn::gpu {

inline int64_t generation() {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return major;
}

}  // namespace omniattn::gpu
