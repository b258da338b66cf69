// The device that this library is for, and how its CUDA kernels are launched.
//
// A file of this folder without a device suffix is compiled for both devices. Differences are
// marked by
//
//   if constexpr (kOnCuda) {
//     require_launched(op, launch_norm(params, stream()));
//   } else {
//     run_items(params, rows, cols, norm_kernels(params.dtype).forward);
//   }
//
// The compiler checks the other branch, but nothing in it is called or linked.
#pragma once

#include "ops/checks.h"
#include "ops/parallel.h"
#include "ops/tensor.h"
#include "runtime/stream.h"

namespace omniattn::ops {

// True if this library runs the CUDA kernels: on a GPU, or emulated for tensors on the CPU.
#if defined(OMNIATTN_CUDA) || defined(OMNIATTN_EMULATED)
inline constexpr bool kOnCuda = true;
#else
inline constexpr bool kOnCuda = false;
#endif

// torch's current stream on the current device; null under emulation.
inline Stream stream() {
  void* current = nullptr;
#if defined(OMNIATTN_CUDA)
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index(), &current));
#endif
  return static_cast<Stream>(current);
}

#if defined(OMNIATTN_CUDA_ARCHS)
inline constexpr const char* kArchitectures = OMNIATTN_CUDA_ARCHS;
#else
inline constexpr const char* kArchitectures = "the emulator";
#endif

inline void require_launched(const char* op, Status status) {
  require(status == nullptr, op, "the CUDA launch failed: ", status, " (kernels are built for ",
          kArchitectures, ')');
}

}  // namespace omniattn::ops
