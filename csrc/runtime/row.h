// Loops over one row for the per-ISA kernel files: the body is written once and instantiated for
// whole vectors and for the tail.
//
//   for_row<T>(n, [&](int64_t i, auto part) { part.store(y + i, part.load(x + i) * 2.0f); });
//
// A body that accesses only pointers of T and float (sums through load_sums and store_sums) may
// request Order::any. Rows of bf16 are then processed as even and odd elements, see Halves.
#pragma once

#include "runtime/vec.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

enum class Order { natural, any };

// 2 kWidth elements of bf16 as one vector of even and one of odd elements. Widening is then a shift
// or a mask, and narrowing needs no shuffle: RMSNorm in bf16 took 0.7 of the time.
struct Halves {
  VecF even, odd;

  OMNIATTN_INLINE Halves(VecF e, VecF o) : even(e), odd(o) {}
  OMNIATTN_INLINE Halves(float scalar) : even(scalar), odd(scalar) {}

  OMNIATTN_INLINE friend Halves operator+(Halves a, Halves b) {
    return {a.even + b.even, a.odd + b.odd};
  }
  OMNIATTN_INLINE friend Halves operator-(Halves a, Halves b) {
    return {a.even - b.even, a.odd - b.odd};
  }
  OMNIATTN_INLINE friend Halves operator*(Halves a, Halves b) {
    return {a.even * b.even, a.odd * b.odd};
  }
  OMNIATTN_INLINE friend Halves fma(Halves a, Halves b, Halves c) {
    return {fma(a.even, b.even, c.even), fma(a.odd, b.odd, c.odd)};
  }
  OMNIATTN_INLINE Halves& operator+=(Halves b) { return *this = *this + b; }
};

// Applies f to vectors, or to both halves of Halves.
template <class F, class T, class... Rest>
OMNIATTN_INLINE auto lanewise(const F& f, Vec<T> x, Rest... rest) {
  return f(x, rest...);
}
template <class F, class... Rest>
OMNIATTN_INLINE Halves lanewise(const F& f, Halves x, Rest... rest) {
  return {f(x.even, rest.even...), f(x.odd, rest.odd...)};
}

template <class T>
OMNIATTN_INLINE Vec<T> fold(Vec<T> x) {
  return x;
}
OMNIATTN_INLINE VecF fold(Halves x) { return x.even + x.odd; }

// Rounds each float to bf16 in its upper half-word, to nearest even; NaN stays NaN.
OMNIATTN_INLINE VecF::Bits rounded_to_upper_half(VecF x) {
  const VecF::Bits bits = x.bits();
  const VecF::Bits rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return select(x != x, VecF::from_bits(bits | 0x400000), VecF::from_bits(rounded)).bits();
}

// Accesses whole vectors of even and odd elements.
struct EvenOdd {
  OMNIATTN_INLINE Halves load(const bf16* p) const {
    VecF::Bits pairs;
    __builtin_memcpy(&pairs, p, sizeof(pairs));
    return {VecF::from_bits(pairs << 16), VecF::from_bits(pairs & ~0xffff)};
  }
  OMNIATTN_INLINE void store(bf16* p, Halves x) const {
    const VecF::Bits bits = pairs(x);
    __builtin_memcpy(p, &bits, sizeof(bits));
  }
  OMNIATTN_INLINE void stream(bf16* p, Halves x) const {
    OMNIATTN_ISA::stream(reinterpret_cast<float*>(p), VecF::from_bits(pairs(x)));
  }
  OMNIATTN_INLINE Halves load(const float* p) const {
    const auto [even, odd] =
        deinterleave(OMNIATTN_ISA::load(p), OMNIATTN_ISA::load(p + VecF::kWidth));
    return {even, odd};
  }
  OMNIATTN_INLINE void store(float* p, Halves x) const {
    const auto [low, high] = interleave(x.even, x.odd);
    OMNIATTN_ISA::store(p, low);
    OMNIATTN_ISA::store(p + VecF::kWidth, high);
  }
  // Sums kept per element are stored in lane order.
  OMNIATTN_INLINE Halves load_sums(const float* p) const {
    return {OMNIATTN_ISA::load(p), OMNIATTN_ISA::load(p + VecF::kWidth)};
  }
  OMNIATTN_INLINE void store_sums(float* p, Halves x) const {
    OMNIATTN_ISA::store(p, x.even);
    OMNIATTN_ISA::store(p + VecF::kWidth, x.odd);
  }
  OMNIATTN_INLINE Halves zero_beyond(Halves x) const { return x; }

 private:
  OMNIATTN_INLINE static VecF::Bits pairs(Halves x) {
    return (rounded_to_upper_half(x.even) >> 16 & 0xffff) |
           (rounded_to_upper_half(x.odd) & ~0xffff);
  }
};

