// Which keys a query may attend to: rules as plain data, several of them ANDed.
//
// A rule answers one exact question, which of 64 keys a query sees (bits), and four about ranges
// that let kernels skip work: keys_any (a range holding every key that some query of a range sees,
// for any head), queries_any (its transpose), keys_in (what keys_any leaves of one tile, where more
// may be known) and all (every query of a tile sees every key). The range answers may be loose,
// never wrong. To add a rule: a MaskKind, one case in each of the functions where its answer is not
// the trivial one, its side tensors in mask_side_tensor, and its dataclass in functional/masks.py.
#pragma once

#include <cstdint>

#include "semantics/macros.h"
#include "semantics/seqlen.h"

namespace omniattn {

// i = q + off is the query's position among the keys, off = Tk - Tq; mod is never negative.
enum class MaskKind : int32_t {
  window_bottom_right = 0,  // i - a <= k <= i + b; a or b = -1: unbounded. Causal is (-1, 0).
  window_top_left = 1,      // the same with off = 0
  key_lengths = 2,          // k < lengths[b]
  tensor = 3,               // as given
  prefix = 4,               // k < lengths[b] or k <= i
  chunk = 5,                // floor(i / a) == floor(k / a)
  documents = 6,            // id of q == id of k
  dilated = 7,              // (i - k) mod a == 0
  strided = 8,              // i - b < k or (i - k) mod a == 0
  strided_heads = 9,        // even heads: i - b < k, odd heads: (i - k) mod a == 0
  fixed = 10,               // floor(i / a) == floor(k / a) or k mod a >= a - b
  every = 11,               // k mod a == 0 or k == i
  blocks = 12,              // blocks of 64 x 64: hidden, visible or by packed bits
  // Layouts, resolved by csrc/ops: kernels get one problem per sequence, with its own Tq and Tk.
  packed = 13,  // B = 1; sequence n has the rows cu_q[n] .. cu_q[n + 1] of q, at most a, and the
                // rows cu_k[n] .. cu_k[n + 1] of k and v, at most b
  cached = 14,  // sequence n has the first lengths[n] rows of k and v
  paged = 15,   // the same of pages of k and v, row n of a table naming those of sequence n
  // The a keys with k mod b == i mod b around i, as many before as behind where the ends allow it:
  // at an end the window is shifted inwards, not cut (NATTEN).
  neighbours = 16,
};
constexpr int32_t kMaskKinds = 17;
constexpr int32_t kMaxMaskRules = 8;
// Encoded form: kind, a, b, index of the first side tensor in aux or -1.
constexpr int32_t kMaskRuleInts = 4;
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
  layout,  // int32 or int64: two (N + 1,) of packed, one (B,) of cached, (B, N) and (B,) of paged
  // int32, broadcast to (B, H, blocks of q, blocks of k): 0 hidden, 1 visible, 2 + n by row n of
  // the second tensor, int64 (N, 64): bit k of word q. The decoded rule has b = N.
  blocks,
};

OMNIATTN_FN SideTensor mask_side_tensor(MaskKind kind) {
  switch (kind) {
    case MaskKind::key_lengths:
    case MaskKind::prefix:
      return SideTensor::per_batch;
    case MaskKind::tensor:
      return SideTensor::per_score;
    case MaskKind::documents:
      return SideTensor::ids;
    case MaskKind::blocks:
      return SideTensor::blocks;
    case MaskKind::packed:
    case MaskKind::cached:
    case MaskKind::paged:
      return SideTensor::layout;
    default:
      return SideTensor::none;
  }
}

// Whether a rule's parameters have a meaning.
OMNIATTN_FN bool mask_parameters_fit(MaskKind kind, int64_t a, int64_t b) {
  if (a <= -kMaskParamLimit || a >= kMaskParamLimit) return false;
  if (b <= -kMaskParamLimit || b >= kMaskParamLimit) return false;
  switch (kind) {
    case MaskKind::chunk:
    case MaskKind::dilated:
    case MaskKind::every:
      return a >= 1;
    case MaskKind::strided:
    case MaskKind::strided_heads:
      return a >= 1 && b >= 0;
    case MaskKind::fixed:
      return a >= 1 && b >= 0 && b <= a;
    case MaskKind::packed:
      return a >= 0 && b >= 0;
    case MaskKind::neighbours:
      return a >= 1 && a % 2 == 1 && b >= 1 && a < (1 << 29) && b < (1 << 29);
    default:
      return true;
  }
}

