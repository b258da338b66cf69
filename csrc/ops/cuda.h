// The current stream and launch errors, for the CUDA files of this folder.
#pragma once

#include "ops/checks.h"
#include "ops/tensor.h"
#include "runtime/stream.h"

namespace omniattn::ops {

// torch's current stream of the current device. (Kernels under emulation have none.)
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
