// One query row of a tile, from its products q.k to weights: score views, logits, mask, dropout.
#pragma once

#include "kernels/attention/attention_plan.h"
#include "runtime/vec.h"
#include "semantics/softmax.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Mask whose lane n is set if bit n is set.
template <class A>
OMNIATTN_INLINE Mask<A> lanes_of(uint64_t bits) {
#if defined(__AVX512F__)
  return {static_cast<unsigned>(bits) & Mask<A>::kAll};
#else
  typename Vec<A>::Bits lane = {};
#pragma GCC unroll 8
  for (int n = 0; n < Vec<A>::kWidth; ++n) lane[n] = 1 << n;
  const auto low = static_cast<int>(bits & ((1u << Vec<A>::kWidth) - 1));
  return {((lane & low) == lane)};
#endif
}

// Loads n elements of a row, converted to A; lanes from n on are 0.
template <class A, class S>
OMNIATTN_INLINE Vec<A> load_as(const S* row, int64_t n) {
  if constexpr (sizeof(compute_t<S>) == sizeof(A)) {
    return load_n(row, n);
  } else {
    A lanes[Vec<A>::kWidth] = {};
    for (int64_t i = 0; i < Vec<A>::kWidth && i < n; ++i) lanes[i] = row[i];
    return load(lanes);
  }
}

// Calls f(row) with the storage type of a score view, which is not wider than A.
template <class A, class F>
OMNIATTN_INLINE void with_score_row(const ScoreView& x, int64_t offset, const F& f) {
  if (x.dtype == DType::f32) return f(static_cast<const float*>(x.data) + offset);
  if constexpr (sizeof(A) == 8) {
    f(static_cast<const double*>(x.data) + offset);
  } else {
    if (x.dtype == DType::bf16) return f(static_cast<const bf16*>(x.data) + offset);
    f(static_cast<const f16*>(x.data) + offset);
  }
}

// Calls f(weight), where weight(x) gives the weight of a logit x and its derivative: e^(x - shift)
// for a softmax, which divides rows by their sums later, or the function of another normalizer.
// This keeps loops inside f free of branches on the normalizer.
template <class A, class F>
OMNIATTN_INLINE void with_weight(const Score& score, A shift, const F& f) {
  using V = Vec<A>;
  const auto power = [](V x) OMNIATTN_LAMBDA {
    const V e = exp2(x);
    return ValueAndSlope<V>{e, e};
  };
  if (!is_softmax(score)) {
    with_score_rule<ScoreRole::normalizer>(score.normalizer, [&](auto rule) OMNIATTN_LAMBDA {
      f([=](V x) OMNIATTN_LAMBDA { return rule.at(x); });
    });
  } else if (score.natural) {
    constexpr auto kFactor = static_cast<A>(kLog2E);
    f([=](V x) OMNIATTN_LAMBDA { return power((x - V(shift)) * V(kFactor)); });
  } else {
    f([=](V x) OMNIATTN_LAMBDA { return power(x - V(shift)); });
  }
}

// Calls f(n) for each vector of a range of columns.
template <class A, class F>
OMNIATTN_INLINE void for_columns(Range columns, const F& f) {
  for (int64_t n = columns.begin; n < columns.end; n += Vec<A>::kWidth) f(n);
}

// a * b, rounded: no compiler can fuse it with a sum.
template <class A>
OMNIATTN_INLINE Vec<A> rounded_product(Vec<A> a, Vec<A> b) {
  return fma(a, b, zero<A>());
}

template <class A>
OMNIATTN_INLINE void scale_row(A* x, Range columns, A factor) {
  if (factor == A(1)) return;
  for_columns<A>(columns, [&](int64_t n) { store(x + n, load(x + n) * Vec<A>(factor)); });
}

// One query row against keys [key, key + 128): everything except q.k. Terms are passes over the
// row, which is in L1: branches in each vector took more time.
template <class A>
struct RowScore {
  const AttentionProblem& p;
  int64_t b, h, q, key;
  const uint64_t* visible;  // kMaskWords words; null: all keys are visible
  void* registers;          // registers of the program, if there is one

  // True if to_logits changes nothing.
  OMNIATTN_INLINE bool is_plain() const { return leaves_logits(p.terms) && visible == nullptr; }

