// The rules that say which keys a query may attend to, one struct each.
//
// A struct answers one exact question, which of 64 keys a query sees (bits), and six about ranges
// that let kernels skip work. The range answers may be loose, never wrong:
//
//   keys_any     a range holding every key that some query of a range sees, for any head
//   queries_any  a range holding every query that sees some key of a range, for any head
//   next_key     the first key from a given one on that some query of a range may see
//   next_query   the first query from a given one on that may see some key of a range
//   keys_in      what keys_any leaves of one tile, where more may be known
//   all          every query of a tile sees every key of it
//
// It also says what side tensors the rule needs (kSide) and which parameters have a meaning
// (parameters_fit). To add a rule: its struct here, and a line in OMNIATTN_MASK_RULES. A struct
// without one of the members does not compile.
#pragma once

#include <cstdint>

#include "semantics/macros.h"
#include "semantics/seqlen.h"

namespace omniattn {

// name, number in the encoded form, struct
#define OMNIATTN_MASK_RULES(rule)                                                        \
  rule(window_bottom_right, 0, Window<false>) rule(window_top_left, 1, Window<true>)     \
      rule(key_lengths, 2, KeyLengths) rule(tensor, 3, PerScore) rule(prefix, 4, Prefix) \
          rule(chunk, 5, Chunk) rule(documents, 6, Documents) rule(dilated, 7, Dilated)  \
              rule(strided, 8, Strided) rule(strided_heads, 9, StridedHeads)             \
                  rule(fixed, 10, Fixed) rule(every, 11, Every) rule(blocks, 12, Blocks) \
                      rule(neighbours, 16, Neighbours)

enum class MaskKind : int32_t {
#define OMNIATTN_RULE(name, number, Rule) name = number,
  OMNIATTN_MASK_RULES(OMNIATTN_RULE)
#undef OMNIATTN_RULE
};

// Parameters are checked against this bound, so that sums of positions and parameters cannot
// overflow.
constexpr int64_t kMaskParamLimit = int64_t{1} << 40;
constexpr int64_t kPatternBlock = 64;  // queries and keys of a block of MaskKind::blocks

// What the side tensors of a rule must be; csrc/ops checks shapes and dtypes by it.
enum class SideTensor : int32_t {
  none,
  per_batch,  // int64 (B,)
  per_score,  // bool, broadcast to (B, H, Tq, Tk)
  ids,        // int64 (B, Tq) and int64 (B, Tk)
  // int32, broadcast to (B, H, blocks of q, blocks of k): 0 hidden, 1 visible, 2 + n by row n of
  // the second tensor, int64 (N, 64): bit k of word q. The decoded rule has b = N.
  blocks,
};

struct MaskRule {
  MaskKind kind;
  int64_t a, b;
  const void* side;    // first side tensor, or null
  const void* second;  // second side tensor, or null
  // Of the first side tensor, in elements; unit stride over keys (over queries: ids).
  int64_t stride_b, stride_h, stride_q;
  int64_t second_stride_b;
};

namespace mask_rules {

// One rule, for one batch entry and head of a problem.
struct Place {
  const MaskRule& rule;
  int64_t tq, tk;
  int64_t batch, head;

