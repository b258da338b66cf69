#include "kernels/loss/loss.h"

#include "runtime/dispatch.h"
#include "runtime/row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Columns between two updates of the running maximum: they stay in L1 for the second sweep.
constexpr int64_t kBlock = 4096;

// e^x for x <= 0, relative error 4e-7 in fp32: below that of the rounded lse.
OMNIATTN_INLINE VecF softmax_exp(VecF x) { return exp2(x * 1.442695041f); }
OMNIATTN_INLINE VecD softmax_exp(VecD x) { return exp(x); }

// What the loss takes for a logit, and the derivative of that: itself and 1, or cap tanh(x / cap)
// and 1 - tanh^2. A tanh costs more than the rest of an element, so that there are kernels without
// it.
template <class C, bool kCapped>
struct Cap {
  Vec<C> cap;

  explicit Cap(double softcap) : cap(static_cast<C>(softcap)) {}

  OMNIATTN_INLINE Vec<C> operator()(Vec<C> x) const {
    if constexpr (!kCapped) return x;
    return cap * tanh(x / cap);
  }
  OMNIATTN_INLINE C scalar(C x) const {
    if constexpr (!kCapped) return x;
    return (*this)(Vec<C>(x)).v[0];
  }
  // dx, times the derivative at the logit of which `capped` was made.
  OMNIATTN_INLINE Vec<C> back(Vec<C> dx, Vec<C> capped) const {
    if constexpr (!kCapped) return dx;
    const Vec<C> t = capped / cap;
    return dx * (C(1) - t * t);
  }
};

template <class C>
OMNIATTN_INLINE C scalar_exp(C x) {
  return exp(Vec<C>(x)).v[0];
}
template <class C>
OMNIATTN_INLINE C scalar_log(C x) {
  return log(Vec<C>(x)).v[0];
}

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

template <class T>
struct RowStatistics {
  compute_t<T> lse;
  compute_t<T> sum;  // of the logits, where label smoothing asks for it
};

template <class T, bool kCapped>
RowStatistics<T> statistics(const T* x, int64_t n, Cap<compute_t<T>, kCapped> cap, bool with_sum) {
  using C = compute_t<T>;
  using V = Vec<C>;
  const C lowest = -__builtin_inff();
  C most = lowest, normaliser = 0, sum = 0;
  for (int64_t first = 0; first < n; first += kBlock) {
    const T* const block = x + first;
    const int64_t count = n - first < kBlock ? n - first : kBlock;
    const C block_most = cap.scalar(row_max(block, count));
    if (block_most > most) {
      normaliser *= scalar_exp(most - block_most);
      most = block_most;
    }
    const V shift = most == lowest ? C(0) : most;
    normaliser += row_sum<T>(count, [&](int64_t i, auto part) {
      return softmax_exp(cap(part.load(block + i)) - shift);
    });
    if (with_sum) {
      sum += row_sum<T>(count, [&](int64_t i, auto part) { return cap(part.load(block + i)); });
    }
  }
  return {most + scalar_log(normaliser), sum};
}

template <class T, bool kCapped>
void forward(const CrossEntropyParams& p, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  const Cap<C, kCapped> cap(p.softcap);
  const C smoothing = static_cast<C>(p.label_smoothing);
  for (int64_t row = begin; row < end; ++row) {
    C& loss = static_cast<C*>(p.loss)[row];
    C& lse = static_cast<C*>(p.lse)[row];
    const int64_t target = p.target[row];
    if (target == p.ignore_index) {
      loss = 0;
      lse = 0;
      continue;
    }
    const T* const x = static_cast<const T*>(p.logits) + row * p.stride;
    const RowStatistics<T> row_statistics = statistics(x, p.cols, cap, smoothing > 0);
    lse = row_statistics.lse;
    loss =
        lse - (1 - smoothing) * cap.scalar(widen(x[target])) + static_cast<C>(p.z_loss) * lse * lse;
    if (smoothing > 0) loss -= smoothing * (row_statistics.sum / static_cast<C>(p.cols));
  }
}

// y[i] = slope e^(x[i] - lse) - offset of capped logits, turned back through the cap; past the
// caches where the row is aligned for that.
template <class T, bool kCapped>
void gradient_row(const T* x, T* y, int64_t n, Cap<compute_t<T>, kCapped> cap, compute_t<T> lse,
                  compute_t<T> slope, compute_t<T> offset, bool past_caches) {
  using V = Vec<compute_t<T>>;
  const V shift = lse, scale = slope, constant = offset;
  const auto gradient = [&](V logit) {
    const V capped = cap(logit);
    return cap.back(fma(scale, softmax_exp(capped - shift), -constant), capped);
  };
  constexpr int64_t kBytes = V::kWidth * sizeof(T);
  int64_t done = 0;
  if (past_caches && reinterpret_cast<uintptr_t>(y) % kBytes == 0) {
    for (; done + V::kWidth <= n; done += V::kWidth) {
      stream(y + done, gradient(load(x + done)));
    }
  }
  for_row<T>(n - done, [&](int64_t i, auto part) {
    part.store(y + done + i, gradient(part.load(x + done + i)));
  });
}

