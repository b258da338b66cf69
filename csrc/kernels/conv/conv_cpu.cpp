// Causal depthwise convolution, see conv.h: a few steps at a time over all channels, so that their
// inputs stay in L1. Walking along time within a vector of channels took 2.5 to 3.5 times as long.
#include "kernels/conv/conv_rows.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "semantics/activation_rules.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class T, int kTaps>
struct Conv : ConvInputs<T, kTaps> {
  using ConvInputs<T, kTaps>::p;

  // Sums s of the steps from t on, for the channels from i on.
  OMNIATTN_INLINE auto sums(int64_t t, int64_t i, auto part) const {
    Steps result(part.load(static_cast<const T*>(p.bias) + i));
    this->for_taps(t, i, part, [&](int64_t k, const auto& x) {
      const auto weight = part.load(static_cast<const T*>(p.weight) + k * p.channels + i);
#pragma GCC unroll 4
      for (int j = 0; j < kSteps; ++j) result[j] = fma(weight, x[j], result[j]);
    });
    return result;
  }
};

// Computes the steps [t, t + kSteps) of y that are before `last`.
template <class T, int kTaps>
[[gnu::noinline]] void forward_steps(const CausalConvParams& p, const ConvSequence& s, int64_t t,
                                     int64_t last, bool past_caches) {
  const int64_t n = p.conv.channels;
  const Conv<T, kTaps> conv{p.conv, s};
  T* const y = static_cast<T*>(p.y) + (s.first + t) * n;
  const bool silu = p.conv.silu;
  for_row<T, Order::any>(n, [&](int64_t i, auto part) {
    const auto sums = conv.sums(t, i, part);
#pragma GCC unroll 4
    for (int j = 0; j < kSteps; ++j) {
      if (!conv.kInside && t + j >= last) break;
      auto sum = sums[j];
      if (silu) sum = lanewise([](auto v) { return activation_rules::Silu::at(v).value; }, sum);
      past_caches ? part.stream(y + j * n + i, sum) : part.store(y + j * n + i, sum);
    }
  });
}

template <class T>
void forward(const CausalConvParams& p, int64_t begin, int64_t end) {
  const bool past_caches = streams<T>(p.past_caches, p.y, p.conv.channels);
  for_sequences(p.conv, 0, begin, end, [&](const ConvSequence& s, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t += kSteps) {
      const bool inside =
          p.conv.taps == kUsualTaps<T> && t >= p.conv.taps - 1 && t + kSteps <= last;
      (inside ? forward_steps<T, kUsualTaps<T>> : forward_steps<T, 0>)(p, s, t, last, past_caches);
    }
  });
  if (past_caches) stream_fence();
}

// Computes the gradients of the rows [first, last) of one sequence, with these sums.
template <class T>
struct BackwardRows {
  using C = compute_t<T>;
  const CausalConvBackwardParams& p;
  const ConvSequence& s;
  C *dweight, *dbias;
  C* recent;  // g of the last K - 1 steps
  int64_t first, last;
  bool past_caches;
};

// Computes kSteps of these rows from t on.
template <class T, int kTaps>
struct BackwardSteps {
  using C = compute_t<T>;
  const BackwardRows<T> rows;
  const int64_t t;
  const CausalConvBackwardParams p = rows.p;
  const ConvSequence s = rows.s;
  const Conv<T, kTaps> conv{p.conv, s};
  const int64_t n = p.conv.channels, before = conv.before;

  [[gnu::noinline]] static void run(const BackwardRows<T>& rows, int64_t t) {
    const BackwardSteps steps{rows, t};
    for_row<T, Order::any>(steps.n, [&](int64_t i, auto part) OMNIATTN_LAMBDA {
      const auto g = steps.gradients(i, part);
      steps.store_rows(i, part, g);
      steps.add_to_sums(i, part, g);
      steps.keep(i, part, g);
    });
  }

 private:
  OMNIATTN_INLINE bool is_step(int64_t r) const {
    return conv.kInside || (r >= 0 && r < s.steps && r < rows.last);
  }
  OMNIATTN_INLINE bool is_before(int64_t r) const { return !conv.kInside && r < before; }
  // Row of the gradient of `before` or of x.
  OMNIATTN_INLINE T* gradient_of_row(int64_t r) const {
    return is_before(r) ? static_cast<T*>(p.dbefore) + (s.n * before + r) * n
                        : static_cast<T*>(p.dx) + (s.first + r - before) * n;
  }

