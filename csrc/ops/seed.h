// [seed, offset] of random draws (semantics/element_stream.h) at the torch boundary.
#pragma once

#include "ops/tensor.h"
#include "semantics/element_stream.h"

namespace omniattn::ops {

inline void require_seed(const char* op, const Tensor& seed) {
  require(seed.scalar_type() == ScalarType::Long && seed.dim() == 1 && seed.size(0) == 2 &&
              (seed.is_cpu() || is_here(seed)) && has_memory(seed),
          op, "seed must be an int64 tensor [seed, offset] on the CPU or the device of the call");
}

// Stream of a seed that lies on the CPU.
inline ElementStream read_seed(const Tensor& seed) {
  const auto* const words = static_cast<const int64_t*>(seed.const_data_ptr());
  return {philox_key(words[0]), static_cast<uint32_t>(words[seed.stride(0)])};
}

}  // namespace omniattn::ops