  // Turns x, with factor * x = pre * q.k, into logits: transform, bias, table term, program, mask.
  // If `slope` is not null, it receives the derivative of the transform, if any, and the registers
  // of a program keep the values that its gradient needs.
  void to_logits(A* x, Range columns, A factor, A* slope = nullptr) const {
    using V = Vec<A>;
    if (p.score.transform != ScoreKind::none) {
      scale_row(x, columns, factor);
      factor = A(1);
      with_score_rule<ScoreRole::transform>(p.score.transform, [&](auto rule) OMNIATTN_LAMBDA {
        for_columns<A>(columns, [&](int64_t n) {
          const auto g = rule.at(load(x + n));
          if (slope != nullptr) store(slope + n, g.slope);
          store(x + n, V(static_cast<A>(p.score.post)) * g.value);
        });
      });
    }
    add_terms(x, columns, factor);
    if (p.program != nullptr) {
      run_program(slope == nullptr ? p.program->forward : p.program->value, 0, x, columns);
    }
    hide(x, columns, negative_infinity<A>());
    // Hidden keys may hold anything, and 0 times a slope of NaN is NaN.
    if (slope != nullptr && p.score.transform != ScoreKind::none) hide(slope, columns, A(0));
  }

  // Computes factor * x + bias + table term in one pass.
  OMNIATTN_INLINE void add_terms(A* x, Range columns, A factor) const {
    using V = Vec<A>;
    const RelativeView& r = p.relative;
    const A* const relative = r.data == nullptr
                                  ? nullptr
                                  : static_cast<const A*>(r.data) + r.origin + b * r.stride_b +
                                        h * r.stride_h + q * r.stride_q + key;
    const auto pass = [&](const auto& with_bias) {
      const auto scaled = [&](int64_t n) {
        return with_bias(rounded_product(load(x + n), V(factor)), n);
      };
      if (relative == nullptr) {
        for_columns<A>(columns, [&](int64_t n) { store(x + n, scaled(n)); });
      } else {
        for_columns<A>(columns, [&](int64_t n) { store(x + n, scaled(n) + load(relative + n)); });
      }
    };
    if (p.bias.data != nullptr) {
      const ScoreView& s = p.bias;
      const int64_t offset = b * s.stride_b + h * s.stride_h + q * s.stride_q + key;
      with_score_row<A>(s, offset, [&](const auto* row) {
        pass([&](V product, int64_t n) { return product + load_as<A>(row + n, p.tk - key - n); });
      });
    } else if (relative != nullptr || factor != A(1)) {
      pass([](V product, int64_t) { return product; });
    }
  }

  // Runs steps of the program on the row x.
  void run_program(const ProgramRun& run, int32_t in, A* x, Range columns,
                   const ProgramGradient* gradients = nullptr) const {
    p.run_program({.program = p.program,
                   .registers = registers,
                   .b = p.first_batch + b,
                   .h = h,
                   .q = p.first_position + q,
                   .key = p.mask.part.first_k + key,
                   .keys = p.tk - key,
                   .columns = columns,
                   .visible = visible,
                   .gradients = gradients},
                  run, in, x);
  }

  // Sets hidden keys to `value`.
  OMNIATTN_INLINE void hide(A* x, Range columns, A value) const {
    if (visible == nullptr) return;
    for_columns<A>(columns, [&](int64_t n) {
      const Mask<A> seen = lanes_of<A>(visible[n / 64] >> (n % 64));
      store(x + n, select(seen, load(x + n), Vec<A>(value)));
    });
  }
};

// Dropout factors of keys [key, key + 128) of one query: 0 or 1 / (1 - p).
template <class A>
struct RowDropout {
  uint64_t keep[kMaskWords];
  A scale;

  RowDropout(const AttentionProblem& p, int64_t b, int64_t h, int64_t q, int64_t key)
      : scale(static_cast<A>(p.dropout.scale)) {
    for (int64_t w = 0; w < kMaskWords; ++w) {
      keep[w] = keep_bits(p.dropout, (p.first_batch + b) * p.hq + h, q, key + 64 * w);
    }
  }
  OMNIATTN_INLINE void apply(A* x, Range columns) const {
    for_columns<A>(columns, [&](int64_t n) {
      const Mask<A> kept = lanes_of<A>(keep[n / 64] >> (n % 64));
      store(x + n, load(x + n) * select(kept, Vec<A>(scale), zero<A>()));
    });
  }
};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
