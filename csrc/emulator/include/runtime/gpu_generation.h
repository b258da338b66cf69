// The generation of the emulated GPU, as of an H100: see csrc/runtime/gpu_generation.h.
#pragma once

#include <cstdint>

namespace omniattn::gpu {

inline int64_t generation() { return 9; }

}  // namespace omniattn::gpu
