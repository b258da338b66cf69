// Counter-based randomness: Philox4x32-10 of Salmon, Moraes, Dror, Shaw, "Parallel random numbers:
// as easy as 1, 2, 3" (SC 2011). A draw depends on seed, offset and position in the problem only.
#pragma once

#include <cstdint>

#include "semantics/macros.h"

namespace omniattn {

struct PhiloxWords {
  uint32_t word[4];
};

struct PhiloxKey {
  uint32_t word[2];
};

OMNIATTN_FN PhiloxKey philox_key(int64_t seed) {
  const auto bits = static_cast<uint64_t>(seed);
  return {{static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)}};
}

OMNIATTN_FN PhiloxWords philox(PhiloxWords c, PhiloxKey key) {
  uint32_t k0 = key.word[0], k1 = key.word[1];
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c.word[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57} * c.word[2];
    c = {{static_cast<uint32_t>(p1 >> 32) ^ c.word[1] ^ k0, static_cast<uint32_t>(p1),
          static_cast<uint32_t>(p0 >> 32) ^ c.word[3] ^ k1, static_cast<uint32_t>(p0)}};
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return c;
}

namespace philox_detail {
OMNIATTN_FN bool gives(PhiloxWords c, PhiloxKey k, PhiloxWords want) {
  const PhiloxWords got = philox(c, k);
  return got.word[0] == want.word[0] && got.word[1] == want.word[1] &&
         got.word[2] == want.word[2] && got.word[3] == want.word[3];
}
constexpr uint32_t kOnes = 0xffffffff;
static_assert(gives({{0, 0, 0, 0}}, {{0, 0}}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}));
static_assert(gives({{kOnes, kOnes, kOnes, kOnes}}, {{kOnes, kOnes}},
                    {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}));
static_assert(gives({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, {{0xa4093822, 0x299f31d0}},
                    {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}));
}  // namespace philox_detail

// Dropout of attention probabilities: position (b, h, i, j) reads word j & 3 of the block
// (j >> 2, i, b * Hq + h, offset) and is kept iff word >= floor(p * 2^32).
struct Dropout {
  uint64_t threshold;  // floor(p * 2^32); 0: no dropout
  double scale;        // factor of kept values: 1 / (1 - p), 0 for p = 1
  PhiloxKey key;
  uint32_t offset;
  // First query and key of a part of a problem (see Part); first_k is a multiple of 4.
  int64_t first_q, first_k;
};

OMNIATTN_FN Dropout make_dropout(double p, int64_t seed, int64_t offset) {
  return {static_cast<uint64_t>(p * 4294967296.0),
          p < 1.0 ? 1.0 / (1.0 - p) : 0.0,
          philox_key(seed),
          static_cast<uint32_t>(offset),
          0,
          0};
}

// Bit n, for 0 <= n < 4 kGroups, is set if (row, query, key + n) is kept. row is b * Hq + h; key is
// a multiple of 4.
template <int kGroups>
OMNIATTN_FN uint64_t keep_groups(const Dropout& dropout, int64_t row, int64_t query, int64_t key) {
  uint64_t bits = 0;
  for (int group = 0; group < kGroups; ++group) {
    const PhiloxWords w = philox({{static_cast<uint32_t>(((key + dropout.first_k) >> 2) + group),
                                   static_cast<uint32_t>(query + dropout.first_q),
                                   static_cast<uint32_t>(row), dropout.offset}},
                                 dropout.key);
    for (int n = 0; n < 4; ++n) bits |= uint64_t{w.word[n] >= dropout.threshold} << (4 * group + n);
  }
  return bits;
}

// Keep bits of 64 keys: keep_groups for 0 <= n < 64.
OMNIATTN_FN uint64_t keep_bits(const Dropout& dropout, int64_t row, int64_t query, int64_t key) {
  return keep_groups<16>(dropout, row, query, key);
}

}  // namespace omniattn
