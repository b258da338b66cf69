// Shared by convolutions over time, see conv.h: the inputs of a few steps at a time, and the parts
// of sequences in a range of items.
#pragma once

#include "kernels/conv/conv.h"
#include "runtime/row.h"
#include "semantics/seqlen.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

constexpr int kSteps = 4;  // steps at a time

// One vector for each of kSteps steps.
template <class V>
struct Steps {
  V of[kSteps];

  OMNIATTN_INLINE explicit Steps(V x) : of{x, x, x, x} {}
  OMNIATTN_INLINE V& operator[](int j) { return of[j]; }
  OMNIATTN_INLINE const V& operator[](int j) const { return of[j]; }
};

// True if rows of T at y are written past the caches, as whole aligned vectors.
template <class T>
bool streams(bool past_caches, const void* y, int64_t channels) {
  return past_caches && channels * sizeof(T) % kVecBytes == 0 &&
         reinterpret_cast<uintptr_t>(y) % kVecBytes == 0;
}

// Number of taps in most models, for which steps inside a sequence have a loop of their own: 0.55
// of the time on AVX2. Not for fp64, which nobody trains in.
template <class T>
constexpr int kUsualTaps = std::is_same_v<T, double> ? 0 : 4;

// Inputs of a sequence. kTaps: the number of taps, for steps whose input rows are all in x;
// otherwise 0.
template <class T, int kTaps>
struct ConvInputs {
  static constexpr bool kInside = kTaps > 0;
  const CausalConv p;  // copies: a reference would be read again after each store
  const ConvSequence s;
  const int64_t taps = kInside ? kTaps : p.taps;
  const int64_t before = taps - 1;

  // Row of x at step t, or of `before` if t < 0; for a step outside the sequence, the nearest
  // existing row.
  OMNIATTN_INLINE const T* row(int64_t t) const {
    if constexpr (!kInside) {
      t = larger(-before, smaller(t, s.steps - 1));
      if (t < 0) {
        return static_cast<const T*>(p.before) + s.n * p.before_batch + (t + before) * p.before_row;
      }
    }
    return static_cast<const T*>(p.x) + s.batch * p.x_batch + (s.row + t) * p.x_row;
  }

  // Calls f(k, x) for each tap k, where x[j] is the input of tap k at step t + j. Each row is
  // loaded once.
  template <class F>
  OMNIATTN_INLINE void for_taps(int64_t t, int64_t i, auto part, const F& f) const {
    const auto input = [&](int64_t r) { return part.load(row(r) + i); };
    Steps x(input(t - before));
#pragma GCC unroll 4
    for (int j = 2; j < kSteps; ++j) x[j] = input(t + j - 1 - before);
    x[1] = x[0];
    for_each_tap([&](int64_t k) {
#pragma GCC unroll 4
      for (int j = 1; j < kSteps; ++j) x[j - 1] = x[j];
      x[kSteps - 1] = input(t + kSteps - 1 + k - before);
      f(k, x);
    });
  }
  template <class F>
  OMNIATTN_INLINE void for_each_tap(const F& f) const {
    if constexpr (kInside) {
#pragma GCC unroll 4
      for (int k = 0; k < kTaps; ++k) f(k);
    } else {
      for (int64_t k = 0; k < taps; ++k) f(k);
    }
  }
};

// Calls f(sequence, first, end) for the part of each sequence in a range of items; first and end
// count from the sequence's first item.
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

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
