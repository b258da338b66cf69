// The bf16 pairs of vec_avx512.h in the compiler's vector extensions: for tests of software tiles
// on machines without AVX-512, so that clarity comes before speed.
#pragma once

#include "runtime/vec_portable.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

struct PairVec {
  VecF::Bits v;
};

OMNIATTN_INLINE PairVec load_pairs(const bf16* p) {
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
OMNIATTN_INLINE void store_pairs(bf16* p, PairVec x) { __builtin_memcpy(p, &x.v, sizeof(x.v)); }
[[gnu::noinline, maybe_unused]] void store_pairs_n(bf16* p, PairVec x, int64_t pairs) {
  bf16 terms[2 * VecF::kWidth];
  store_pairs(terms, x);
  for (int i = 0; i < 2 * VecF::kWidth && i < 2 * pairs; ++i) p[i] = terms[i];
}
OMNIATTN_INLINE VecF as_lanes(PairVec x) { return VecF::from_bits(x.v); }
OMNIATTN_INLINE PairVec as_pairs(VecF x) { return {x.bits()}; }

[[gnu::noinline, maybe_unused]] PairVec load_terms_n(const bf16* p, int64_t terms) {
  bf16 found[2 * VecF::kWidth] = {};
  for (int i = 0; i < 2 * VecF::kWidth && i < terms; ++i) found[i] = p[i];
  return load_pairs(found);
}
OMNIATTN_INLINE PairVec load_pairs_n(const bf16* p, int64_t pairs) {
  return load_terms_n(p, 2 * pairs);
}
[[gnu::noinline, maybe_unused]] PairVec load_pairs_of_rows_n(const bf16* first, int64_t n,
                                                             const bf16* second, int64_t n_second) {
  bf16 terms[2 * VecF::kWidth] = {};
  for (int i = 0; i < VecF::kWidth && i < n; ++i) terms[2 * i] = first[i];
  for (int i = 0; i < VecF::kWidth && i < n_second; ++i) terms[2 * i + 1] = second[i];
  return load_pairs(terms);
}

OMNIATTN_INLINE void store_factors(bf16* p, VecF x) { store(p, x); }
[[gnu::noinline, maybe_unused]] PairVec narrow_to_pairs(VecF first, VecF second) {
  bf16 low[VecF::kWidth], high[VecF::kWidth];
  store(low, first);
  store(high, second);
  return load_pairs_of_rows_n(low, VecF::kWidth, high, VecF::kWidth);
}

// The terms of each pair as floats.
OMNIATTN_INLINE VecF first_terms(PairVec x) { return VecF::from_bits(x.v << 16); }
OMNIATTN_INLINE VecF second_terms(PairVec x) { return VecF::from_bits(x.v & ~0xffff); }

OMNIATTN_INLINE VecF dot_bf16(VecF acc, PairVec a, PairVec b) {
  return fma(first_terms(a), first_terms(b), fma(second_terms(a), second_terms(b), acc));
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
