// Causal depthwise convolution, see conv.h: a few steps at a time over all channels, so that their
// inputs stay in L1. Walking along time within a vector of channels took 2.5 to 3.5 times as long.
#include "kernels/conv/conv.h"

#include "kernels/activation/activate.h"
#include "runtime/dispatch.h"
#include "runtime/row.h"
#include "semantics/seqlen.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

constexpr int kSteps = 4;  // at a time

// Models have 4 taps; kTaps = 0 means any number.
template <class T, int kTaps>
struct Conv {
  const CausalConv& p;
  const ConvSequence& s;

  OMNIATTN_INLINE int64_t taps() const { return kTaps > 0 ? kTaps : p.taps; }

  // x of step t, or a row of `before` if t < 0.
  OMNIATTN_INLINE const T* row(int64_t t) const {
    return t < 0 ? static_cast<const T*>(p.before) + s.n * p.before_batch +
                       (t + taps() - 1) * p.before_row
                 : static_cast<const T*>(p.x) + s.batch * p.x_batch + (s.row + t) * p.x_row;
  }

  // The sum of step t for the channels from i on.
  OMNIATTN_INLINE auto sum(int64_t t, int64_t i, auto part) const {
    const T* const weight = static_cast<const T*>(p.weight) + i;
    const int64_t count = taps();
    auto result = part.load(static_cast<const T*>(p.bias) + i);
#pragma GCC unroll 4
    for (int64_t k = 0; k < count; ++k) {
      result =
          fma(part.load(weight + k * p.channels), part.load(row(t + k - count + 1) + i), result);
    }
    return result;
  }
};

// Calls f(sequence, first, end) for the part of each sequence in a range of items, counted from its
// own first item.
template <class F>
OMNIATTN_INLINE void for_sequences(const CausalConv& p, int64_t extra, int64_t begin, int64_t end,
                                   const F& f) {
  if (begin >= end) return;
  for (int64_t n = conv_sequence_of(p, begin, extra); n < p.sequences; ++n) {
    const ConvSequence s = conv_sequence(p, n);
    const int64_t start = first_item(s, extra);
    if (start >= end) return;
    const Range part = intersect({begin - start, end - start}, {0, extra + s.steps});
    if (!is_empty(part)) f(s, part.begin, part.end);
  }
}

template <class T, int kTaps>
void forward(const CausalConvParams& p, int64_t begin, int64_t end) {
  const int64_t n = p.conv.channels;
  for_sequences(p.conv, 0, begin, end, [&](const ConvSequence& s, int64_t first, int64_t last) {
    const Conv<T, kTaps> conv{p.conv, s};
    T* const y = static_cast<T*>(p.y) + s.first * n;
    for (int64_t t = first; t < last; t += kSteps) {
      for_row<T, Order::any>(n, [&](int64_t i, auto part) {
#pragma GCC unroll 4
        for (int j = 0; j < kSteps; ++j) {
          if (t + j >= last) break;
          auto sum = conv.sum(t + j, i, part);
          if (p.conv.silu) {
            sum = lanewise([](auto v) { return activate<Activation::silu>(v).value; }, sum);
          }
          part.store(y + (t + j) * n + i, sum);
        }
      });
    }
  });
}

