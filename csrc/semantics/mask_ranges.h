// Ranges of keys, and 64-bit words with one bit per key, for mask rules.
#pragma once

#include <cstdint>

#include "semantics/macros.h"
#include "semantics/seqlen.h"

namespace omniattn::mask_rules {

constexpr int64_t kFar = int64_t{1} << 60;  // beyond every position

OMNIATTN_FN int64_t floor_to(int64_t x, int64_t unit) {
  const int64_t rest = x % unit;
  return x - (rest < 0 ? rest + unit : rest);
}

// The smallest range that contains both x and y.
OMNIATTN_FN Range hull(Range x, Range y) {
  if (is_empty(x)) return y;
  if (is_empty(y)) return x;
  return {x.begin < y.begin ? x.begin : y.begin, x.end > y.end ? x.end : y.end};
}

// Smallest and largest (inclusive) value of ids[r]; r must not be empty.
OMNIATTN_FN Range bounds(const int64_t* ids, Range r) {
  Range found{ids[r.begin], ids[r.begin]};
  for (int64_t n = r.begin; n < r.end; ++n) {
    found.begin = ids[n] < found.begin ? ids[n] : found.begin;
    found.end = ids[n] > found.end ? ids[n] : found.end;
  }
  return found;
}

// A range that holds the keys k of `keys` with (i - k) mod period == 0 for some i of [first, last].
OMNIATTN_FN Range dilated_keys(int64_t first, int64_t last, int64_t period, Range keys) {
  // Largest and smallest multiple of `period` that i - k can be.
  const int64_t farthest = floor_to(last - keys.begin, period);
  const int64_t nearest = -floor_to(keys.end - 1 - first, period);
  if (nearest > farthest) return {0, 0};
  return intersect({first - farthest, last - nearest + 1}, keys);
}

// A range that holds the keys k of `keys` with k mod period >= from.
OMNIATTN_FN Range periodic_keys(int64_t period, int64_t from, Range keys) {
  if (from >= period) return {0, 0};
  const int64_t start = floor_to(keys.begin, period) + from;
  const int64_t end = floor_to(keys.end - 1, period);
  const Range found{keys.begin > start ? keys.begin : start,
                    keys.end - 1 - end >= from ? keys.end : end};
  return intersect(found, keys);
}

// Bit sets: bit n stands for key + n, 0 <= n < 64.

OMNIATTN_FN uint64_t range_bits(Range r, int64_t key) {
  const Range w = intersect(r, {key, key + 64});
  if (is_empty(w)) return 0;
  return (~uint64_t{0} >> (64 - (w.end - w.begin))) << (w.begin - key);
}

// Bits n with key + n == at (mod period).
OMNIATTN_FN uint64_t periodic_bits(int64_t at, int64_t period, int64_t key) {
  const int64_t first = at - floor_to(at - key, period) - key;
  if (first >= 64) return 0;
  uint64_t bits = uint64_t{1} << first;
  for (int64_t step = period; step < 64; step *= 2) bits |= bits << step;
  return bits;
}

// Bits n < count with row[n] != 0.
OMNIATTN_FN uint64_t byte_bits(const uint8_t* row, int64_t count) {
  uint64_t bits = 0;
  for (int64_t n = 0; n < (count < 64 ? count : 64); ++n) bits |= uint64_t{row[n] != 0} << n;
  return bits;
}

// Bits n < count with row[n] == id.
OMNIATTN_FN uint64_t equal_bits(const int64_t* row, int64_t id, int64_t count) {
  uint64_t bits = 0;
  for (int64_t n = 0; n < (count < 64 ? count : 64); ++n) bits |= uint64_t{row[n] == id} << n;
  return bits;
}

}  // namespace omniattn::mask_rules
