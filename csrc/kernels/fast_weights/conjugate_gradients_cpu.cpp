// Conjugate gradients on the CPU, see conjugate_gradients.h: a system at a time, whose matrix stays
// in the caches.
#include "kernels/fast_weights/conjugate_gradients.h"

#include <algorithm>
#include <cmath>

#include "runtime/assert.h"
#include "runtime/denormals.h"
#include "runtime/dispatch.h"
#include "runtime/row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class C>
struct System {
  const int64_t width;
  const C *state, *lamb;
  C *r, *p, *y;  // residual, direction, and its product with the matrix

  C dot(const C* a, const C* b) const {
    return row_sum<C>(width,
                      [&](int64_t i, auto part) { return part.load(a + i) * part.load(b + i); });
  }
  // to += factor from
  void add(C factor, const C* from, C* to) const {
    for_row<C>(width, [&](int64_t i, auto part) {
      part.store(to + i, fma(part.load(from + i), Vec<C>(factor), part.load(to + i)));
    });
  }
  // y = (S + diag(lamb)) p. Four sums hide the latency of the addition.
  void multiply() const {
    constexpr int64_t kSums = 4;
    for_row<C>(width, [&](int64_t i, auto part) {
      Vec<C> sums[kSums] = {part.load(lamb + i) * part.load(p + i), Vec<C>(C{0}), Vec<C>(C{0}),
                            Vec<C>(C{0})};
      int64_t j = 0;
      for (; j + kSums <= width; j += kSums) {
#pragma GCC unroll 4
        for (int64_t n = 0; n < kSums; ++n) {
          sums[n] = fma(part.load(state + (j + n) * width + i), Vec<C>(p[j + n]), sums[n]);
        }
      }
      for (; j < width; ++j) {
        sums[0] = fma(part.load(state + j * width + i), Vec<C>(p[j]), sums[0]);
      }
      part.store(y + i, (sums[0] + sums[1]) + (sums[2] + sums[3]));
    });
  }
};

template <class C>
void solve_system(const ConjugateGradients& params, C* memory, int64_t n) {
  const int64_t K = params.width;
  const auto row = [&](const void* x) { return static_cast<const C*>(x) + n * K; };
  const System<C> s{.width = K,
                    .state = static_cast<const C*>(params.state) + n * K * K,
                    .lamb = row(params.lamb),
                    .r = memory,
                    .p = memory + K,
                    .y = memory + 2 * K};
  C* const x = static_cast<C*>(params.x) + n * K;
  const C* const q = row(params.q);
  // Squares of residuals would overflow or vanish for large and small q.
  C scale = 0;
  for (int64_t i = 0; i < K; ++i) scale = std::max(scale, std::abs(q[i]));
  if (!(scale > 0) || std::isinf(scale)) scale = 1;
  for (int64_t i = 0; i < K; ++i) s.r[i] = s.p[i] = q[i] / scale, x[i] = 0;
  C left = s.dot(s.r, s.r);
  const C enough = left * static_cast<C>(params.tolerance * params.tolerance);
  for (int64_t step = 0; step < params.iterations && !(left <= enough); ++step) {
    s.multiply();
    const C length = left / s.dot(s.p, s.y);
    s.add(length, s.p, x);
    s.add(-length, s.y, s.r);
    const C before = left;
    left = s.dot(s.r, s.r);
    const Vec<C> turn(left / before);
    for_row<C>(K, [&](int64_t i, auto part) {
      part.store(s.p + i, fma(part.load(s.p + i), turn, part.load(s.r + i)));
    });
  }
  for (int64_t i = 0; i < K; ++i) x[i] *= scale;
}

void solve(const ConjugateGradients& params, void* memory, int64_t begin, int64_t end) {
  const FlushDenormals flush;
  OMNIATTN_ASSERT_ITEMS(begin, end, params.systems);
  OMNIATTN_ASSERT_HAS(memory, params.bytes());
  dispatch_compute(params.dtype, [&]<class C>(C) {
    for (int64_t n = begin; n < end; ++n) solve_system(params, static_cast<C*>(memory), n);
  });
}

}  // namespace

extern const ConjugateGradientsKernels conjugate_gradients_kernels_table;
const ConjugateGradientsKernels conjugate_gradients_kernels_table{solve};

}  // namespace omniattn::OMNIATTN_ISA
