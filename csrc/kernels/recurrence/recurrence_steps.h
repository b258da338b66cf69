// A few tokens of a recurrence, as in decoding, one by one. Each token reads and writes the state
// once, which is nearly all of the cost.
#pragma once

#include "kernels/recurrence/recurrence_rows.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Up to this number of tokens, the chunked form costs more.
constexpr int64_t kFewSteps = 4;

// A token's rows of K: its decay, its keys, and the probe and query as applied to the state. beta,
// of_u and of_c are scalars: the latter two are the shares of u and c in the unscaled output.
template <class C, class Update>
struct Step {
  static constexpr bool kTwoKeys = Update::kKeys == 2;
  C *w, *k, *b, *probe, *q, *query;
  C *v, *o, *decays;  // of V; decays of values, if there are any
  C beta, of_u, of_c;
  const C* min_denominator;

  Step(const Recurrence& p, Room<C>& room) {
    w = room.take(p.key_width), k = room.take(p.key_width), b = room.take(p.key_width);
    probe = room.take(p.key_width), q = room.take(p.key_width), query = room.take(p.key_width);
    v = room.take(p.value_width), o = room.take(p.value_width);
    decays = room.take(p.value_width);
  }

  void load(const Recurrence& p, const RecurrenceSequence& s, int64_t t, int64_t head) {
    const int64_t key_head = p.key_head_of(head), batch = s.batch;
    const auto read = [&](const StepView& x, int64_t h, int64_t width, C* to) {
      load_rows(p.dtype, row_of(p.dtype, x, batch, t, h), 0, 1, width, Matrix<C>{to, 0});
    };
    read(p.k, key_head, p.key_width, k);
    read(p.q, key_head, p.key_width, q);
    to_features(p.features, Matrix<C>{k, 0}, 1, p.key_width);
    to_features(p.features, Matrix<C>{q, 0}, 1, p.key_width);
    read(p.v, head, p.value_width, v);
    const int64_t decaying = p.gv.data != nullptr ? p.value_width : 0;
    for_row<C>(decaying, [&](int64_t j, auto part) {
      part.store(decays + j, exp(part.load(row_of<C>(p.gv, batch, t, head) + j)));
    });
    if (kTwoKeys) read(p.a, key_head, p.key_width, probe), read(p.b, key_head, p.key_width, b);
    const C* const asks = kTwoKeys ? probe : k;
    const C* const g = p.g.data != nullptr ? row_of<C>(p.g, batch, t, head) : nullptr;
    const C* const bonus = head_row<const C>(p, p.bonus, s.index, head, p.key_width);
    const Vec<C> of_head = exp(Vec<C>(g != nullptr && !p.channel_decay ? *g : C{0}));
    for_row<C>(p.key_width, [&](int64_t d, auto part) {
      const Vec<C> decay = p.channel_decay ? exp(part.load(g + d)) : of_head;
      part.store(w + d, decay);
      if constexpr (Update::kProbe) {
        const Vec<C> x = part.load(asks + d);
        part.store(probe + d, Update::kProbesBefore ? x : x * decay);
      }
      const Vec<C> x = part.load(q + d);
      part.store(query + d, Update::kBonus ? x : x * decay);
    });
    const auto output_of = [&](const C* row) {
      return row_sum<C>(p.key_width, [&](int64_t d, auto part) {
        const Vec<C> x = part.load(row + d) * part.load(q + d);
        return Update::kBonus ? x * part.load(bonus + d) : x;
      });
    };
    of_u = output_of(k);
    if constexpr (kTwoKeys) of_c = output_of(b);
    beta = p.beta.data != nullptr ? *row_of<C>(p.beta, batch, t, head) : C{1};
    min_denominator =
        p.min_denominator.data != nullptr ? row_of<C>(p.min_denominator, batch, t, head) : nullptr;
  }

