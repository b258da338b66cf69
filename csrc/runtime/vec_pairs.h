// The pairs of vec_avx512.h in the compiler's vector extensions, for tests of software tiles on
// machines without AVX-512. Clarity comes before speed.
#pragma once

#include "runtime/vec_portable.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

struct PairVec {
  VecF::Bits v;
};

template <class H>
OMNIATTN_INLINE PairVec load_pairs(const H* p) {
  PairVec x;
  __builtin_memcpy(&x.v, p, sizeof(x.v));
  return x;
}
OMNIATTN_INLINE PairVec broadcast_pair(const bf16* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, sizeof(pair));
  return {VecF::Bits{} + pair};
}
OMNIATTN_INLINE PairVec broadcast_half_pair(const bf16* p) { return {VecF::Bits{} + p->bits}; }
template <class H>
OMNIATTN_INLINE void store_pairs(H* p, PairVec x) {
  __builtin_memcpy(p, &x.v, sizeof(x.v));
}
template <class H>
[[gnu::noinline]] void store_pairs_n(H* p, PairVec x, int64_t pairs) {
  H terms[2 * VecF::kWidth];
  store_pairs(terms, x);
  for (int i = 0; i < 2 * VecF::kWidth && i < 2 * pairs; ++i) p[i] = terms[i];
}
OMNIATTN_INLINE VecF as_lanes(PairVec x) { return VecF::from_bits(x.v); }
OMNIATTN_INLINE PairVec as_pairs(VecF x) { return {x.bits()}; }

template <class H>
[[gnu::noinline]] PairVec load_terms_n(const H* p, int64_t terms) {
  H found[2 * VecF::kWidth] = {};
  for (int i = 0; i < 2 * VecF::kWidth && i < terms; ++i) found[i] = p[i];
  return load_pairs(found);
}
template <class H>
OMNIATTN_INLINE PairVec load_pairs_n(const H* p, int64_t pairs) {
  return load_terms_n(p, 2 * pairs);
}
template <class H>
[[gnu::noinline]] PairVec load_pairs_of_rows_n(const H* first, int64_t n, const H* second,
                                               int64_t n_second) {
  H terms[2 * VecF::kWidth] = {};
  for (int i = 0; i < VecF::kWidth && i < n; ++i) terms[2 * i] = first[i];
  for (int i = 0; i < VecF::kWidth && i < n_second; ++i) terms[2 * i + 1] = second[i];
  return load_pairs(terms);
}

OMNIATTN_INLINE void store_factors(bf16* p, VecF x) { store(p, x); }
OMNIATTN_INLINE void store_factors(bf16* p, VecF x, VecF y) {
  store(p, x);
  store(p + VecF::kWidth, y);
}
template <class H>
[[gnu::noinline]] PairVec narrow_to_pairs(VecF first, VecF second) {
  H low[VecF::kWidth], high[VecF::kWidth];
  store(low, first);
  store(high, second);
  return load_pairs_of_rows_n(low, VecF::kWidth, high, VecF::kWidth);
}

// Terms of each pair as floats.
template <class H>
OMNIATTN_INLINE VecF first_terms(PairVec x) {
  if constexpr (std::is_same_v<H, bf16>) return VecF::from_bits(x.v << 16);
  return map_lanes_unrolled<float>([&](int i) { return widen(H{static_cast<uint16_t>(x.v[i])}); });
}
template <class H>
OMNIATTN_INLINE VecF second_terms(PairVec x) {
  if constexpr (std::is_same_v<H, bf16>) return VecF::from_bits(x.v & ~0xffff);
  return first_terms<H>({x.v >> 16});
}

OMNIATTN_INLINE VecF dot_bf16(VecF acc, PairVec a, PairVec b) {
  return fma(first_terms<bf16>(a), first_terms<bf16>(b),
             fma(second_terms<bf16>(a), second_terms<bf16>(b), acc));
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
