// The k largest of each row, in order: larger first, at equal scores the smaller index. -0 equals
// +0, NaN lies below -inf, masked elements are never chosen; where fewer than k are left, -1.
//
// One pass over the row keeps the list of the best so far; a vector without an element above the
// worst of the list is skipped, so that k << n costs little more than reading the row.
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"

namespace omniattn {

struct TopKParams {
  DType dtype;
  int64_t n, k;
  const void* scores;   // (rows, n)
  const uint8_t* mask;  // (rows, n), 0: never chosen, or null
  int64_t* index;       // (rows, k)
  int64_t scores_stride, mask_stride;
};
static_assert(std::is_trivially_copyable_v<TopKParams>);

struct TopKKernels {
  void (*top_k)(const TopKParams&, int64_t begin, int64_t end);  // item: row
};

OMNIATTN_KERNEL_TABLE(TopKKernels, topk_kernels)

}  // namespace omniattn