  // Steps kVecs vectors of columns from j on; `part` does the accesses.
  template <int kVecs, bool kDecays>
  OMNIATTN_INLINE void columns(const Recurrence& p, const C* from, C* to, int64_t j,
                               auto part) const {
    constexpr int kWidth = Vec<C>::kWidth;
    const int64_t width = p.state_width();
    Vec<C> predicted[kVecs], result[kVecs], u[kVecs], decay[kVecs];
#pragma GCC unroll 4
    for (int x = 0; x < kVecs; ++x) predicted[x] = result[x] = zero<C>();
    for (int64_t d = 0; d < p.key_width; ++d) {
#pragma GCC unroll 4
      for (int x = 0; x < kVecs; ++x) {
        const Vec<C> state = part.load(from + d * width + j + x * kWidth);
        if constexpr (Update::kProbe) predicted[x] = fma(state, Vec<C>(probe[d]), predicted[x]);
        result[x] = fma(state, Vec<C>(query[d]), result[x]);
      }
    }
#pragma GCC unroll 4
    for (int x = 0; x < kVecs; ++x) {
      const Vec<C> value = part.load(v + j + x * kWidth);
      if constexpr (kDecays) result[x] *= decay[x] = part.load(decays + j + x * kWidth);
      u[x] = (Update::kProbe && !kTwoKeys ? value - predicted[x] : value) * beta;
      if constexpr (kTwoKeys) result[x] = fma(predicted[x], Vec<C>(of_c), result[x]);
      part.store(o + j + x * kWidth, fma(u[x], Vec<C>(of_u), result[x]));
    }
    for (int64_t d = 0; d < p.key_width; ++d) {
#pragma GCC unroll 4
      for (int x = 0; x < kVecs; ++x) {
        const int64_t at = d * width + j + x * kWidth;
        Vec<C> added = u[x] * k[d];
        if constexpr (kTwoKeys) added = fma(predicted[x], Vec<C>(b[d]), added);
        Vec<C> factor(w[d]);
        if constexpr (kDecays) factor *= decay[x];
        part.store(to + at, fma(part.load(from + at), factor, added));
      }
    }
  }

  // Divides the output by the sum of its weights, and adds the token to that sum's column.
  void divide(const Recurrence& p, const C* from, C* to) const {
    C sum = 0;
    for (int64_t d = 0; d < p.key_width; ++d) {
      const int64_t at = d * p.state_width() + p.value_width;
      sum += q[d] * (to[at] = from[at] * w[d] + beta * k[d]);
    }
    divide_row(o, divisor(sum, min_denominator, static_cast<C>(p.eps)).value, p.value_width);
  }
};

// Steps all tokens of a sequence and head. `state` is the state before the first token; the state
// after each token overwrites `final_state`.
template <class C, class Update>
void steps(const RecurrenceParams& params, const RecurrenceSequence& s, Step<C, Update>& step,
           const C* state, C* final_state, int64_t head) {
  constexpr int kVecs = 4, kWidth = Vec<C>::kWidth;
  const Recurrence& p = params.recurrence;
  const int64_t V = p.value_width;
  const C* const skip = head_row<const C>(p, p.skip, s.index, head, V);
  for (int64_t t = s.begin; t < s.begin + s.count; ++t, state = final_state) {
    step.load(p, s, t, head);
    const auto all_columns = [&]<bool kDecays>() {
      int64_t j = 0;
      for (; j + kVecs * kWidth <= V; j += kVecs * kWidth) {
        step.template columns<kVecs, kDecays>(p, state, final_state, j, Whole{});
      }
      for_row<C>(V - j, [&](int64_t i, auto part) {
        step.template columns<1, kDecays>(p, state, final_state, j + i, part);
      });
    };
    if (Update::kValueDecay && p.gv.data != nullptr) {
      all_columns.template operator()<Update::kValueDecay>();
    } else {
      all_columns.template operator()<false>();
    }
    const Matrix<C> v{step.v, 0}, o{step.o, 0};
    if (skip != nullptr) add_skip(skip, v, o, 1, V);
    if (p.normalize) step.divide(p, state, final_state);
    char* const row = out_row(p.o_dtype, p, params.o, s.batch, t, p.value_heads, head, V);
    store_rows(p.o_dtype, o, 1, V, row, 0, static_cast<C>(p.scale));
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
