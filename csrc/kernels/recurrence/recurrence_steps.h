// Few tokens of a recurrence, as decoding has them: one by one, each reading the state once and
// writing it once, which is all that they cost.
#pragma once

#include "kernels/recurrence/recurrence_chunk.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Up to this number of tokens the chunked form costs more.
constexpr int64_t kFewSteps = 4;

// A token's rows of K: its decay, the key, and key and query times the decay; one number each for
// beta and key . query.
template <class C>
struct Step {
  C *a, *k, *ak, *aq;
  C beta, kq;
  bool delta;

  Step(const Recurrence& p, Room<C>& room) : delta(p.beta.data != nullptr) {
    a = room.take(p.key_width), k = room.take(p.key_width);
    ak = room.take(p.key_width), aq = room.take(p.key_width);
  }

  template <class T>
  void load(const Recurrence& p, int64_t batch, int64_t t, int64_t head) {
    const int64_t key_head = head / (p.value_heads / p.key_heads);
    const T* const key = row_of<T>(p.k, batch, t, key_head);
    const T* const query = row_of<T>(p.q, batch, t, key_head);
    const C* const g = p.g.data != nullptr ? row_of<C>(p.g, batch, t, head) : nullptr;
    const Vec<C> of_head = exp(Vec<C>(g != nullptr && !p.channel_decay ? *g : C{0}));
    for_row<T>(p.key_width, [&](int64_t d, auto part) {
      const Vec<C> decay = p.channel_decay ? exp(part.load(g + d)) : of_head;
      part.store(a + d, decay);
      part.store(k + d, part.load(key + d));
      part.store(ak + d, part.load(key + d) * decay);
      part.store(aq + d, part.load(query + d) * static_cast<C>(p.scale) * decay);
    });
    kq = static_cast<C>(p.scale) * row_sum<T>(p.key_width, [&](int64_t d, auto part) {
           return part.load(key + d) * part.load(query + d);
         });
    beta = delta ? *row_of<C>(p.beta, batch, t, head) : C{1};
  }

  // kVecs vectors of columns, the accesses by `part`.
  template <int kVecs, class T>
  OMNIATTN_INLINE void columns(const Recurrence& p, const C* from, C* to, const T* v, T* o,
                               auto part) const {
    constexpr int kWidth = Vec<C>::kWidth;
    Vec<C> predicted[kVecs], result[kVecs];
#pragma GCC unroll 4
    for (int x = 0; x < kVecs; ++x) predicted[x] = result[x] = zero<C>();
    for (int64_t d = 0; d < p.key_width; ++d) {
#pragma GCC unroll 4
      for (int x = 0; x < kVecs; ++x) {
        const Vec<C> state = part.load(from + d * p.value_width + x * kWidth);
        predicted[x] = fma(state, Vec<C>(ak[d]), predicted[x]);
        result[x] = fma(state, Vec<C>(aq[d]), result[x]);
      }
    }
#pragma GCC unroll 4
    for (int x = 0; x < kVecs; ++x) {
      Vec<C>& u = predicted[x];
      const Vec<C> value = part.load(v + x * kWidth);
      u = delta ? (value - u) * beta : value;
      part.store(o + x * kWidth, fma(u, Vec<C>(kq), result[x]));
    }
    for (int64_t d = 0; d < p.key_width; ++d) {
#pragma GCC unroll 4
      for (int x = 0; x < kVecs; ++x) {
        const int64_t at = d * p.value_width + x * kWidth;
        part.store(to + at, fma(part.load(from + at), Vec<C>(a[d]), predicted[x] * k[d]));
      }
    }
  }
};

// All tokens of a sequence and head. `state` is that before the first one; those after each token
// are written to `final_state`, one over the other.
template <class T>
void steps(const RecurrenceParams& params, const RecurrenceSequence& s, Step<compute_t<T>>& step,
           const compute_t<T>* state, compute_t<T>* final_state, int64_t head) {
  using C = compute_t<T>;
  constexpr int kVecs = 4, kWidth = Vec<C>::kWidth;
  const Recurrence& p = params.recurrence;
  const int64_t V = p.value_width;
  for (int64_t t = s.begin; t < s.begin + s.count; ++t, state = final_state) {
    step.template load<T>(p, s.batch, t, head);
    const T* const v = row_of<T>(p.v, s.batch, t, head);
    T* const o = out_row<T>(p, params.o, s.batch, t, p.value_heads, head, V);
    int64_t j = 0;
    for (; j + kVecs * kWidth <= V; j += kVecs * kWidth) {
      step.template columns<kVecs>(p, state + j, final_state + j, v + j, o + j, Whole{});
    }
    for_row<C>(V - j, [&](int64_t i, auto part) {
      step.template columns<1>(p, state + j + i, final_state + j + i, v + j + i, o + j + i, part);
    });
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
