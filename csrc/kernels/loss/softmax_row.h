// Softmax over one long row on the CPU, for the losses.
#pragma once

#include "runtime/row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Columns between two updates of the running maximum; they stay in L1 for the second sweep.
constexpr int64_t kBlock = 4096;

// e^(x - less) for results of at most 1, with relative error 4e-7 in fp32, less than
// the error of the rounded sums.
OMNIATTN_INLINE VecF softmax_exp(VecF x, VecF less = 0.0f) {
  constexpr float kLog2E = 1.442695041f;
  return exp2(fma(x, VecF(kLog2E), -less * kLog2E));
}
OMNIATTN_INLINE VecD softmax_exp(VecD x, VecD less = 0.0) { return exp(x - less); }

template <class C>
OMNIATTN_INLINE C scalar_exp(C x) {
  return exp(Vec<C>(x)).v[0];
}
template <class C>
OMNIATTN_INLINE C scalar_log(C x) {
  return log(Vec<C>(x)).v[0];
}

// Maps a logit x through cap and temperature, and gives the derivative: x / T and 1 / T, or c
// tanh(x / c) / T and (1 - tanh^2) / T. A tanh costs more than all other work on an element,
// so there are kernels without it.
template <class C, bool kCapped>
class Logits {
 public:
  Logits(double temperature, double softcap)
      : scale_(static_cast<C>(1 / temperature)),
        cap_(static_cast<C>(softcap)),
        top_(static_cast<C>(softcap / temperature)) {}

  OMNIATTN_INLINE Vec<C> operator()(Vec<C> x) const {
    if constexpr (!kCapped) return x * scale_;
    return top_ * tanh(x / cap_);
  }
  OMNIATTN_INLINE C scalar(C x) const { return (*this)(Vec<C>(x)).v[0]; }
  // dx, which includes the factor 1 / T, times the derivative of the cap where it gave `made`.
  OMNIATTN_INLINE Vec<C> back(Vec<C> dx, Vec<C> made) const {
    if constexpr (!kCapped) return dx;
    const Vec<C> t = made / top_;
    return dx * (C(1) - t * t);
  }
  C scale() const { return scale_.v[0]; }

 private:
  Vec<C> scale_, cap_, top_;
};

template <class T>
compute_t<T> row_max(const T* x, int64_t n) {
  using V = Vec<compute_t<T>>;
  const V lowest = -__builtin_inff();
  V most[4] = {lowest, lowest, lowest, lowest};
  int64_t i = 0;
  for (; i + 4 * V::kWidth <= n; i += 4 * V::kWidth) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) most[k] = max(most[k], load(x + i + k * V::kWidth));
  }
  for (; i < n; i += V::kWidth) {
    const V last = select(lanes_below<compute_t<T>>(n - i), load_n(x + i, n - i), lowest);
    most[0] = max(most[0], last);
  }
  return reduce_max(max(max(most[0], most[1]), max(most[2], most[3])));
}

// Statistics of a row: ln sum exp(x_v) = most + log_sum.
template <class C>
struct RowStatistics {
  C most, log_sum;
};

// Computes the statistics of a row; calls also_per_block(first, count) for its blocks in
// order, while they are in the caches.
template <class T, bool kCapped, class F>
RowStatistics<compute_t<T>> statistics(const T* x, int64_t n,
                                       const Logits<compute_t<T>, kCapped>& logits,
                                       const F& also_per_block) {
  using C = compute_t<T>;
  const C lowest = -__builtin_inff();
  C most = lowest, normalizer = 0;
  for (int64_t first = 0; first < n; first += kBlock) {
    const T* const block = x + first;
    const int64_t count = n - first < kBlock ? n - first : kBlock;
    const C block_most = logits.scalar(row_max(block, count));
    if (block_most > most) {
      normalizer *= scalar_exp(most - block_most);
      most = block_most;
    }
    const Vec<C> shift = most == lowest ? C(0) : most;
    normalizer += row_sum<T>(count, [&](int64_t i, auto part) {
      return softmax_exp(logits(part.load(block + i)) - shift);
    });
    also_per_block(first, count);
  }
  return {most, scalar_log(normalizer)};
}

// y[i] = f(i, part) for the parts of a row of n; written past the caches if requested and if
// the row is aligned. f may read y.
template <class T, class F>
OMNIATTN_INLINE void write_row(T* y, int64_t n, bool past_caches, const F& f) {
  constexpr int kWidth = Vec<compute_t<T>>::kWidth;
  int64_t done = 0;
  if (past_caches && reinterpret_cast<uintptr_t>(y) % (kWidth * sizeof(T)) == 0) {
    for (; done + kWidth <= n; done += kWidth) stream(y + done, f(done, Whole{}));
  }
  for_row<T>(n - done, [&](int64_t i, auto part) { part.store(y + done + i, f(done + i, part)); });
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
