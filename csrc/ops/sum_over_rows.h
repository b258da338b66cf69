// Sums over rows on the CPU, for the gradients of the weights of normalisations.
#pragma once

#include "kernels/norm/norm.h"

#include <algorithm>
#include <cstring>

#include "ops/parallel.h"
#include "ops/tensor.h"

namespace omniattn::ops {

// backward(dw, db, begin, end) for shards of the rows, each with its own sums (groups * cols) of
// dweight and dbias in the accumulator type (null where the result is), which are then added in
// order. Within a group the sums lie in the order that the kernel walks it (runtime/row.h).
template <class F>
void sum_over_rows(DType dtype, int64_t rows, int64_t groups, int64_t cols, void* dweight,
                   void* dbias, const F& backward) {
  const DType acc = accumulator(dtype);
  const int64_t shards = std::clamp<int64_t>(rows / grain_of(groups * cols), 1, 8);
  const int64_t dw_cols = dweight ? groups * cols : 0, db_cols = dbias ? groups * cols : 0;
  const int64_t width = dw_cols + db_cols;
  const Tensor partial = scratch(shards * width, acc);
  char* const sums = static_cast<char*>(partial.mutable_data_ptr());
  const int64_t size = size_of(acc);
  if (width > 0) std::memset(sums, 0, static_cast<size_t>(shards * width * size));
  parallel_shards(rows, shards, [&](int64_t s, int64_t a, int64_t b) {
    char* const mine = sums + s * width * size;
    backward(dweight ? mine : nullptr, dbias ? mine + dw_cols * size : nullptr, a, b);
  });
  const auto reduce = norm_kernels().sum_shards;
  const auto reduce_groups = [&](const char* from, void* out) {
    if (out == nullptr) return;
    for (int64_t first = 0; first < groups * cols; first += cols) {
      reduce(dtype, from + first * size, shards, width, cols,
             static_cast<char*>(out) + first * size_of(dtype));
    }
  };
  reduce_groups(sums, dweight);
  reduce_groups(sums + dw_cols * size, dbias);
}

}  // namespace omniattn::ops