// Accesses the kWidth elements from a position on.
struct Whole {
  template <class S>
  OMNIATTN_INLINE auto load(const S* p) const {
    return OMNIATTN_ISA::load(p);
  }
  template <class S>
  OMNIATTN_INLINE void store(S* p, Vec<compute_t<S>> x) const {
    OMNIATTN_ISA::store(p, x);
  }
  // Bypasses the caches; the address must be aligned.
  template <class S>
  OMNIATTN_INLINE void stream(S* p, Vec<compute_t<S>> x) const {
    OMNIATTN_ISA::stream(p, x);
  }
  template <class T>
  OMNIATTN_INLINE Vec<T> load_sums(const T* p) const {
    return load(p);
  }
  template <class T>
  OMNIATTN_INLINE void store_sums(T* p, Vec<T> x) const {
    store(p, x);
  }
  // x with the lanes past the end of the row set to zero.
  template <class T>
  OMNIATTN_INLINE Vec<T> zero_beyond(Vec<T> x) const {
    return x;
  }
  // For rows whose elements are pairs: the two vectors that hold the pairs of this part.
  OMNIATTN_INLINE Whole first_of_pairs() const { return {}; }
  template <class T>
  OMNIATTN_INLINE Whole second_of_pairs() const {
    return {};
  }
};

// Accesses the first n of these elements.
struct First {
  int64_t n;

  template <class S>
  OMNIATTN_INLINE auto load(const S* p) const {
    return load_n(p, n);
  }
  template <class S>
  OMNIATTN_INLINE void store(S* p, Vec<compute_t<S>> x) const {
    store_n(p, x, n);
  }
  template <class S>
  OMNIATTN_INLINE void stream(S* p, Vec<compute_t<S>> x) const {
    store(p, x);
  }
  template <class T>
  OMNIATTN_INLINE Vec<T> load_sums(const T* p) const {
    return load(p);
  }
  template <class T>
  OMNIATTN_INLINE void store_sums(T* p, Vec<T> x) const {
    store(p, x);
  }
  template <class T>
  OMNIATTN_INLINE Vec<T> zero_beyond(Vec<T> x) const {
    return select(lanes_below<T>(n), x, Vec<T>(T{0}));
  }
  OMNIATTN_INLINE First first_of_pairs() const { return {2 * n}; }
  template <class T>
  OMNIATTN_INLINE First second_of_pairs() const {
    return {2 * n - Vec<T>::kWidth};
  }
};

template <class T, Order kOrder>
constexpr bool kWalksHalves = false;
template <>
constexpr bool kWalksHalves<bf16, Order::any> = !OMNIATTN_FOR_SIZE;

// Calls body(i, part) for the parts of a row of n; T is the storage or the compute type.
template <class T, Order kOrder = Order::natural, class F>
OMNIATTN_INLINE void for_row(int64_t n, const F& body) {
  constexpr int kWidth = Vec<compute_t<T>>::kWidth;
  int64_t i = 0;
  if constexpr (kWalksHalves<T, kOrder>) {
    for (; i + 2 * kWidth <= n; i += 2 * kWidth) body(i, EvenOdd{});
  }
  for (; i + kWidth <= n; i += kWidth) body(i, Whole{});
  if (i < n) body(i, First{n - i});
}

// A sum in four parts, which hides the latency of the addition.
template <class T>
struct RowSum {
  Vec<T> parts[4] = {Vec<T>(T{0}), Vec<T>(T{0}), Vec<T>(T{0}), Vec<T>(T{0})};

  template <class V>
  OMNIATTN_INLINE void add(int k, V x) {
    parts[k] += fold(x);
  }
  OMNIATTN_INLINE T total() const {
    return reduce_add((parts[0] + parts[1]) + (parts[2] + parts[3]));
  }
};

// for_row in steps of four: body(i, part, k) with k = 0..3, the index of the RowSum part to add to.
// The order of additions depends on n only.
template <class T, Order kOrder = Order::natural, class F>
OMNIATTN_INLINE void for_row_by_four(int64_t n, const F& body) {
  constexpr int kWidth = Vec<compute_t<T>>::kWidth;
  int64_t i = 0;
  if constexpr (OMNIATTN_FOR_SIZE) {
    for (; i + kWidth <= n; i += kWidth) body(i, Whole{}, static_cast<int>(i / kWidth % 4));
  } else if constexpr (kWalksHalves<T, kOrder>) {
    for (; i + 8 * kWidth <= n; i += 8 * kWidth) {
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) body(i + 2 * k * kWidth, EvenOdd{}, k);
    }
    for (; i + 2 * kWidth <= n; i += 2 * kWidth) body(i, EvenOdd{}, 0);
  } else {
    for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) body(i + k * kWidth, Whole{}, k);
    }
  }
  for (; i + kWidth <= n; i += kWidth) body(i, Whole{}, 0);
  if (i < n) body(i, First{n - i}, 0);
}

// Sum over the row of term(i, part), whose lanes past the end of the row are ignored.
template <class T, Order kOrder = Order::natural, class F>
OMNIATTN_INLINE compute_t<T> row_sum(int64_t n, const F& term) {
  RowSum<compute_t<T>> sum;
  for_row_by_four<T, kOrder>(
      n, [&](int64_t i, auto part, int k) { sum.add(k, part.zero_beyond(term(i, part))); });
  return sum.total();
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
