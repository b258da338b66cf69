// What an update does in a chunk: it makes the rows u that are added to the state, and turns their
// gradients into those of v and beta.
#pragma once

#include "kernels/recurrence/recurrence_chunk.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Rows of a triangular system that are solved in registers.
constexpr int64_t kSolve = 8;

// u = v.
struct PlainUpdate {
  static constexpr bool kDelta = false;

  template <class T, class C>
  static void values(Chunk<C>& c, const T* v, int64_t stride) {
    copy_rows(v, stride, c.rows, c.V, c.u);
  }
};

// u = beta (v - prediction), where the prediction is that of the state at the start of the chunk,
// k_in S, and of the updates before this one, N u. The matrix is lower triangular with a unit
// diagonal, and solved by substitution. c.error holds the prediction minus v.
struct DeltaUpdate {
  static constexpr bool kDelta = true;

  // On entry c.error is k_in S.
  template <class T, class C>
  static void values(Chunk<C>& c, const T* v, int64_t stride) {
    for (int64_t i = 0; i < c.rows; i += kSolve) {
      const int64_t n = smaller(kSolve, c.rows - i);
      for (int64_t r = i; r < i + n; ++r) {
        for_row<T>(c.V, [&](int64_t j, auto part) {
          C* const x = c.error.row(r) + j;
          part.store(x, part.load(x) - part.load(v + r * stride + j));
        });
      }
      if (i > 0) multiply(c.N.at(i), c.u, c.error.at(i), n, c.V, i, Into::add);
      solve_down(c.N.at(i, i), c.beta + i, n, c.error.at(i), c.u.at(i), c.V);
    }
  }

  // x, on entry the gradient of u, becomes that of what beta multiplies; `de` that of the
  // prediction, minus the gradient of v: x = du + N^T de, de = -beta x.
  template <class C>
  static void gradient(const Chunk<C>& c, Matrix<C> x, Matrix<C> de) {
    for (int64_t i = (c.rows - 1) / kSolve * kSolve; i >= 0; i -= kSolve) {
      const int64_t n = smaller(kSolve, c.rows - i), end = i + n;
      if (end < c.rows) {
        multiply<ALayout::kTransposed>(c.N.at(end, i), de.at(end), x.at(i), n, c.V, c.rows - end,
                                       Into::add);
      }
      solve_up(c.N.at(i, i), c.beta + i, n, x.at(i), de.at(i), c.V);
    }
  }

 private:
  template <class C>
  static void solve_down(Matrix<C> N, const C* beta, int64_t n, Matrix<C> error, Matrix<C> u,
                         int64_t width) {
    for_row<C>(width, [&](int64_t j, auto part) {
      Vec<C> found[kSolve];
#pragma GCC unroll 8
      for (int i = 0; i < kSolve; ++i) {
        if (i >= n) break;
        Vec<C> x = part.load(error.row(i) + j);
#pragma GCC unroll 8
        for (int r = 0; r < i; ++r) x = fma(Vec<C>(N.row(i)[r]), found[r], x);
        found[i] = x * -beta[i];
        part.store(error.row(i) + j, x);
        part.store(u.row(i) + j, found[i]);
      }
    });
  }

  template <class C>
  static void solve_up(Matrix<C> N, const C* beta, int64_t n, Matrix<C> x, Matrix<C> de,
                       int64_t width) {
    for_row<C>(width, [&](int64_t j, auto part) {
      Vec<C> found[kSolve];
#pragma GCC unroll 8
      for (int i = kSolve - 1; i >= 0; --i) {
        if (i >= n) continue;
        Vec<C> sum = part.load(x.row(i) + j);
#pragma GCC unroll 8
        for (int r = kSolve - 1; r > i; --r) {
          if (r < n) sum = fma(Vec<C>(N.row(r)[i]), found[r], sum);
        }
        found[i] = sum * -beta[i];
        part.store(x.row(i) + j, sum);
        part.store(de.row(i) + j, found[i]);
      }
    });
  }
};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
