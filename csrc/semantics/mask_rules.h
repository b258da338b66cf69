// The rules that say which keys a query may attend to, one struct each.
//
// A struct answers one exact question, which of 64 keys a query sees (bits), and six questions
// about ranges that let kernels skip work. Answers about ranges may be conservative but never
// wrong:
//
//   keys_any     a range holding every key that some query of a range sees, for any head
//   queries_any  a range holding every query that sees some key of a range, for any head
//   next_key     the first key from a given one on that some query of a range may see
//   next_query   the first query from a given one on that may see some key of a range
//   keys_in      a range holding every key of a tile that some query of the tile sees
//   all          true only if every query of a tile sees every key of the tile
//
// A struct also names the side tensors that its rule needs (kSide) and checks its parameters
// (parameters_fit). To add a rule, write its struct here and a line in OMNIATTN_MASK_RULES. A
// struct that lacks a member does not compile.
#pragma once

#include <cstdint>

#include "semantics/macros.h"
#include "semantics/mask_grid.h"
#include "semantics/mask_ranges.h"
#include "semantics/mask_rule.h"
#include "semantics/seqlen.h"

namespace omniattn {

// name, number in the encoded form, struct
#define OMNIATTN_MASK_RULES(rule)                                                        \
  rule(window_bottom_right, 0, Window<false>) rule(window_top_left, 1, Window<true>)     \
      rule(key_lengths, 2, KeyLengths) rule(tensor, 3, PerScore) rule(prefix, 4, Prefix) \
          rule(chunk, 5, Chunk) rule(documents, 6, Documents) rule(dilated, 7, Dilated)  \
              rule(strided, 8, Strided) rule(strided_heads, 9, StridedHeads)             \
                  rule(fixed, 10, Fixed) rule(every, 11, Every) rule(blocks, 12, Blocks) \
                      rule(neighbors, 16, Neighbors) rule(grid, 19, Grid) rule(pooled, 20, Pooled)

enum class MaskKind : int32_t {
#define OMNIATTN_RULE(name, number, Rule) name = number,
  OMNIATTN_MASK_RULES(OMNIATTN_RULE)
#undef OMNIATTN_RULE
};

constexpr int64_t kPatternBlock = 64;  // queries and keys per block of MaskKind::blocks

namespace mask_rules {

// Below, mod is never negative, and i is Place::position.

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

// near <= floor(i / a) - floor(k / a) <= far, b = near + far 2^kChunkBits; far = kAnyFar: unbounded
struct Chunk : OneRange<Chunk> {
  static constexpr SideTensor kSide = SideTensor::none;
  static constexpr int kChunkBits = 19;
  static constexpr int64_t kAnyFar = (int64_t{1} << kChunkBits) - 1;
  OMNIATTN_FN static int64_t near(int64_t b) { return b & kAnyFar; }
  OMNIATTN_FN static int64_t far(int64_t b) { return b >> kChunkBits; }
  OMNIATTN_FN static bool parameters_fit(int64_t a, int64_t b) {
    return a >= 1 && b >= 0 && near(b) <= far(b) && far(b) <= kAnyFar;
  }
  OMNIATTN_FN static Range keys(const Place& x, int64_t q) {
    const int64_t a = x.rule.a, b = x.rule.b, first = floor_to(x.position(q), a);
    return {far(b) == kAnyFar ? -kFar : first - far(b) * a, first - near(b) * a + a};
  }
  OMNIATTN_FN static Range queries_any(const Place& x, Range k) {
    const int64_t a = x.rule.a, b = x.rule.b;
    const int64_t first = floor_to(k.begin, a), last = floor_to(k.end - 1, a);
    return x.queries({first + near(b) * a, far(b) == kAnyFar ? kFar : last + far(b) * a + a});
  }
};

// k a + b <= q: key k pools the tokens from k a on, and is visible from its last token
// onwards.
struct Pooled : OneRange<Pooled> {
  static constexpr SideTensor kSide = SideTensor::none;
  static constexpr int64_t kStrideLimit = int64_t{1} << 20;  // k a does not overflow
  OMNIATTN_FN static bool parameters_fit(int64_t a, int64_t) { return 1 <= a && a < kStrideLimit; }
  OMNIATTN_FN static Range keys(const Place& x, int64_t q) {
    return {0, floor_to(q - x.rule.b, x.rule.a) / x.rule.a + 1};
  }
  OMNIATTN_FN static Range queries_any(const Place& x, Range k) {
    return {k.begin * x.rule.a + x.rule.b, kFar};
  }
};

// A tensor gives the visibility of each pair.
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

// Id of the query == id of the key.
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

// floor(i / a) == floor(k / a) or (k + shift) mod a >= a - columns. If b = columns, shift is 0. If
// b = columns + n 2^kColumnBits, head h has shift = (h mod n) columns.
struct Fixed : Anywhere {
  static constexpr SideTensor kSide = SideTensor::none;
  static constexpr int kColumnBits = 28;
  OMNIATTN_FN static int64_t columns(int64_t b) { return b & ((int64_t{1} << kColumnBits) - 1); }
  OMNIATTN_FN static int64_t shift(const Place& x) {
    // A 32-bit division costs CUDA kernels few registers.
    const auto n = static_cast<uint32_t>(x.rule.b >> kColumnBits);
    return n == 0 ? 0 : static_cast<uint32_t>(x.head) % n * columns(x.rule.b);
  }
  OMNIATTN_FN static bool parameters_fit(int64_t a, int64_t b) {
    const int64_t n = b >> kColumnBits;
    return a >= 1 && b >= 0 && columns(b) <= a / (n > 0 ? n : 1);
  }
  OMNIATTN_FN static Range keys_in(const Place& x, Range q, Range k) {
    const int64_t a = x.rule.a, first = floor_to(x.position(q.begin), a), move = shift(x);
    const Range found = periodic_keys(a, a - columns(x.rule.b), {k.begin + move, k.end + move});
    return hull(intersect({first, floor_to(x.position(q.end - 1), a) + a}, k),
                {found.begin - move, found.end - move});
  }
  OMNIATTN_FN static bool all(const Place& x, Range q, Range k) {
    const int64_t a = x.rule.a, block = floor_to(k.begin, a), move = shift(x);
    const int64_t begin = k.begin + move, period = floor_to(begin, a);
    const bool same =
        floor_to(x.position(q.begin), a) == block && floor_to(x.position(q.end - 1), a) == block;
    return (same && k.end <= block + a) ||
           (begin - period >= a - columns(x.rule.b) && k.end + move <= period + a);
  }
  OMNIATTN_FN static uint64_t bits(const Place& x, int64_t q, int64_t key) {
    const int64_t a = x.rule.a, block = floor_to(x.position(q), a), move = shift(x);
    uint64_t found = range_bits({block, block + a}, key);
    for (int64_t end = floor_to(key + move, a) - key - move + a; end - a < 64; end += a) {
      found |= range_bits({end - columns(x.rule.b), end}, 0);
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

// Blocks of 64 x 64 pairs: hidden, visible, or given by packed bits.
struct Blocks : Anywhere, AnyParameters {
  static constexpr SideTensor kSide = SideTensor::blocks;
  OMNIATTN_FN static int64_t next(int64_t n) { return floor_to(n, kPatternBlock) + kPatternBlock; }
  // Table entry of the block that contains (q, k).
  OMNIATTN_FN static int32_t code(const Place& x, int64_t q, int64_t k) {
    const MaskRule& r = x.rule;
    return static_cast<const int32_t*>(r.side)[x.batch * r.stride_b + x.head * r.stride_h +
                                               q / kPatternBlock * r.stride_q + k / kPatternBlock];
  }
  // True if the block of key k is hidden from every query of q.
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
  // True if query q sees no block of k.
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
  // Visibility bits of query q in the block of `key`.
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

// The a keys nearest to i with k mod b == i mod b. The window is centred on i and, at an end of the
// sequence, shifted inwards rather than cut (NATTEN).
struct Neighbors : InRange {
  static constexpr SideTensor kSide = SideTensor::none;
  OMNIATTN_FN static bool parameters_fit(int64_t a, int64_t b) {
    return a >= 1 && a % 2 == 1 && b >= 1 && a < (1 << 29) && b < (1 << 29);
  }
  // Keys that position i sees in a sequence of `periods` periods of length b, counted in periods.
  OMNIATTN_FN static Range periods_of(const MaskRule& rule, int64_t i, int64_t periods) {
    const int64_t last = periods > rule.a ? periods - rule.a : 0;
    const int64_t centred = floor_to(i, rule.b) / rule.b - rule.a / 2;
    const int64_t first = centred < 0 ? 0 : centred < last ? centred : last;
    return {first, first + rule.a};
  }
  // Range from the first to the last key that position i sees.
  OMNIATTN_FN static Range keys(const Place& x, int64_t i) {
    const int64_t b = x.rule.b, rest = i - floor_to(i, b);
    const Range seen = periods_of(x.rule, i, ceil_div(x.tk - rest, b));
    return intersect({rest + seen.begin * b, rest + (seen.end - 1) * b + 1}, {0, x.tk});
  }
  // The period counts of two residues differ by at most one.
  OMNIATTN_FN static Range keys_any(const Place& x, Range q) {
    const int64_t b = x.rule.b;
    return {periods_of(x.rule, x.position(q.begin), x.tk / b).begin * b,
            periods_of(x.rule, x.position(q.end - 1), ceil_div(x.tk, b)).end * b};
  }
  // A shifted window lies within a periods of its end of the sequence.
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
