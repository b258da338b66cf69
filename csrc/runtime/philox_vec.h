// The words of an ElementStream (semantics/element_stream.h) on vectors, for the per-ISA kernel
// files.
#pragma once

#include "runtime/vec.h"
#include "semantics/element_stream.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

typedef uint64_t Words64 __attribute__((vector_size(kVecBytes)));

// Elements per call of store_element_words: a block of four for each 64-bit lane.
constexpr int kWordsPerStore = 4 * VecD::kWidth;

// Products, as 64 bits, of the lower halves of the lanes.
OMNIATTN_INLINE Words64 multiply_lower(Words64 a, uint32_t b) {
#if defined(__AVX512F__)
  return reinterpret_cast<Words64>(
      _mm512_mul_epu32(reinterpret_cast<__m512i>(a), _mm512_set1_epi64(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Words64>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(a), _mm256_set1_epi64x(b)));
#else
  return (a & 0xffffffff) * uint64_t{b};
#endif
}

// philox() on vectors: words[0 .. kWordsPerStore) belong to the elements from 4 group on. The upper
// halves of the lanes hold unused bits, so the low word of a product needs no mask.
OMNIATTN_INLINE void store_element_words(const ElementStream& stream, uint64_t group,
                                         uint32_t* words) {
  const Words64 index = reinterpret_cast<Words64>(lane_index_bits<double>()) + group;
  Words64 c0 = index, c1 = index >> 32;
  Words64 c2 = Words64{} + kElementCounter, c3 = Words64{} + stream.offset;
  uint32_t k0 = stream.key.word[0], k1 = stream.key.word[1];
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const Words64 p0 = multiply_lower(c0, 0xD2511F53), p1 = multiply_lower(c2, 0xCD9E8D57);
    c0 = (p1 >> 32) ^ c1 ^ k0;
    c1 = p1;
    c2 = (p0 >> 32) ^ c3 ^ k1;
    c3 = p0;
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  const auto pair = [](Words64 low, Words64 high) {
    return VecD::from_bits(reinterpret_cast<VecD::Bits>((low & 0xffffffff) | (high << 32)));
  };
  const auto [first, second] = interleave(pair(c0, c1), pair(c2, c3));
  __builtin_memcpy(words, &first.v, kVecBytes);
  __builtin_memcpy(words + kVecBytes / 4, &second.v, kVecBytes);
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
