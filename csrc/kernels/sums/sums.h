// The second stage of sums over rows: adds the partial sums of shards of the rows in a fixed order.
#pragma once

#include <cstdint>

#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"
#include "runtime/stream.h"

namespace omniattn {

struct SumKernels {
  // out (n) in `dtype` = sum over shards of partial (shards, n) in the accumulator type, in order;
  // `stride` elements between shards.
  void (*sum_shards)(DType dtype, const void* partial, int64_t shards, int64_t stride, int64_t n,
                     void* out);
};

OMNIATTN_KERNEL_TABLE(SumKernels, sum_kernels)

// CUDA launcher; does nothing if out is null. The caller checks the status of the launch.
void launch_sum_shards(DType dtype, const void* partial, int64_t shards, int64_t stride, int64_t n,
                       void* out, Stream stream);

// Gradients of a weight and a bias that all rows share; null if not wanted.
struct WeightGradients {
  void* partial;  // (shards, cols) in the accumulator type per gradient wanted, dweight first
  void *dweight, *dbias;
};

}  // namespace omniattn