// Gradients of the rows [first, last) of one sequence. `recent` holds g of the last K - 1 steps.
template <class T, int kTaps>
void backward_rows(const CausalConvBackwardParams& p, compute_t<T>* dweight, compute_t<T>* dbias,
                   compute_t<T>* recent, const ConvSequence& s, int64_t first, int64_t last) {
  using C = compute_t<T>;
  const Conv<T, kTaps> conv{p.conv, s};
  const int64_t n = p.conv.channels, steps = s.steps, taps = conv.taps(), before = taps - 1;
  const T* const weight = static_cast<const T*>(p.conv.weight);
  const T* const grad_y =
      static_cast<const T*>(p.grad_y) + s.batch * p.grad_y_batch + s.row * p.grad_y_row;
  const T* const grad_final = static_cast<const T*>(p.grad_final);
  const auto gradient_of_row = [&](int64_t r) {
    return r < before ? static_cast<T*>(p.dbefore) + (s.n * before + r) * n
                      : static_cast<T*>(p.dx) + (s.first + r - before) * n;
  };
  for (int64_t i = 0; i < before * n; ++i) recent[i] = 0;

  for (int64_t t = first - before; t < last; t += kSteps) {
    const auto is_step = [&](int64_t r) { return r >= 0 && r < steps && r < last; };
    for_row<T, Order::any>(n, [&](int64_t i, auto part) {
      using V = decltype(part.load(weight));
      const V zero(C(0));
      V g[kSteps] = {zero, zero, zero, zero};
#pragma GCC unroll 4
      for (int j = 0; j < kSteps; ++j) {
        if (!is_step(t + j)) continue;
        g[j] = part.load(grad_y + (t + j) * p.grad_y_row + i);
        if (p.conv.silu) {
          const auto slope = [](auto v) { return activate<Activation::silu>(v).slope; };
          g[j] = g[j] * lanewise(slope, conv.sum(t + j, i, part));
        }
      }
#pragma GCC unroll 4
      for (int j = 0; j < kSteps; ++j) {
        const int64_t r = t + j;
        if (r < first || r >= last || (r < before && p.dbefore == nullptr)) continue;
        V d = zero;
        if (grad_final != nullptr && r >= steps) {
          d = part.load(grad_final + (s.n * before + r - steps) * n + i);
        }
#pragma GCC unroll 4
        for (int64_t k = 0; k < taps; ++k) {
          if (r < k || r - k >= steps) continue;  // not 0 times a weight, which may be inf or NaN
          const V of_step =
              k <= j ? g[j - k] : V(part.load_sums(recent + (before + j - k) * n + i));
          d = fma(part.load(weight + k * n + i), of_step, d);
        }
        part.store(gradient_of_row(r) + i, d);
      }
      const auto add = [&](C* at, const auto& term) {
        V sum = part.load_sums(at + i);
#pragma GCC unroll 4
        for (int j = 0; j < kSteps; ++j) {
          if (t + j >= first && is_step(t + j)) sum = term(j, sum);
        }
        part.store_sums(at + i, sum);
      };
      if (dbias != nullptr) add(dbias, [&](int j, V sum) { return sum + g[j]; });
      if (dweight != nullptr) {
#pragma GCC unroll 4
        for (int64_t k = 0; k < taps; ++k) {
          add(dweight + k * n, [&](int j, V sum) {
            return fma(g[j], part.load(conv.row(t + j + k - before) + i), sum);
          });
        }
      }
#pragma GCC unroll 4
      for (int64_t r = 0; r < before; ++r) {
        const int64_t j = r + kSteps - before;
        part.store_sums(recent + r * n + i,
                        j >= 0 ? g[j] : V(part.load_sums(recent + (r + kSteps) * n + i)));
      }
    });
  }
}

template <class T, int kTaps>
void backward(const CausalConvBackwardParams& p, void* dweight, void* dbias, void* memory,
              int64_t begin, int64_t end) {
  for_sequences(p.conv, p.conv.taps - 1, begin, end,
                [&](const ConvSequence& s, int64_t first, int64_t last) {
                  using C = compute_t<T>;
                  backward_rows<T, kTaps>(p, static_cast<C*>(dweight), static_cast<C*>(dbias),
                                          static_cast<C*>(memory), s, first, last);
                });
}

void forward_any(const CausalConvParams& p, int64_t begin, int64_t end) {
  dispatch(p.conv.dtype, [&]<class T>(T) {
    p.conv.taps == 4 ? forward<T, 4>(p, begin, end) : forward<T, 0>(p, begin, end);
  });
}
void backward_any(const CausalConvBackwardParams& p, void* dweight, void* dbias, void* memory,
                  int64_t begin, int64_t end) {
  dispatch(p.conv.dtype, [&]<class T>(T) {
    p.conv.taps == 4 ? backward<T, 4>(p, dweight, dbias, memory, begin, end)
                     : backward<T, 0>(p, dweight, dbias, memory, begin, end);
  });
}

}  // namespace

extern const CausalConvKernels causal_conv_kernels_table;
const CausalConvKernels causal_conv_kernels_table{forward_any, backward_any};

}  // namespace omniattn::OMNIATTN_ISA