  // g of the steps from t on; 0 for steps outside the sequence.
  OMNIATTN_INLINE auto gradients(int64_t i, auto part) const {
    using V = decltype(part.load(conv.row(0)));
    const T* const grad_y =
        static_cast<const T*>(p.grad_y) + s.batch * p.grad_y_batch + s.row * p.grad_y_row;
    Steps<V> g(V(C(0))), slopes(V(C(1)));
    if (p.conv.silu) {
      const auto sums = conv.sums(t, i, part);
      const auto slope = [](auto v) { return activation_rules::Silu::at(v).slope; };
#pragma GCC unroll 4
      for (int j = 0; j < kSteps; ++j) slopes[j] = lanewise(slope, sums[j]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < kSteps; ++j) {
      if (is_step(t + j)) g[j] = part.load(grad_y + (t + j) * p.grad_y_row + i) * slopes[j];
    }
    return g;
  }

  // d[j] = sum_k weight[k] g[j - k], the gradient of row t + j.
  template <class V>
  OMNIATTN_INLINE void store_rows(int64_t i, auto part, const Steps<V>& g) const {
    Steps<V> d(V(C(0))), x = g;
#pragma GCC unroll 4
    for (int j = 0; j < kSteps; ++j) {
      const int64_t r = t + j;
      if (!conv.kInside && p.grad_final != nullptr && r >= s.steps && r < rows.last) {
        d[j] =
            part.load(static_cast<const T*>(p.grad_final) + (s.n * before + r - s.steps) * n + i);
      }
    }
    conv.for_each_tap([&](int64_t k) {
      const V weight = part.load(static_cast<const T*>(p.conv.weight) + k * n + i);
#pragma GCC unroll 4
      for (int j = 0; j < kSteps; ++j) {
        // Skips terms outside, rather than multiply by 0: a weight may be inf or NaN.
        if (conv.kInside || (t + j >= k && t + j - k < s.steps)) d[j] = fma(weight, x[j], d[j]);
      }
#pragma GCC unroll 4
      for (int j = kSteps - 1; j > 0; --j) x[j] = x[j - 1];
      if (k < before) x[0] = part.load_sums(rows.recent + (before - 1 - k) * n + i);
    });
#pragma GCC unroll 4
    for (int j = 0; j < kSteps; ++j) {
      const int64_t r = t + j;
      if (!conv.kInside && (r < rows.first || r >= rows.last)) continue;
      if (is_before(r) && p.dbefore == nullptr) continue;
      T* const to = gradient_of_row(r) + i;
      (rows.past_caches && !is_before(r)) ? part.stream(to, d[j]) : part.store(to, d[j]);
    }
  }

  template <class V>
  OMNIATTN_INLINE void add_to_sums(int64_t i, auto part, const Steps<V>& g) const {
    const auto add = [&](C* at, const auto& term) {
      V sum = part.load_sums(at + i);
#pragma GCC unroll 4
      for (int j = 0; j < kSteps; ++j) {
        if ((conv.kInside || t + j >= rows.first) && is_step(t + j)) sum = term(j, sum);
      }
      part.store_sums(at + i, sum);
    };
    if (rows.dbias != nullptr) add(rows.dbias, [&](int j, V sum) { return sum + g[j]; });
    if (rows.dweight == nullptr) return;
    conv.for_taps(t, i, part, [&](int64_t k, const Steps<V>& x) {
      add(rows.dweight + k * n, [&](int j, V sum) { return fma(g[j], x[j], sum); });
    });
  }

  template <class V>
  OMNIATTN_INLINE void keep(int64_t i, auto part, const Steps<V>& g) const {
    C* const recent = rows.recent;
    for (int64_t r = 0; r + kSteps < before; ++r) {
      part.store_sums(recent + r * n + i, V(part.load_sums(recent + (r + kSteps) * n + i)));
    }
#pragma GCC unroll 4
    for (int j = 0; j < kSteps; ++j) {
      const int64_t r = before - kSteps + j;
      if (r >= 0) part.store_sums(recent + r * n + i, g[j]);
    }
  }
};

template <class T>
void backward(const CausalConvBackwardParams& p, void* dweight, void* dbias, void* memory,
              int64_t begin, int64_t end) {
  using C = compute_t<T>;
  const int64_t before = p.conv.taps - 1, n = p.conv.channels;
  C* const recent = static_cast<C*>(memory);
  const bool past_caches = streams<T>(p.past_caches, p.dx, n);
  for_sequences(p.conv, before, begin, end, [&](const auto& s, int64_t first, int64_t last) {
    const BackwardRows<T> rows{
        p, s, static_cast<C*>(dweight), static_cast<C*>(dbias), recent, first, last, past_caches};
    for (int64_t i = 0; i < before * n; ++i) recent[i] = 0;
    for (int64_t t = first - before; t < last; t += kSteps) {
      const bool inside = p.conv.taps == kUsualTaps<T> && t >= larger(first, before) &&
                          t + kSteps <= smaller(last, s.steps);
      (inside ? BackwardSteps<T, kUsualTaps<T>>::run : BackwardSteps<T, 0>::run)(rows, t);
    }
  });
  if (p.past_caches) stream_fence();
}

void forward_any(const CausalConvParams& p, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, conv_rows(p.conv));
  OMNIATTN_ASSERT_ROWS(p.conv.x, p.conv.x_row, conv_rows(p.conv), p.conv.channels);
  dispatch(p.conv.dtype, [&]<class T>(T) { forward<T>(p, begin, end); });
}
void backward_any(const CausalConvBackwardParams& p, void* dweight, void* dbias, void* memory,
                  int64_t begin, int64_t end) {
  const int64_t before = p.conv.taps - 1;
  OMNIATTN_ASSERT_ITEMS(begin, end, conv_rows(p.conv) + p.conv.sequences * before);
  OMNIATTN_ASSERT_ROWS(p.grad_y, p.grad_y_row, conv_rows(p.conv), p.conv.channels);
  OMNIATTN_ASSERT_HAS(memory, before * p.conv.channels);
  dispatch(p.conv.dtype, [&]<class T>(T) { backward<T>(p, dweight, dbias, memory, begin, end); });
}

}  // namespace

extern const CausalConvKernels causal_conv_kernels_table;
const CausalConvKernels causal_conv_kernels_table{forward_any, backward_any};

}  // namespace omniattn::OMNIATTN_ISA
