// Elementwise random draws, functions of the element's index alone (semantics/element_stream.h):
//
//   dropout       y = x / (1 - p) where the element's word >= floor(p 2^32), else 0. The gradient
//                 is the same function of dy: the backward is the forward, and no mask is saved.
//   uniform_like  y = the word's upper 24 bits / 2^24
//
// Tensors are contiguous. A work item is a block of kRandomBlock elements.
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"
#include "runtime/stream.h"
#include "semantics/element_stream.h"

namespace omniattn {

inline constexpr int64_t kRandomBlock = 1024;

struct DropoutParams {
  DType dtype;
  int64_t n;
  const void* x;
  void* y;
  uint32_t threshold;  // floor(p * 2^32); p < 1
  double scale;        // 1 / (1 - p)
  ElementStream stream;
  const int64_t* seed;  // (2,) for kernels that read it themselves (CUDA); null: see stream
};

struct UniformParams {
  int64_t n;
  float* y;
  ElementStream stream;
  const int64_t* seed;  // as above
};
static_assert(std::is_trivially_copyable_v<DropoutParams>);
static_assert(std::is_trivially_copyable_v<UniformParams>);

struct RandomKernels {
  void (*dropout)(const DropoutParams&, int64_t begin, int64_t end);
  void (*uniform)(const UniformParams&, int64_t begin, int64_t end);
};

OMNIATTN_KERNEL_TABLE(RandomKernels, random_kernels)

Status launch_dropout(const DropoutParams& p, Stream stream);
Status launch_uniform(const UniformParams& p, Stream stream);

}  // namespace omniattn
