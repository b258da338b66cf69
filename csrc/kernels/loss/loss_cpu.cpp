#include "kernels/loss/loss.h"

#include "kernels/loss/softmax_row.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Sum of all class weights, if a row's loss uses all of them.
template <class C>
C class_weights(const CrossEntropyParams& p) {
  const C* const w = static_cast<const C*>(p.rows.class_weight);
  if (w == nullptr || p.label_smoothing == 0) return static_cast<C>(p.cols);
  return row_sum<C>(p.cols, [&](int64_t i, auto part) { return part.load(w + i); });
}

template <class C>
C weight_of(const LossRows& rows, int64_t target) {
  return rows.class_weight != nullptr ? static_cast<const C*>(rows.class_weight)[target] : C(1);
}

template <class T, bool kCapped>
void forward(const CrossEntropyParams& p, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  const Logits<C, kCapped> logits(p.temperature, p.softcap);
  const C smoothing = static_cast<C>(p.label_smoothing), weights = class_weights<C>(p);
  const C* const w = static_cast<const C*>(p.rows.class_weight);
  for (int64_t row = begin; row < end; ++row) {
    C& loss = static_cast<C*>(p.rows.loss)[row];
    C& most = static_cast<C*>(p.row_max)[row];
    C& log_sum = static_cast<C*>(p.log_sum)[row];
    const int64_t target = p.rows.target[row];
    if (target == p.rows.ignore_index) {
      loss = most = log_sum = 0;
      continue;
    }
    const T* const x = static_cast<const T*>(p.logits) + row * p.stride;
    const C chosen = logits.scalar(widen(x[target])), own = weight_of<C>(p.rows, target);
    // Other logits are summed as differences from the target's: sums of large logits lose digits.
    const Vec<C> near = __builtin_isfinite(chosen) ? chosen : C(0);
    C below = 0;  // sum_v w_v (near - x_v)
    const RowStatistics<C> found = statistics(x, p.cols, logits, [&](int64_t first, int64_t count) {
      if (smoothing == 0) return;
      below += row_sum<T>(count, [&](int64_t i, auto part) {
        const Vec<C> gap = near - logits(part.load(x + first + i));
        return w != nullptr ? gap * part.load(w + first + i) : gap;
      });
    });
    most = found.most;
    log_sum = found.log_sum;
    const C lse = most + log_sum;
    loss = (1 - smoothing) * own * ((most - chosen) + log_sum) +
           static_cast<C>(p.z_loss) * own * lse * lse;
    if (smoothing > 0) {
      const C mean_share = smoothing / static_cast<C>(p.cols);
      loss += mean_share * (weights * ((most - near.v[0]) + log_sum) + below);
    }
  }
}

template <class T, bool kCapped>
void backward(const CrossEntropyBackwardParams& p, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  const CrossEntropyParams& f = p.forward;
  const Logits<C, kCapped> logits(f.temperature, f.softcap);
  const C smoothing = static_cast<C>(f.label_smoothing), weights = class_weights<C>(f);
  const C share = smoothing / static_cast<C>(f.cols);
  const C* const w = static_cast<const C*>(f.rows.class_weight);
  for (int64_t row = begin; row < end; ++row) {
    const T* const x = static_cast<const T*>(f.logits) + row * f.stride;
    T* const y = static_cast<T*>(p.dlogits) + row * f.cols;
    const int64_t target = f.rows.target[row];
    if (target == f.rows.ignore_index) {
      for_row<T>(f.cols, [&](int64_t i, auto part) { part.store(y + i, Vec<C>(C(0))); });
      continue;
    }
    const C weight = static_cast<const C*>(p.row_weight)[row] * logits.scale();
    const C most = static_cast<const C*>(f.row_max)[row];
    const C log_sum = static_cast<const C*>(f.log_sum)[row];
    const C own = weight_of<C>(f.rows, target), hit = (1 - smoothing) * own;
    const C mass = w != nullptr ? hit + share * weights : C(1);
    const C slope = weight * (mass + 2 * static_cast<C>(f.z_loss) * own * (most + log_sum));
    const C chosen = logits.scalar(widen(x[target]));
    const C at_target = slope * scalar_exp((chosen - most) - log_sum) - weight * share * own;

    const Vec<C> shift = most, log_total = log_sum, scale = slope, offset = weight * share;
    const auto gradient = [&](Vec<C> logit, Vec<C> less) {
      const Vec<C> made = logits(logit);
      return logits.back(fma(scale, softmax_exp(made - shift, log_total), -less), made);
    };
    if (w != nullptr && smoothing > 0) {
      write_row(y, f.cols, p.stream, [&](int64_t i, auto part) {
        return gradient(part.load(x + i), offset * part.load(w + i));
      });
    } else {
      write_row(y, f.cols, p.stream,
                [&](int64_t i, auto part) { return gradient(part.load(x + i), offset); });
    }
    y[target] = narrow<T>(logits.back(Vec<C>(at_target - weight * hit), Vec<C>(chosen)).v[0]);
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

// 1 / (sum of w_y of the kept rows), or 1 if that sum is 0.
template <class C>
double one_over_kept(const LossRows& rows) {
  double kept = rows.target == nullptr ? static_cast<double>(rows.count) : 0;
  for (int64_t i = 0; rows.target != nullptr && i < rows.count; ++i) {
    const int64_t target = rows.target[i];
    if (target != rows.ignore_index) kept += static_cast<double>(weight_of<C>(rows, target));
  }
  return kept != 0 ? 1 / kept : 1;
}

template <class C>
void total(const LossRows& rows, bool mean, C* out) {
  const C* const losses = static_cast<const C*>(rows.loss);
  double sum = 0;
  for (int64_t i = 0; i < rows.count; ++i) sum += static_cast<double>(losses[i]);
  *out = static_cast<C>(mean ? sum * one_over_kept<C>(rows) : sum);
}

template <class C>
void row_weights(const LossRows& rows, bool mean, bool per_row, const C* grad, C* weights) {
  const C scale = mean ? static_cast<C>(one_over_kept<C>(rows)) : C(1);
  for (int64_t i = 0; i < rows.count; ++i) {
    weights[i] = grad != nullptr ? scale * grad[per_row ? i : 0] : scale;
  }
}

void forward_any(const CrossEntropyParams& p, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, p.rows.count);
  OMNIATTN_ASSERT_ROWS(p.logits, p.stride, p.rows.count, p.cols);
  dispatch(p.rows.dtype, [&]<class T>(T) {
    p.softcap > 0 ? forward<T, true>(p, begin, end) : forward<T, false>(p, begin, end);
  });
}
void backward_any(const CrossEntropyBackwardParams& p, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, p.forward.rows.count);
  OMNIATTN_ASSERT_ROWS(p.forward.logits, p.forward.stride, p.forward.rows.count, p.forward.cols);
  dispatch(p.forward.rows.dtype, [&]<class T>(T) {
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

void total_any(const LossRows& rows, bool mean, void* out) {
  dispatch_compute(rows.dtype, [&]<class C>(C) { total(rows, mean, static_cast<C*>(out)); });
}
void row_weights_any(const LossRows& rows, bool mean, bool per_row, const void* grad,
                     void* weights) {
  dispatch_compute(rows.dtype, [&]<class C>(C) {
    row_weights(rows, mean, per_row, static_cast<const C*>(grad), static_cast<C*>(weights));
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
