// Sums over rows, for the gradients of weights that all rows share.
#pragma once

#include "kernels/sums/sums.h"

#include <algorithm>
#include <cstring>

#include "ops/parallel.h"
#include "ops/tensor.h"

namespace omniattn::ops {

// CUDA only: memory for the partial sums of dweight and dbias, (cols) each if wanted.
inline Tensor partial_sums(const Output& dweight, const Output& dbias, int64_t shards,
                           int64_t cols) {
  const int64_t wanted = (dweight.data() ? 1 : 0) + (dbias.data() ? 1 : 0);
  return scratch(wanted * shards * cols, accumulator(dweight.dtype()));
}

// A result (groups * cols); null if it is not wanted.
struct RowSums {
  void* data = nullptr;
  int64_t groups = 0;

  RowSums() = default;
  RowSums(const Output& result, int64_t count) : data(result.data()), groups(count) {}
};

// CPU only: calls backward(dw, db, begin, end) for shards of the rows, each with its own sums of
// dweight and dbias in the accumulator type (null if the result is null), and adds the shards in
// order. Within a group the sums are in the order in which the kernel walks it (runtime/row.h).
template <class F>
void sum_over_rows(DType dtype, int64_t rows, int64_t cols, RowSums dweight, RowSums dbias,
                   const F& backward) {
  const DType acc = accumulator(dtype);
  const int64_t groups = std::max(dweight.groups, dbias.groups);
  const int64_t shards = std::clamp<int64_t>(rows / grain_of(groups * cols), 1, 8);
  const int64_t dw_cols = dweight.data ? dweight.groups * cols : 0;
  const int64_t db_cols = dbias.data ? dbias.groups * cols : 0;
  const int64_t width = dw_cols + db_cols;
  const Tensor partial = scratch(shards * width, acc);
  char* const sums = static_cast<char*>(partial.mutable_data_ptr());
  const int64_t size = size_of(acc);
  if (width > 0) std::memset(sums, 0, static_cast<size_t>(shards * width * size));
  parallel_shards(rows, shards, [&](int64_t s, int64_t a, int64_t b) {
    char* const mine = sums + s * width * size;
    backward(dweight.data ? mine : nullptr, dbias.data ? mine + dw_cols * size : nullptr, a, b);
  });
  const auto reduce = sum_kernels(dtype).sum_shards;
  const auto reduce_groups = [&](const char* from, RowSums out) {
    if (out.data == nullptr) return;
    for (int64_t first = 0; first < out.groups * cols; first += cols) {
      reduce(dtype, from + first * size, shards, width, cols,
             static_cast<char*>(out.data) + first * size_of(dtype));
    }
  };
  reduce_groups(sums, dweight);
  reduce_groups(sums + dw_cols * size, dbias);
}
// sum_over_rows for a kernel that takes just its params, the sums and the range of rows.
template <class Params>
void sum_over_rows(const Params& p, int64_t rows, int64_t cols, RowSums dweight, RowSums dbias,
                   void (*backward)(const Params&, void*, void*, int64_t, int64_t)) {
  sum_over_rows(p.dtype, rows, cols, dweight, dbias,
                [&](void* dw, void* db, int64_t a, int64_t b) { backward(p, dw, db, a, b); });
}

}  // namespace omniattn::ops
