// The k largest elements of each row, in descending order; equal scores are ordered by index. -0
// equals +0, NaN is less than -inf, and masked elements are never chosen; missing elements are -1.
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"
#include "runtime/stream.h"
#include "semantics/seqlen.h"

namespace omniattn {

struct TopKParams {
  DType dtype;
  int64_t n, k;
  const void* scores;   // (rows, n)
  const uint8_t* mask;  // (rows, n), 0: never chosen; or null
  int64_t* index;       // (rows, k)
  int64_t scores_stride, mask_stride;
};
static_assert(std::is_trivially_copyable_v<TopKParams>);

struct TopKKernels {
  // Item: row. `scratch` holds top_k_scratch(n) elements of the compute type.
  void (*top_k)(const TopKParams&, void* scratch, int64_t begin, int64_t end);
};

constexpr int64_t kTopKGroup = 256;  // elements that share a vector of maxima
constexpr int64_t top_k_scratch(int64_t n) {
  return ceil_div(n, kTopKGroup) * (kTopKGroup + 16);  // at most 16 lanes per vector
}

OMNIATTN_KERNEL_TABLE(TopKKernels, topk_kernels)

Status launch_top_k(const TopKParams& p, int64_t rows, Stream stream);

}  // namespace omniattn