  // Position among the keys of query q, bottom-right aligned: the i of the rules below.
  OMNIATTN_FN int64_t position(int64_t q) const { return q + bottom_right_offset(tq, tk); }
  OMNIATTN_FN Range positions(Range q) const { return {position(q.begin), position(q.end)}; }
  // Numbers of queries at these positions.
  OMNIATTN_FN Range queries(Range i) const {
    const int64_t off = bottom_right_offset(tq, tk);
    return {i.begin - off, i.end - off};
  }
};

// ---- arithmetic of ranges
// ------------------------------------------------------------------------

constexpr int64_t kFar = int64_t{1} << 60;

OMNIATTN_FN int64_t floor_to(int64_t x, int64_t unit) {
  const int64_t rest = x % unit;
  return x - (rest < 0 ? rest + unit : rest);
}

// The smallest range that holds both.
OMNIATTN_FN Range hull(Range x, Range y) {
  if (is_empty(x)) return y;
  if (is_empty(y)) return x;
  return {x.begin < y.begin ? x.begin : y.begin, x.end > y.end ? x.end : y.end};
}

// Smallest and largest (inclusive) of ids[r]; r is not empty.
OMNIATTN_FN Range bounds(const int64_t* ids, Range r) {
  Range found{ids[r.begin], ids[r.begin]};
  for (int64_t n = r.begin; n < r.end; ++n) {
    found.begin = ids[n] < found.begin ? ids[n] : found.begin;
    found.end = ids[n] > found.end ? ids[n] : found.end;
  }
  return found;
}

// Keys k of `keys` for which some i of [first, last] has (i - k) mod period == 0.
OMNIATTN_FN Range dilated_keys(int64_t first, int64_t last, int64_t period, Range keys) {
  const int64_t farthest = floor_to(last - keys.begin, period);  // multiples i - k may be
  const int64_t nearest = -floor_to(keys.end - 1 - first, period);
  if (nearest > farthest) return {0, 0};
  return intersect({first - farthest, last - nearest + 1}, keys);
}

// Keys k of `keys` with k mod period >= from.
OMNIATTN_FN Range periodic_keys(int64_t period, int64_t from, Range keys) {
  if (from >= period) return {0, 0};
  const int64_t start = floor_to(keys.begin, period) + from;
  const int64_t end = floor_to(keys.end - 1, period);
  const Range found{keys.begin > start ? keys.begin : start,
                    keys.end - 1 - end >= from ? keys.end : end};
  return intersect(found, keys);
}

// ---- bits: n stands for key + n, 0 <= n < 64
// -----------------------------------------------------

OMNIATTN_FN uint64_t range_bits(Range r, int64_t key) {
  const Range w = intersect(r, {key, key + 64});
  if (is_empty(w)) return 0;
  return (~uint64_t{0} >> (64 - (w.end - w.begin))) << (w.begin - key);
}

// key + n = at (mod period).
OMNIATTN_FN uint64_t periodic_bits(int64_t at, int64_t period, int64_t key) {
  const int64_t first = at - floor_to(at - key, period) - key;
  if (first >= 64) return 0;
  uint64_t bits = uint64_t{1} << first;
  for (int64_t step = period; step < 64; step *= 2) bits |= bits << step;
  return bits;
}

// row[n] != 0, for n < count and n < 64.
OMNIATTN_FN uint64_t byte_bits(const uint8_t* row, int64_t count) {
  uint64_t bits = 0;
  for (int64_t n = 0; n < (count < 64 ? count : 64); ++n) bits |= uint64_t{row[n] != 0} << n;
  return bits;
}

// row[n] == id, for n < count and n < 64.
OMNIATTN_FN uint64_t equal_bits(const int64_t* row, int64_t id, int64_t count) {
  uint64_t bits = 0;
  for (int64_t n = 0; n < (count < 64 ? count : 64); ++n) bits |= uint64_t{row[n] == id} << n;
  return bits;
}

// ---- bases --------------------------------------------------------------------------------------

struct AnyParameters {
  OMNIATTN_FN static bool parameters_fit(int64_t, int64_t) { return true; }
};

// No key or query is skipped within the ranges of keys_any and queries_any.
struct InRange {
  OMNIATTN_FN static int64_t next_key(const Place&, Range, int64_t key) { return key; }
  OMNIATTN_FN static int64_t next_query(const Place&, Range, int64_t query) { return query; }
};

// Each query sees one range of keys, Rule::keys, both ends of which grow with the query.
template <class Rule>
struct OneRange : InRange {
  OMNIATTN_FN static Range keys_any(const Place& x, Range q) {
    return {Rule::keys(x, q.begin).begin, Rule::keys(x, q.end - 1).end};
  }
  OMNIATTN_FN static Range keys_in(const Place& x, Range q, Range k) {
    return intersect(keys_any(x, q), k);
  }
  OMNIATTN_FN static bool all(const Place& x, Range q, Range k) {
    return contains({Rule::keys(x, q.end - 1).begin, Rule::keys(x, q.begin).end}, k);
  }
  OMNIATTN_FN static uint64_t bits(const Place& x, int64_t q, int64_t key) {
    return range_bits(Rule::keys(x, q), key);
  }
};

// Keys anywhere may be visible.
struct Anywhere : InRange {
  OMNIATTN_FN static Range keys_any(const Place& x, Range) { return {0, x.tk}; }
  OMNIATTN_FN static Range queries_any(const Place& x, Range) { return {0, x.tq}; }
};

// ---- rules, mod never negative ------------------------------------------------------------------

// i - a <= k <= i + b; a or b = -1: unbounded. Causal is (-1, 0). Top-left: i = q.
template <bool kTopLeft>
struct Window : OneRange<Window<kTopLeft>>, AnyParameters {
  static constexpr SideTensor kSide = SideTensor::none;
  OMNIATTN_FN static Range keys(const Place& x, int64_t q) {
    const int64_t i = kTopLeft ? q : x.position(q);
    return {x.rule.a < 0 ? -kFar : i - x.rule.a, x.rule.b < 0 ? kFar : i + x.rule.b + 1};
  }
  OMNIATTN_FN static Range queries_any(const Place& x, Range k) {
    const Range i{x.rule.b < 0 ? -kFar : k.begin - x.rule.b,
                  x.rule.a < 0 ? kFar : k.end + x.rule.a};
    return kTopLeft ? i : x.queries(i);
  }
};

OMNIATTN_FN int64_t length_of(const Place& x) {
  return static_cast<const int64_t*>(x.rule.side)[x.batch * x.rule.stride_b];
}

// k < lengths[batch]
struct KeyLengths : OneRange<KeyLengths>, AnyParameters {
  static constexpr SideTensor kSide = SideTensor::per_batch;
  OMNIATTN_FN static Range keys(const Place& x, int64_t) { return {0, length_of(x)}; }
  OMNIATTN_FN static Range queries_any(const Place& x, Range k) {
    return {0, k.begin < length_of(x) ? x.tq : 0};
  }
};

// k < lengths[batch] or k <= i
struct Prefix : OneRange<Prefix>, AnyParameters {
  static constexpr SideTensor kSide = SideTensor::per_batch;
  OMNIATTN_FN static Range keys(const Place& x, int64_t q) {
    const int64_t length = length_of(x), i = x.position(q);
    return {0, length > i ? length : i + 1};
  }
  OMNIATTN_FN static Range queries_any(const Place& x, Range k) {
    return k.begin < length_of(x) ? Range{0, kFar} : x.queries({k.begin, kFar});
  }
};

// floor(i / a) == floor(k / a)
struct Chunk : OneRange<Chunk> {
  static constexpr SideTensor kSide = SideTensor::none;
  OMNIATTN_FN static bool parameters_fit(int64_t a, int64_t) { return a >= 1; }
  OMNIATTN_FN static Range keys(const Place& x, int64_t q) {
    const int64_t first = floor_to(x.position(q), x.rule.a);
    return {first, first + x.rule.a};
  }
  OMNIATTN_FN static Range queries_any(const Place& x, Range k) {
    return x.queries({floor_to(k.begin, x.rule.a), floor_to(k.end - 1, x.rule.a) + x.rule.a});
  }
};

// As given.
struct PerScore : Anywhere, AnyParameters {
  static constexpr SideTensor kSide = SideTensor::per_score;
  OMNIATTN_FN static Range keys_in(const Place&, Range, Range k) { return k; }
  OMNIATTN_FN static bool all(const Place&, Range, Range) { return false; }
  OMNIATTN_FN static uint64_t bits(const Place& x, int64_t q, int64_t key) {
    const MaskRule& r = x.rule;
    return byte_bits(static_cast<const uint8_t*>(r.side) + x.batch * r.stride_b +
                         x.head * r.stride_h + q * r.stride_q + key,
                     x.tk - key);
  }
};

// id of q == id of k
struct Documents : Anywhere, AnyParameters {
  static constexpr SideTensor kSide = SideTensor::ids;
  OMNIATTN_FN static const int64_t* query_ids(const Place& x) {
    return static_cast<const int64_t*>(x.rule.side) + x.batch * x.rule.stride_b;
  }
  OMNIATTN_FN static const int64_t* key_ids(const Place& x) {
    return static_cast<const int64_t*>(x.rule.second) + x.batch * x.rule.second_stride_b;
  }
  OMNIATTN_FN static Range keys_in(const Place& x, Range q, Range k) {
    const Range seen = bounds(query_ids(x), q);
    const int64_t* const ids = key_ids(x);
    const Range held = bounds(ids, k);
    if (held.end < seen.begin || held.begin > seen.end) return {0, 0};
    while (k.begin < k.end && (ids[k.begin] < seen.begin || ids[k.begin] > seen.end)) ++k.begin;
    while (k.begin < k.end && (ids[k.end - 1] < seen.begin || ids[k.end - 1] > seen.end)) --k.end;
    return k;
  }
  OMNIATTN_FN static bool all(const Place& x, Range q, Range k) {
    const Range queries = bounds(query_ids(x), q), keys = bounds(key_ids(x), k);
    return queries.begin == queries.end && keys.begin == queries.begin && keys.end == queries.end;
  }
  OMNIATTN_FN static uint64_t bits(const Place& x, int64_t q, int64_t key) {
    return equal_bits(key_ids(x) + key, query_ids(x)[q], x.tk - key);
  }
};

// (i - k) mod a == 0
struct Dilated : Anywhere {
  static constexpr SideTensor kSide = SideTensor::none;
  OMNIATTN_FN static bool parameters_fit(int64_t a, int64_t) { return a >= 1; }
  OMNIATTN_FN static Range keys_in(const Place& x, Range q, Range k) {
    return dilated_keys(x.position(q.begin), x.position(q.end - 1), x.rule.a, k);
  }
  OMNIATTN_FN static bool all(const Place& x, Range, Range) { return x.rule.a == 1; }
  OMNIATTN_FN static uint64_t bits(const Place& x, int64_t q, int64_t key) {
    return periodic_bits(x.position(q), x.rule.a, key);
  }
};

// i - b < k
struct Recent : Anywhere {
  OMNIATTN_FN static Range keys_in(const Place& x, Range q, Range k) {
    return intersect({x.position(q.begin) - x.rule.b + 1, kFar}, k);
  }
  OMNIATTN_FN static bool all(const Place& x, Range q, Range k) {
    return k.begin > x.position(q.end - 1) - x.rule.b;
  }
  OMNIATTN_FN static uint64_t bits(const Place& x, int64_t q, int64_t key) {
    return range_bits({x.position(q) - x.rule.b + 1, kFar}, key);
  }
};

// i - b < k or (i - k) mod a == 0
struct Strided : Anywhere {
  static constexpr SideTensor kSide = SideTensor::none;
  OMNIATTN_FN static bool parameters_fit(int64_t a, int64_t b) { return a >= 1 && b >= 0; }
  OMNIATTN_FN static Range keys_in(const Place& x, Range q, Range k) {
    return hull(Recent::keys_in(x, q, k), Dilated::keys_in(x, q, k));
  }
  OMNIATTN_FN static bool all(const Place& x, Range q, Range k) {
    return Recent::all(x, q, k) || Dilated::all(x, q, k);
  }
  OMNIATTN_FN static uint64_t bits(const Place& x, int64_t q, int64_t key) {
    return Recent::bits(x, q, key) | Dilated::bits(x, q, key);
  }
};

// Even heads: i - b < k, odd heads: (i - k) mod a == 0.
struct StridedHeads : Anywhere {
  static constexpr SideTensor kSide = SideTensor::none;
  OMNIATTN_FN static bool parameters_fit(int64_t a, int64_t b) {
    return Strided::parameters_fit(a, b);
  }
  OMNIATTN_FN static Range keys_in(const Place& x, Range q, Range k) {
    return x.head % 2 == 0 ? Recent::keys_in(x, q, k) : Dilated::keys_in(x, q, k);
  }
  OMNIATTN_FN static bool all(const Place& x, Range q, Range k) {
    return x.head % 2 == 0 ? Recent::all(x, q, k) : Dilated::all(x, q, k);
  }
  OMNIATTN_FN static uint64_t bits(const Place& x, int64_t q, int64_t key) {
    return x.head % 2 == 0 ? Recent::bits(x, q, key) : Dilated::bits(x, q, key);
  }
};

// floor(i / a) == floor(k / a) or k mod a >= a - b
struct Fixed : Anywhere {
  static constexpr SideTensor kSide = SideTensor::none;
  OMNIATTN_FN static bool parameters_fit(int64_t a, int64_t b) {
    return a >= 1 && b >= 0 && b <= a;
  }
  OMNIATTN_FN static Range keys_in(const Place& x, Range q, Range k) {
    const int64_t a = x.rule.a, first = floor_to(x.position(q.begin), a);
    return hull(intersect({first, floor_to(x.position(q.end - 1), a) + a}, k),
                periodic_keys(a, a - x.rule.b, k));
  }
  OMNIATTN_FN static bool all(const Place& x, Range q, Range k) {
    const int64_t a = x.rule.a, block = floor_to(k.begin, a);
    const bool same =
        floor_to(x.position(q.begin), a) == block && floor_to(x.position(q.end - 1), a) == block;
    return k.end <= block + a && (same || k.begin - block >= a - x.rule.b);
  }
  OMNIATTN_FN static uint64_t bits(const Place& x, int64_t q, int64_t key) {
    const int64_t a = x.rule.a, block = floor_to(x.position(q), a);
    uint64_t found = range_bits({block, block + a}, key);
    for (int64_t start = floor_to(key, a); start < key + 64; start += a) {
      found |= range_bits({start + a - x.rule.b, start + a}, key);
    }
    return found;
  }
};

// k mod a == 0 or k == i
struct Every : Anywhere {
  static constexpr SideTensor kSide = SideTensor::none;
  OMNIATTN_FN static bool parameters_fit(int64_t a, int64_t) { return a >= 1; }
  OMNIATTN_FN static Range keys_in(const Place& x, Range q, Range k) {
    const Range multiples{-floor_to(-k.begin, x.rule.a), floor_to(k.end - 1, x.rule.a) + 1};
    return hull(intersect(x.positions(q), k), multiples);
  }
  OMNIATTN_FN static bool all(const Place& x, Range, Range) { return x.rule.a == 1; }
  OMNIATTN_FN static uint64_t bits(const Place& x, int64_t q, int64_t key) {
    const int64_t i = x.position(q);
    return periodic_bits(0, x.rule.a, key) | range_bits({i, i + 1}, key);
  }
};

// Blocks of 64 x 64: hidden, visible or by packed bits.
struct Blocks : Anywhere, AnyParameters {
  static constexpr SideTensor kSide = SideTensor::blocks;
  OMNIATTN_FN static int64_t next(int64_t n) { return floor_to(n, kPatternBlock) + kPatternBlock; }
  // Table entry of the block that holds (q, k).
  OMNIATTN_FN static int32_t code(const Place& x, int64_t q, int64_t k) {
    const MaskRule& r = x.rule;
    return static_cast<const int32_t*>(r.side)[x.batch * r.stride_b + x.head * r.stride_h +
                                               q / kPatternBlock * r.stride_q + k / kPatternBlock];
  }
  // The block of key k is hidden from every query of q.
  OMNIATTN_FN static bool hides(const Place& x, Range q, int64_t k) {
    for (int64_t row = q.begin; row < q.end; row = next(row)) {
      if (code(x, row, k) != 0) return false;
    }
    return true;
  }
  OMNIATTN_FN static int64_t next_key(const Place& x, Range q, int64_t key) {
    while (key < x.tk && hides(x, q, key)) key = next(key);
    return key;
  }
  // Query q sees no block of k.
  OMNIATTN_FN static bool misses(const Place& x, int64_t q, Range k) {
    for (int64_t key = k.begin; key < k.end; key = next(key)) {
      if (code(x, q, key) != 0) return false;
    }
    return true;
  }
  OMNIATTN_FN static int64_t next_query(const Place& x, Range k, int64_t query) {
    while (query < x.tq && misses(x, query, k)) query = next(query);
    return query;
  }
  OMNIATTN_FN static Range keys_in(const Place& x, Range q, Range k) {
    while (k.begin < k.end && hides(x, q, k.begin)) k.begin = next(k.begin);
    while (k.begin < k.end && hides(x, q, k.end - 1)) k.end = floor_to(k.end - 1, kPatternBlock);
    return k;
  }
  OMNIATTN_FN static bool all(const Place& x, Range q, Range k) {
    for (int64_t row = q.begin; row < q.end; row = next(row)) {
      for (int64_t key = k.begin; key < k.end; key = next(key)) {
        if (code(x, row, key) != 1) return false;
      }
    }
    return true;
  }
  // The row of query q in the block of `key`.
  OMNIATTN_FN static uint64_t row(const Place& x, int64_t q, int64_t key) {
    if (key >= x.tk) return 0;
    const int32_t c = code(x, q, key);
    if (c < 2) return c == 1 ? ~uint64_t{0} : 0;
    if (c - 2 >= x.rule.b) return 0;
    return static_cast<const uint64_t*>(x.rule.second)[(c - 2) * kPatternBlock + q % kPatternBlock];
  }
  OMNIATTN_FN static uint64_t bits(const Place& x, int64_t q, int64_t key) {
    const int64_t shift = key % kPatternBlock;
    const uint64_t low = row(x, q, key) >> shift;
    if (shift == 0) return low;
    return low | row(x, q, key - shift + kPatternBlock) << (kPatternBlock - shift);
  }
};

// The a keys with k mod b == i mod b around i, as many before as after it where the ends allow it:
// at an end the window is shifted inwards, not cut (NATTEN).
struct Neighbours : InRange {
  static constexpr SideTensor kSide = SideTensor::none;
  OMNIATTN_FN static bool parameters_fit(int64_t a, int64_t b) {
    return a >= 1 && a % 2 == 1 && b >= 1 && a < (1 << 29) && b < (1 << 29);
  }
  // What position i sees, in periods of the dilation b, of a sequence of `periods`.
  OMNIATTN_FN static Range periods_of(const MaskRule& rule, int64_t i, int64_t periods) {
    const int64_t last = periods > rule.a ? periods - rule.a : 0;
    const int64_t centred = floor_to(i, rule.b) / rule.b - rule.a / 2;
    const int64_t first = centred < 0 ? 0 : centred < last ? centred : last;
    return {first, first + rule.a};
  }
  // From the first to the last key that position i sees.
  OMNIATTN_FN static Range keys(const Place& x, int64_t i) {
    const int64_t b = x.rule.b, rest = i - floor_to(i, b);
    const Range seen = periods_of(x.rule, i, ceil_div(x.tk - rest, b));
    return intersect({rest + seen.begin * b, rest + (seen.end - 1) * b + 1}, {0, x.tk});
  }
  // The number of periods of a residue differs by one at most.
  OMNIATTN_FN static Range keys_any(const Place& x, Range q) {
    const int64_t b = x.rule.b;
    return {periods_of(x.rule, x.position(q.begin), x.tk / b).begin * b,
            periods_of(x.rule, x.position(q.end - 1), ceil_div(x.tk, b)).end * b};
  }
  // Windows that are shifted lie within a periods of their end.
  OMNIATTN_FN static Range queries_any(const Place& x, Range k) {
    const int64_t a = x.rule.a, b = x.rule.b, size = a * b, half = a / 2 * b;
    const Range near = x.queries({k.begin - half, k.end + half});
    return {k.begin < size ? -kFar : near.begin, k.end > x.tk / b * b - size ? kFar : near.end};
  }
  OMNIATTN_FN static Range keys_in(const Place& x, Range q, Range k) {
    return dilated_keys(x.position(q.begin), x.position(q.end - 1), x.rule.b,
                        intersect(keys_any(x, q), k));
  }
  OMNIATTN_FN static bool all(const Place& x, Range q, Range k) {
    const Range i = x.positions(q);
    return x.rule.b == 1 && contains({keys(x, i.end - 1).begin, keys(x, i.begin).end}, k);
  }
  OMNIATTN_FN static uint64_t bits(const Place& x, int64_t q, int64_t key) {
    const int64_t i = x.position(q);
    const uint64_t found = range_bits(keys(x, i), key);
    return x.rule.b == 1 ? found : found & periodic_bits(i, x.rule.b, key);
  }
};

}  // namespace mask_rules
}  // namespace omniattn
