// One token of a causal convolution, see conv.h. State and weights are read in vectors if their
// channels are adjacent in memory, otherwise element by element.
#include "kernels/conv/conv.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "runtime/row.h"
#include "semantics/activation_rules.h"
#include "semantics/arith.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class T>
struct ConvStep {
  using C = compute_t<T>;
  const CausalConvStep& p;
  const T* x;
  T *before, *y;

  ConvStep(const CausalConvStep& step, int64_t entry)
      : p(step),
        x(static_cast<const T*>(p.x) + entry * p.x_batch),
        before(static_cast<T*>(p.before) + entry * p.before_batch),
        y(static_cast<T*>(p.y) + entry * p.channels) {}

  const T* weight(int64_t k, int64_t channel) const {
    return static_cast<const T*>(p.weight) + k * p.weight_tap + channel * p.weight_channel;
  }
  // Input in row r of the state, whose last K - 1 rows are read.
  T* input(int64_t r, int64_t channel) const {
    return before + r * p.before_tap + channel * p.before_channel;
  }

  void finish(int64_t i, auto part, Vec<C> sum) const {
    part.store(y + i, p.silu ? activation_rules::Silu::at(sum).value : sum);
  }
  Vec<C> bias(int64_t i, auto part) const {
    return p.bias == nullptr ? Vec<C>(C(0)) : part.load(static_cast<const T*>(p.bias) + i);
  }

  void vectors() const {
    const int64_t unread = p.kept - (p.taps - 1);
    for_row<T>(p.channels, [&](int64_t i, auto part) {
      Vec<C> sum = bias(i, part);
      for (int64_t k = 0; k < p.taps - 1; ++k) {
        sum = fma(part.load(weight(k, i)), part.load(input(unread + k, i)), sum);
      }
      finish(i, part, fma(part.load(weight(p.taps - 1, i)), part.load(x + i), sum));
      for (int64_t r = 0; r + 1 < p.kept; ++r) part.store(input(r, i), part.load(input(r + 1, i)));
      if (p.kept > 0) part.store(input(p.kept - 1, i), part.load(x + i));
    });
  }

  void numbers() const {
    constexpr int64_t kWidth = Vec<C>::kWidth;
    const int64_t unread = p.kept - (p.taps - 1);
    for_row<T>(p.channels, [&](int64_t i, auto part) {
      const int64_t lanes = smaller(kWidth, p.channels - i);
      Vec<C> sum = bias(i, part);
      for (int64_t k = 0; k < p.taps; ++k) {
        C weights[kWidth] = {}, inputs[kWidth] = {};
        for (int64_t j = 0; j < lanes; ++j) {
          weights[j] = widen(*weight(k, i + j));
          inputs[j] = widen(k + 1 < p.taps ? *input(unread + k, i + j) : x[i + j]);
        }
        sum = fma(load(weights), load(inputs), sum);
      }
      finish(i, part, sum);
      for (int64_t j = 0; j < lanes; ++j) {
        for (int64_t r = 0; r + 1 < p.kept; ++r) *input(r, i + j) = *input(r + 1, i + j);
        if (p.kept > 0) *input(p.kept - 1, i + j) = x[i + j];
      }
    });
  }
};

void run(const CausalConvStep& p, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, p.batch);
  OMNIATTN_ASSERT(p.kept >= p.taps - 1);
  const bool dense = (p.before_channel == 1 || p.kept == 0) && p.weight_channel == 1;
  dispatch(p.dtype, [&]<class T>(T) {
    for (int64_t i = begin; i < end; ++i) {
      const ConvStep<T> step(p, i);
      dense ? step.vectors() : step.numbers();
    }
  });
}

}  // namespace

extern const CausalConvStepKernels causal_conv_step_kernels_table;
const CausalConvStepKernels causal_conv_step_kernels_table{run};

}  // namespace omniattn::OMNIATTN_ISA
