// norm, add_norm, norm_backward on the CPU: split over threads.
#include "ops/norm.h"

#include "ops/parallel.h"

namespace {

// Rows per task: about 16 KiB of work, so that a task costs more than handing it out.
int64_t grain_of(int64_t cols) { return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, cols)); }

void run_forward(const NormParams& p) {
  const auto forward = norm_kernels().forward;
  parallel_ranges(p.rows, grain_of(p.cols), [&](int64_t a, int64_t b) { forward(p, a, b); });
}

void run_backward(const NormBackwardParams& p, void* dweight, void* dbias) {
  // One partial sum of dweight and dbias per shard of rows, added in order.
  const DType acc = accumulator(p.dtype);
  const int64_t shards = std::clamp<int64_t>(p.rows / grain_of(p.cols), 1, 8);
  const int64_t dw_cols = dweight ? p.cols : 0, db_cols = dbias ? p.cols : 0;
  const int64_t width = dw_cols + db_cols;
  const int64_t partial_sizes[] = {shards, width};
  Tensor partial = empty_tensor({partial_sizes, 2}, acc);
  torch::stable::zero_(partial);
  char* const sums = static_cast<char*>(partial.mutable_data_ptr());
  const int64_t size = size_of(acc);
  const auto backward = norm_kernels().backward;
  parallel_shards(p.rows, shards, [&](int64_t s, int64_t a, int64_t b) {
    char* const mine = sums + s * width * size;
    backward(p, dweight ? mine : nullptr, dbias ? mine + dw_cols * size : nullptr, a, b);
  });
  const auto reduce = norm_kernels().sum_shards;
  reduce(p.dtype, sums, shards, width, dw_cols, dweight);
  reduce(p.dtype, sums + dw_cols * size, shards, width, db_cols, dbias);
}

}  // namespace
