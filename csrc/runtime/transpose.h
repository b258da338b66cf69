// Matrices stored transposed.
#pragma once

#include "runtime/vec.h"
#include "semantics/arith.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// to (cols, rows) = factor times the transpose of from (rows, cols), converted to T.
template <class S, class T>
void store_transposed(const S* from, int64_t ld, int64_t rows, int64_t cols, compute_t<S> factor,
                      T* to, int64_t ld_to) {
  using V = Vec<compute_t<S>>;
  static_assert(sizeof(compute_t<S>) == sizeof(compute_t<T>));
  for (int64_t c = 0; c < cols; c += V::kWidth) {
    for (int64_t r = 0; r < rows; r += V::kWidth) {
      const bool whole = r + V::kWidth <= rows && c + V::kWidth <= cols;
      V block[V::kWidth];
#pragma GCC unroll 16
      for (int64_t i = 0; i < V::kWidth; ++i) {
        const S* const row = from + smaller(r + i, rows - 1) * ld + c;
        block[i] = (whole ? load(row) : load_n(row, cols - c)) * V(factor);
      }
      transpose(block);
#pragma GCC unroll 16
      for (int64_t i = 0; i < V::kWidth; ++i) {
        T* const out = to + (c + i) * ld_to + r;
        if (whole) {
          store(out, block[i]);
        } else if (c + i < cols) {
          store_n(out, block[i], rows - r);
        }
      }
    }
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