template <class T, bool kCapped>
void backward(const CrossEntropyBackwardParams& p, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  const CrossEntropyParams& f = p.forward;
  const Cap<C, kCapped> cap(f.softcap);
  const C smoothing = static_cast<C>(f.label_smoothing);
  for (int64_t row = begin; row < end; ++row) {
    const T* const x = static_cast<const T*>(f.logits) + row * f.stride;
    T* const y = static_cast<T*>(p.dlogits) + row * f.cols;
    const int64_t target = f.target[row];
    if (target == f.ignore_index) {
      for_row<T>(f.cols, [&](int64_t i, auto part) { part.store(y + i, Vec<C>(C(0))); });
      continue;
    }
    const C weight = static_cast<const C*>(p.row_weight)[row];
    const C lse = static_cast<const C*>(f.lse)[row];
    const C slope = weight * (1 + 2 * static_cast<C>(f.z_loss) * lse);
    const C offset = weight * smoothing / static_cast<C>(f.cols);
    const C chosen = cap.scalar(widen(x[target]));
    const C hit = slope * scalar_exp(chosen - lse) - offset - weight * (1 - smoothing);
    gradient_row(x, y, f.cols, cap, lse, slope, offset, p.stream);
    y[target] = narrow<T>(cap.back(Vec<C>(hit), Vec<C>(chosen)).v[0]);
  }
  if (p.stream) stream_fence();
}

template <class T>
void sum_chunks(const compute_t<T>* sums, int64_t chunks, int64_t n, T* total, int64_t begin,
                int64_t end) {
  for_row<T>(end - begin, [&](int64_t i, auto part) {
    auto sum = part.load(sums + begin + i);
    for (int64_t chunk = 1; chunk < chunks; ++chunk) sum += part.load(sums + chunk * n + begin + i);
    part.store(total + begin + i, sum);
  });
}

// 1 / number of kept targets, at least 1.
double one_over_kept(const CrossEntropyParams& p) {
  int64_t kept = 0;
  for (int64_t i = 0; i < p.rows; ++i) kept += p.target[i] != p.ignore_index;
  return 1.0 / static_cast<double>(kept > 1 ? kept : 1);
}

template <class C>
void total(const CrossEntropyParams& p, bool mean, C* out) {
  const C* const losses = static_cast<const C*>(p.loss);
  double sum = 0;
  for (int64_t i = 0; i < p.rows; ++i) sum += static_cast<double>(losses[i]);
  *out = static_cast<C>(mean ? sum * one_over_kept(p) : sum);
}

template <class C>
void row_weights(const CrossEntropyParams& p, bool mean, bool per_row, const C* grad, C* weights) {
  const C scale = mean ? static_cast<C>(one_over_kept(p)) : C(1);
  for (int64_t i = 0; i < p.rows; ++i) {
    weights[i] = grad != nullptr ? scale * grad[per_row ? i : 0] : scale;
  }
}

void forward_any(const CrossEntropyParams& p, int64_t begin, int64_t end) {
  dispatch(p.dtype, [&]<class T>(T) {
    p.softcap > 0 ? forward<T, true>(p, begin, end) : forward<T, false>(p, begin, end);
  });
}
void backward_any(const CrossEntropyBackwardParams& p, int64_t begin, int64_t end) {
  dispatch(p.forward.dtype, [&]<class T>(T) {
    p.forward.softcap > 0 ? backward<T, true>(p, begin, end) : backward<T, false>(p, begin, end);
  });
}
void sum_chunks_any(DType dtype, const void* sums, int64_t chunks, int64_t n, void* total,
                    int64_t begin, int64_t end) {
  dispatch(dtype, [&]<class T>(T) {
    sum_chunks(static_cast<const compute_t<T>*>(sums), chunks, n, static_cast<T*>(total), begin,
               end);
  });
}

void total_any(const CrossEntropyParams& p, bool mean, void* out) {
  dispatch_compute(p.dtype, [&]<class C>(C) { total(p, mean, static_cast<C*>(out)); });
}
void row_weights_any(const CrossEntropyParams& p, bool mean, bool per_row, const void* grad,
                     void* weights) {
  dispatch_compute(p.dtype, [&]<class C>(C) {
    row_weights(p, mean, per_row, static_cast<const C*>(grad), static_cast<C*>(weights));
  });
}

}  // namespace

extern const LossKernels loss_kernels_table;
const LossKernels loss_kernels_table{.forward = forward_any,
                                     .backward = backward_any,
                                     .sum_chunks = sum_chunks_any,
                                     .total = total_any,
                                     .row_weights = row_weights_any};

}  // namespace omniattn::OMNIATTN_ISA
