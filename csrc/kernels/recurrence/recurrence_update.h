// The update of a chunk: makes the rows u that are added to the state, and turns their gradients
// into those of v and beta. Constants describe what an update reads and adds:
//
//   kProbe          the update reads the state, as `probe`
//   kProbesBefore   it reads the state before its token's decay
//   kBonus          outputs read the state before the update
//   kKeys           number of rows that a token adds to the state
//   kHeadDecay      true if it may come with one decay for all channels
//   kValueDecay     true if it may come with decays of values
#pragma once

#include "kernels/recurrence/recurrence_chunk.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Number of rows of a triangular system that are solved in registers.
constexpr int64_t kSolve = 8;

// u = beta v, or v itself without a beta.
struct PlainUpdate {
  static constexpr bool kProbe = false, kProbesBefore = false, kBonus = false, kHeadDecay = true;
  static constexpr bool kValueDecay = true;
  static constexpr int kKeys = 1;

  template <class C>
  static void values(Chunk<C>& c) {
    if (c.scales()) c.times_beta(c.v, c.updates);
  }

  // Turns x, the gradient of u, into dv, and adds to dskip, which may be null.
  template <class C>
  [[gnu::noinline]] static void gradient(const Chunk<C>& c, Matrix<C> x, Matrix<C> grad_o,
                                         C* dskip) {
    if (c.scales()) c.times_beta(x, x);
    if (c.skip != nullptr) add_skip(c.skip, grad_o, x, c.rows, c.V);
    for (int64_t i = 0; dskip != nullptr && i < c.rows; ++i) {
      add_skip(grad_o.row(i), c.v.at(i), Matrix<C>{dskip, 0}, 1, c.V);
    }
  }
};

struct BonusUpdate : PlainUpdate {
  static constexpr bool kBonus = true, kHeadDecay = false, kValueDecay = false;
};

// An unknown row x per token that depends on those of earlier tokens: x = -beta (error + M x),
// where M is zero on and above its diagonal. Solved by substitution.
struct Substitution {
  // Adds M x to `error`.
  template <class C>
  static void solve(Matrix<C> M, const C* beta, Matrix<C> error, Matrix<C> x, int64_t rows,
                    int64_t width) {
    for (int64_t i = 0; i < rows; i += kSolve) {
      const int64_t n = smaller(kSolve, rows - i);
      if (i > 0) multiply(M.at(i), x, error.at(i), n, width, i, Into::add);
      solve_down(M.at(i, i), beta + i, n, error.at(i), x.at(i), width);
    }
  }

  // On entry dx is the gradient of x without its share through M x. It becomes the full gradient,
  // dx + M^T de; `de`, -beta dx, is the gradient of the error.
  template <class C>
  static void gradient(Matrix<C> M, const C* beta, Matrix<C> dx, Matrix<C> de, int64_t rows,
                       int64_t width) {
    for (int64_t i = (rows - 1) / kSolve * kSolve; i >= 0; i -= kSolve) {
      const int64_t n = smaller(kSolve, rows - i), end = i + n;
      if (end < rows) {
        multiply<ALayout::kTransposed>(M.at(end, i), de.at(end), dx.at(i), n, width, rows - end,
                                       Into::add);
      }
      solve_up(M.at(i, i), beta + i, n, dx.at(i), de.at(i), width);
    }
  }

 private:
  template <class C>
  static void solve_down(Matrix<C> M, const C* beta, int64_t n, Matrix<C> error, Matrix<C> u,
                         int64_t width) {
    for_row<C>(width, [&](int64_t j, auto part) {
      Vec<C> found[kSolve];
#pragma GCC unroll 8
      for (int i = 0; i < kSolve; ++i) {
        if (i >= n) break;
        Vec<C> x = part.load(error.row(i) + j);
#pragma GCC unroll 8
        for (int r = 0; r < i; ++r) x = fma(Vec<C>(M.row(i)[r]), found[r], x);
        found[i] = x * -beta[i];
        part.store(error.row(i) + j, x);
        part.store(u.row(i) + j, found[i]);
      }
    });
  }

  template <class C>
  static void solve_up(Matrix<C> M, const C* beta, int64_t n, Matrix<C> x, Matrix<C> de,
                       int64_t width) {
    for_row<C>(width, [&](int64_t j, auto part) {
      Vec<C> found[kSolve];
#pragma GCC unroll 8
      for (int i = kSolve - 1; i >= 0; --i) {
        if (i >= n) continue;
        Vec<C> sum = part.load(x.row(i) + j);
#pragma GCC unroll 8
        for (int r = kSolve - 1; r > i; --r) {
          if (r < n) sum = fma(Vec<C>(M.row(r)[i]), found[r], sum);
        }
        found[i] = sum * -beta[i];
        part.store(x.row(i) + j, sum);
        part.store(de.row(i) + j, found[i]);
      }
    });
  }
};

// u = beta (v - prediction). The prediction consists of that of the state at the start of the
// chunk, probe_in S, and of that of earlier updates, N u. c.error holds the prediction minus v.
struct DeltaUpdate {
  static constexpr bool kProbe = true, kProbesBefore = false, kBonus = false, kHeadDecay = true;
  static constexpr bool kValueDecay = false;
  static constexpr int kKeys = 1;

  // On entry c.error is probe_in S.
  template <class C>
  static void values(Chunk<C>& c) {
    for (int64_t i = 0; i < c.rows; ++i) {
      C* const x = c.error.row(i);
      const C* const v = c.v.row(i);
      for_row<C>(c.V, [=](int64_t j, auto part) {
        part.store(x + j, part.load(x + j) - part.load(v + j));
      });
    }
    Substitution::solve(c.N, c.beta, c.error, c.updates, c.rows, c.V);
  }

  // On entry x is the gradient of u without its share through later predictions; it becomes the
  // full gradient. `de` is the gradient of the prediction, which is -dv.
  template <class C>
  static void gradient(const Chunk<C>& c, Matrix<C> x, Matrix<C> de) {
    Substitution::gradient(c.N, c.beta, x, de, c.rows, c.V);
  }
};

// u = [v; c], where c is the state's output for the probe: probe_in S + N v + N_b c.
struct LowRankUpdate {
  static constexpr bool kProbe = true, kProbesBefore = true, kBonus = false, kHeadDecay = false;
  static constexpr bool kValueDecay = false;
  static constexpr int kKeys = 2;

  // On entry c.error is probe_in S.
  template <class C>
  static void values(Chunk<C>& c) {
    multiply_lower(c.N, c.u, c.error, c.rows, c.V);
    Substitution::solve(c.N_b, c.beta, c.error, c.updates.at(c.rows), c.rows, c.V);
  }

  // Adds to x, the gradient of u, its share through N; `de` is the gradient of c.
  template <class C>
  static void gradient(const Chunk<C>& c, Matrix<C> x, Matrix<C> de) {
    Substitution::gradient(c.N_b, c.beta, x.at(c.rows), de, c.rows, c.V);
    multiply_lower_transposed(c.N, de, x, c.rows, c.V, Into::add);
  }
};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