struct MaskRule {
  MaskKind kind;
  int64_t a, b;
  const void* side;    // first side tensor, or null
  const void* second;  // second side tensor, or null
  // Of the first side tensor, in elements; unit stride over keys (over queries: ids).
  int64_t stride_b, stride_h, stride_q;
  int64_t second_stride_b;
};

// Rules for a problem of these lengths.
struct MaskView {
  int64_t tq, tk;
  int32_t count;
  const MaskRule* rules;
};

struct AttentionMask {
  int64_t tq, tk;
  int32_t count;
  MaskRule rules[kMaxMaskRules];

  OMNIATTN_FN operator MaskView() const { return {tq, tk, count, rules}; }
};

enum class TileClass : int32_t { skip, full, partial };

namespace mask_detail {

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

OMNIATTN_FN int64_t offset(const MaskRule& rule, const MaskView& mask) {
  return rule.kind == MaskKind::window_top_left ? 0 : bottom_right_offset(mask.tq, mask.tk);
}

OMNIATTN_FN int64_t length(const MaskRule& rule, int64_t b) {
  return static_cast<const int64_t*>(rule.side)[b * rule.stride_b];
}

OMNIATTN_FN const int64_t* query_ids(const MaskRule& rule, int64_t b) {
  return static_cast<const int64_t*>(rule.side) + b * rule.stride_b;
}
OMNIATTN_FN const int64_t* key_ids(const MaskRule& rule, int64_t b) {
  return static_cast<const int64_t*>(rule.second) + b * rule.second_stride_b;
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

// Table entry of the block that holds (q, k).
OMNIATTN_FN int32_t block_code(const MaskRule& rule, int64_t b, int64_t h, int64_t q, int64_t k) {
  return static_cast<const int32_t*>(
      rule.side)[b * rule.stride_b + h * rule.stride_h + q / kPatternBlock * rule.stride_q +
                 k / kPatternBlock];
}

OMNIATTN_FN int64_t next_block(int64_t x) { return floor_to(x, kPatternBlock) + kPatternBlock; }

// The block of key k is hidden from every query of q.
OMNIATTN_FN bool hides(const MaskRule& rule, int64_t b, int64_t h, Range q, int64_t k) {
  for (int64_t row = q.begin; row < q.end; row = next_block(row))
    if (block_code(rule, b, h, row, k) != 0) return false;
  return true;
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

// The range of MaskKind::neighbours in periods of its dilation, of a sequence of `periods`.
OMNIATTN_FN Range neighbour_periods(const MaskRule& rule, int64_t i, int64_t periods) {
  const int64_t last = periods > rule.a ? periods - rule.a : 0;
  const int64_t centred = floor_to(i, rule.b) / rule.b - rule.a / 2;
  const int64_t first = centred < 0 ? 0 : centred < last ? centred : last;
  return {first, first + rule.a};
}

// The first and last (exclusive) key of MaskKind::neighbours that i sees.
OMNIATTN_FN Range neighbours(const MaskRule& rule, int64_t i, int64_t tk) {
  const int64_t rest = i - floor_to(i, rule.b);
  const Range seen = neighbour_periods(rule, i, ceil_div(tk - rest, rule.b));
  return intersect({rest + seen.begin * rule.b, rest + (seen.end - 1) * rule.b + 1}, {0, tk});
}

// Holds the keys that the positions first .. last see: the number of periods of a residue differs
// by one at most.
OMNIATTN_FN Range neighbour_hull(const MaskRule& rule, int64_t first, int64_t last, int64_t tk) {
  return {neighbour_periods(rule, first, tk / rule.b).begin * rule.b,
          neighbour_periods(rule, last, ceil_div(tk, rule.b)).end * rule.b};
}

// ---- one query sees one range of keys
// ------------------------------------------------------------

// Whether a query of one rule sees one range of keys, which query_keys gives.
OMNIATTN_FN bool is_range(MaskKind kind) {
  return static_cast<int32_t>(kind) <= 5 && kind != MaskKind::tensor;
}

// Keys that query q sees under a rule for which is_range holds. Both ends grow with q.
OMNIATTN_FN Range query_keys(const MaskRule& rule, const MaskView& mask, int64_t b, int64_t q) {
  const int64_t i = q + offset(rule, mask);
  switch (rule.kind) {
    case MaskKind::window_bottom_right:
    case MaskKind::window_top_left:
      return {rule.a < 0 ? -kFar : i - rule.a, rule.b < 0 ? kFar : i + rule.b + 1};
    case MaskKind::key_lengths:
      return {0, length(rule, b)};
    case MaskKind::prefix:
      return {0, length(rule, b) > i ? length(rule, b) : i + 1};
    case MaskKind::chunk:
      return {floor_to(i, rule.a), floor_to(i, rule.a) + rule.a};
    default:
      return {0, mask.tk};
  }
}

// ---- ranges
// --------------------------------------------------------------------------------------

OMNIATTN_FN Range keys_any(const MaskRule& rule, const MaskView& mask, int64_t b, Range q) {
  if (rule.kind == MaskKind::neighbours) {
    const int64_t off = offset(rule, mask);
    return neighbour_hull(rule, q.begin + off, q.end - 1 + off, mask.tk);
  }
  if (!is_range(rule.kind)) return {0, mask.tk};
  return {query_keys(rule, mask, b, q.begin).begin, query_keys(rule, mask, b, q.end - 1).end};
}

OMNIATTN_FN Range queries_any(const MaskRule& rule, const MaskView& mask, int64_t b, Range k) {
  const int64_t off = offset(rule, mask);
  switch (rule.kind) {
    case MaskKind::window_bottom_right:
    case MaskKind::window_top_left:
      return {rule.b < 0 ? -kFar : k.begin - off - rule.b,
              rule.a < 0 ? kFar : k.end - off + rule.a};
    case MaskKind::key_lengths:
      return {0, k.begin < length(rule, b) ? mask.tq : 0};
    case MaskKind::prefix:
      return {k.begin < length(rule, b) ? 0 : k.begin - off, kFar};
    case MaskKind::chunk:
      return {floor_to(k.begin, rule.a) - off, floor_to(k.end - 1, rule.a) + rule.a - off};
    case MaskKind::neighbours: {  // windows that are shifted lie within a periods of their end
      const int64_t size = rule.a * rule.b, half = rule.a / 2 * rule.b;
      return {k.begin < size ? -kFar : k.begin - half - off,
              k.end > mask.tk / rule.b * rule.b - size ? kFar : k.end + half - off};
    }
    default:
      return {0, mask.tq};
  }
}

// q and k are not empty and lie inside the problem.
OMNIATTN_FN Range keys_in(const MaskRule& rule, const MaskView& mask, int64_t b, int64_t h, Range q,
                          Range k) {
  if (is_range(rule.kind)) return intersect(keys_any(rule, mask, b, q), k);
  const int64_t off = offset(rule, mask), first = q.begin + off, last = q.end - 1 + off;
  const Range local = intersect({first - rule.b + 1, kFar}, k);  // of the strided rules
  switch (rule.kind) {
    case MaskKind::documents: {
      const Range seen = bounds(query_ids(rule, b), q);
      const int64_t* const ids = key_ids(rule, b);
      const Range held = bounds(ids, k);
      if (held.end < seen.begin || held.begin > seen.end) return {0, 0};
      while (k.begin < k.end && (ids[k.begin] < seen.begin || ids[k.begin] > seen.end)) ++k.begin;
      while (k.begin < k.end && (ids[k.end - 1] < seen.begin || ids[k.end - 1] > seen.end)) --k.end;
      return k;
    }
    case MaskKind::dilated:
      return dilated_keys(first, last, rule.a, k);
    case MaskKind::neighbours:
      return dilated_keys(first, last, rule.b,
                          intersect(neighbour_hull(rule, first, last, mask.tk), k));
    case MaskKind::strided:
      return hull(local, dilated_keys(first, last, rule.a, k));
    case MaskKind::strided_heads:
      return h % 2 == 0 ? local : dilated_keys(first, last, rule.a, k);
    case MaskKind::fixed:
      return hull(intersect({floor_to(first, rule.a), floor_to(last, rule.a) + rule.a}, k),
                  periodic_keys(rule.a, rule.a - rule.b, k));
    case MaskKind::every: {
      const int64_t multiple = -floor_to(-k.begin, rule.a);
      const Range multiples{multiple, floor_to(k.end - 1, rule.a) + 1};
      return hull(intersect({first, last + 1}, k), multiples);
    }
    case MaskKind::blocks: {
      while (k.begin < k.end && hides(rule, b, h, q, k.begin)) k.begin = next_block(k.begin);
      while (k.begin < k.end && hides(rule, b, h, q, k.end - 1))
        k.end = floor_to(k.end - 1, kPatternBlock);
      return k;
    }
    default:
      return k;
  }
}

OMNIATTN_FN bool all(const MaskRule& rule, const MaskView& mask, int64_t b, int64_t h, Range q,
                     Range k) {
  if (is_range(rule.kind))
    return contains(
        {query_keys(rule, mask, b, q.end - 1).begin, query_keys(rule, mask, b, q.begin).end}, k);
  const int64_t off = offset(rule, mask), first = q.begin + off, last = q.end - 1 + off;
  const bool local = k.begin > last - rule.b;  // of the strided rules
  switch (rule.kind) {
    case MaskKind::documents: {
      const Range x = bounds(query_ids(rule, b), q), y = bounds(key_ids(rule, b), k);
      return x.begin == x.end && y.begin == x.begin && y.end == x.end;
    }
    case MaskKind::dilated:
    case MaskKind::every:
      return rule.a == 1;
    case MaskKind::neighbours:
      return rule.b == 1 &&
             contains({neighbours(rule, last, mask.tk).begin, neighbours(rule, first, mask.tk).end},
                      k);
    case MaskKind::strided:
      return local || rule.a == 1;
    case MaskKind::strided_heads:
      return h % 2 == 0 ? local : rule.a == 1;
    case MaskKind::fixed: {
      const int64_t block = floor_to(k.begin, rule.a);
      const bool one_block = k.end <= block + rule.a;
      return one_block && ((floor_to(first, rule.a) == block && floor_to(last, rule.a) == block) ||
                           k.begin - block >= rule.a - rule.b);
    }
    case MaskKind::blocks:
      for (int64_t row = q.begin; row < q.end; row = next_block(row))
        for (int64_t key = k.begin; key < k.end; key = next_block(key))
          if (block_code(rule, b, h, row, key) != 1) return false;
      return true;
    default:
      return false;
  }
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

// row[n] != 0, for n < count.
OMNIATTN_FN uint64_t byte_bits(const uint8_t* row, int64_t count) {
  uint64_t bits = 0;
  for (int64_t n = 0; n < count; ++n) bits |= uint64_t{row[n] != 0} << n;
  return bits;
}

// row[n] == id, for n < count.
OMNIATTN_FN uint64_t equal_bits(const int64_t* row, int64_t id, int64_t count) {
  uint64_t bits = 0;
  for (int64_t n = 0; n < count; ++n) bits |= uint64_t{row[n] == id} << n;
  return bits;
}

// The bits of one block's row q.
OMNIATTN_FN uint64_t block_bits(const MaskRule& rule, const MaskView& mask, int64_t b, int64_t h,
                                int64_t q, int64_t key) {
  if (key >= mask.tk) return 0;
  const int32_t code = block_code(rule, b, h, q, key);
  if (code < 2) return code == 1 ? ~uint64_t{0} : 0;
  if (code - 2 >= rule.b) return 0;
  return static_cast<const uint64_t*>(rule.second)[(code - 2) * kPatternBlock + q % kPatternBlock];
}

OMNIATTN_FN uint64_t bits(const MaskRule& rule, const MaskView& mask, int64_t b, int64_t h,
                          int64_t q, int64_t key) {
  if (is_range(rule.kind)) return range_bits(query_keys(rule, mask, b, q), key);
  const int64_t i = q + offset(rule, mask), left = mask.tk - key < 64 ? mask.tk - key : 64;
  switch (rule.kind) {
    case MaskKind::tensor:
      return byte_bits(static_cast<const uint8_t*>(rule.side) + b * rule.stride_b +
                           h * rule.stride_h + q * rule.stride_q + key,
                       left);
    case MaskKind::documents:
      return equal_bits(key_ids(rule, b) + key, query_ids(rule, b)[q], left);
    case MaskKind::dilated:
      return periodic_bits(i, rule.a, key);
    case MaskKind::neighbours: {
      const uint64_t found = range_bits(neighbours(rule, i, mask.tk), key);
      return rule.b == 1 ? found : found & periodic_bits(i, rule.b, key);
    }
    case MaskKind::strided:
      return range_bits({i - rule.b + 1, kFar}, key) | periodic_bits(i, rule.a, key);
    case MaskKind::strided_heads:
      return h % 2 == 0 ? range_bits({i - rule.b + 1, kFar}, key) : periodic_bits(i, rule.a, key);
    case MaskKind::fixed: {
      const int64_t block = floor_to(i, rule.a);
      uint64_t found = range_bits({block, block + rule.a}, key);
      for (int64_t start = floor_to(key, rule.a); start < key + 64; start += rule.a)
        found |= range_bits({start + rule.a - rule.b, start + rule.a}, key);
      return found;
    }
    case MaskKind::every:
      return periodic_bits(0, rule.a, key) | range_bits({i, i + 1}, key);
    case MaskKind::blocks: {
      const int64_t shift = key % kPatternBlock;
      const uint64_t low = block_bits(rule, mask, b, h, q, key) >> shift;
      if (shift == 0) return low;
      return low | block_bits(rule, mask, b, h, q, key - shift + 64) << (64 - shift);
    }
    default:
      return 0;
  }
}

}  // namespace mask_detail

// Every key that some query of q sees, for any head, lies in the result.
OMNIATTN_FN Range visible_keys(const MaskView& mask, int64_t b, Range q) {
  Range keys{0, mask.tk};
  for (int32_t n = 0; n < mask.count; ++n)
    keys = intersect(keys, mask_detail::keys_any(mask.rules[n], mask, b, q));
  return keys;
}

// Every query that sees some key of k, for any head, lies in the result.
OMNIATTN_FN Range visible_queries(const MaskView& mask, int64_t b, Range k) {
  Range queries{0, k.begin < mask.tk ? mask.tq : 0};
  for (int32_t n = 0; n < mask.count; ++n)
    queries = intersect(queries, mask_detail::queries_any(mask.rules[n], mask, b, k));
  return queries;
}

// Every key of k that some query of q sees in head h lies in the result.
OMNIATTN_FN Range visible_keys_in(const MaskView& mask, int64_t b, int64_t h, Range q, Range k) {
  Range keys = intersect(k, {0, mask.tk});
  for (int32_t n = 0; n < mask.count && !is_empty(keys); ++n)
    keys = mask_detail::keys_in(mask.rules[n], mask, b, h, q, keys);
  return keys;
}

// Every query of q sees every key of k; keys at or beyond Tk count as hidden.
OMNIATTN_FN bool all_visible(const MaskView& mask, int64_t b, int64_t h, Range q, Range k) {
  if (!contains({0, mask.tk}, k)) return false;
  for (int32_t n = 0; n < mask.count; ++n)
    if (!mask_detail::all(mask.rules[n], mask, b, h, q, k)) return false;
  return true;
}

// Class of the tile q x k (not empty).
OMNIATTN_FN TileClass classify(const MaskView& mask, int64_t b, int64_t h, Range q, Range k) {
  if (is_empty(visible_keys_in(mask, b, h, q, k))) return TileClass::skip;
  return all_visible(mask, b, h, q, k) ? TileClass::full : TileClass::partial;
}

// Bit n: query q sees key + n, for 0 <= n < 64. This is what kernels apply to partial tiles.
OMNIATTN_FN uint64_t visible_bits(const MaskView& mask, int64_t b, int64_t h, int64_t q,
                                  int64_t key) {
  uint64_t bits = mask_detail::range_bits({0, mask.tk}, key);
  for (int32_t n = 0; n < mask.count && bits != 0; ++n)
    bits &= mask_detail::bits(mask.rules[n], mask, b, h, q, key);
  return bits;
}

OMNIATTN_FN bool visible(const MaskView& mask, int64_t b, int64_t h, int64_t q, int64_t k) {
  return (visible_bits(mask, b, h, q, k) & 1) != 0;
}

}  // namespace omniattn
