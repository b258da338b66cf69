// Which keys a query may attend to: rules as plain data, several of them ANDed.
//
// A rule answers one exact question, visible(b, h, q, k), and three about ranges that let kernels
// skip work: keys_any (a range holding every key that some query of a range sees), keys_all (a
// range of keys that every query of a range sees) and queries_any (the transpose of keys_any). The
// range answers may be loose, never wrong. To add a rule: a MaskKind, one case in each of the four
// functions (or its side tensor in mask_side_tensor), and its dataclass in functional/masks.py.
#pragma once

#include <cstdint>

#include "semantics/macros.h"
#include "semantics/seqlen.h"

namespace omniattn {

enum class MaskKind : int32_t {
  // q + off - a <= k <= q + off + b, where off = Tk - Tq; a or b = -1: unbounded. Causal is (-1,
  // 0).
  window_bottom_right = 0,
  // The same with off = 0.
  window_top_left = 1,
  // k < lengths[b]; side tensor int64 (B,).
  key_lengths = 2,
  // side tensor bool, broadcast to (B, H, Tq, Tk).
  tensor = 3,
};
constexpr int32_t kMaskKinds = 4;
constexpr int32_t kMaxMaskRules = 8;
// Encoded form: kind, a, b, index of the side tensor in aux or -1.
constexpr int32_t kMaskRuleInts = 4;
// Parameters are checked against this bound, so that sums of positions and parameters cannot
// overflow.
constexpr int64_t kMaskParamLimit = int64_t{1} << 40;

struct MaskRule {
  MaskKind kind;
  int64_t a, b;
  const void* side;                      // side tensor, or null
  int64_t stride_b, stride_h, stride_q;  // of the side tensor, in elements; unit stride over keys
};

struct AttentionMask {
  int64_t tq, tk;
  int32_t count;
  MaskRule rules[kMaxMaskRules];
};

// What the side tensor of a rule must be; csrc/ops checks shapes and dtypes by it.
enum class SideTensor : int32_t { none, per_batch_int64, per_score_bool };

OMNIATTN_FN SideTensor mask_side_tensor(MaskKind kind) {
  if (kind == MaskKind::key_lengths) return SideTensor::per_batch_int64;
  if (kind == MaskKind::tensor) return SideTensor::per_score_bool;
  return SideTensor::none;
}

enum class TileClass : int32_t { skip, full, partial };

namespace mask_detail {

constexpr int64_t kFar = int64_t{1} << 60;

OMNIATTN_FN int64_t diagonal(const MaskRule& rule, const AttentionMask& mask) {
  return rule.kind == MaskKind::window_bottom_right ? bottom_right_offset(mask.tq, mask.tk) : 0;
}

OMNIATTN_FN int64_t key_length(const MaskRule& rule, int64_t b) {
  return static_cast<const int64_t*>(rule.side)[b * rule.stride_b];
}

// Keys that query q sees under a window.
OMNIATTN_FN Range window_keys(const MaskRule& rule, const AttentionMask& mask, int64_t q) {
  const int64_t centre = q + diagonal(rule, mask);
  return {rule.a < 0 ? -kFar : centre - rule.a, rule.b < 0 ? kFar : centre + rule.b + 1};
}

OMNIATTN_FN Range keys_any(const MaskRule& rule, const AttentionMask& mask, int64_t b, Range q) {
  switch (rule.kind) {
    case MaskKind::window_bottom_right:
    case MaskKind::window_top_left:
      return {window_keys(rule, mask, q.begin).begin, window_keys(rule, mask, q.end - 1).end};
    case MaskKind::key_lengths:
      return {0, key_length(rule, b)};
    case MaskKind::tensor:
      return {0, mask.tk};
  }
  return {0, 0};
}

OMNIATTN_FN Range keys_all(const MaskRule& rule, const AttentionMask& mask, int64_t b, Range q) {
  switch (rule.kind) {
    case MaskKind::window_bottom_right:
    case MaskKind::window_top_left:
      return {window_keys(rule, mask, q.end - 1).begin, window_keys(rule, mask, q.begin).end};
    case MaskKind::key_lengths:
      return {0, key_length(rule, b)};
    case MaskKind::tensor:
      return {0, 0};
  }
  return {0, 0};
}

OMNIATTN_FN Range queries_any(const MaskRule& rule, const AttentionMask& mask, int64_t b, Range k) {
  switch (rule.kind) {
    case MaskKind::window_bottom_right:
    case MaskKind::window_top_left: {
      const int64_t off = diagonal(rule, mask);
      return {rule.b < 0 ? -kFar : k.begin - off - rule.b,
              rule.a < 0 ? kFar : k.end - off + rule.a};
    }
    case MaskKind::key_lengths:
      return {0, k.begin < key_length(rule, b) ? mask.tq : 0};
    case MaskKind::tensor:
      return {0, mask.tq};
  }
  return {0, 0};
}

// Bit n is set when key + n lies in r, for 0 <= n < 64.
OMNIATTN_FN uint64_t range_bits(Range r, int64_t key) {
  const Range w = intersect(r, {key, key + 64});
  if (is_empty(w)) return 0;
  return (~uint64_t{0} >> (64 - (w.end - w.begin))) << (w.begin - key);
}

// Bit n is set when row[n] != 0, for 0 <= n < count.
OMNIATTN_FN uint64_t byte_bits(const uint8_t* row, int64_t count) {
  uint64_t bits = 0;
  for (int64_t n = 0; n < count; ++n) bits |= uint64_t{row[n] != 0} << n;
  return bits;
}

}  // namespace mask_detail

// Every key that some query of q sees lies in the result.
OMNIATTN_FN Range visible_keys(const AttentionMask& mask, int64_t b, Range q) {
  Range keys{0, mask.tk};
  for (int32_t n = 0; n < mask.count; ++n)
    keys = intersect(keys, mask_detail::keys_any(mask.rules[n], mask, b, q));
  return keys;
}

// Every query that sees some key of k lies in the result.
OMNIATTN_FN Range visible_queries(const AttentionMask& mask, int64_t b, Range k) {
  Range queries{0, k.begin < mask.tk ? mask.tq : 0};
  for (int32_t n = 0; n < mask.count; ++n)
    queries = intersect(queries, mask_detail::queries_any(mask.rules[n], mask, b, k));
  return queries;
}

// Class of the tile q x k (not empty; keys at or beyond Tk count as hidden).
OMNIATTN_FN TileClass classify(const AttentionMask& mask, int64_t b, Range q, Range k) {
  if (is_empty(intersect(visible_keys(mask, b, q), k))) return TileClass::skip;
  Range common{0, mask.tk};
  for (int32_t n = 0; n < mask.count; ++n)
    common = intersect(common, mask_detail::keys_all(mask.rules[n], mask, b, q));
  return contains(common, k) ? TileClass::full : TileClass::partial;
}

// Bit n: query q sees key + n, for 0 <= n < 64. This is what kernels apply to partial tiles.
OMNIATTN_FN uint64_t visible_bits(const AttentionMask& mask, int64_t b, int64_t h, int64_t q,
                                  int64_t key) {
  uint64_t bits = mask_detail::range_bits({0, mask.tk}, key);
  for (int32_t n = 0; n < mask.count && bits != 0; ++n) {
    const MaskRule& rule = mask.rules[n];
    if (rule.kind == MaskKind::tensor) {
      const auto* row = static_cast<const uint8_t*>(rule.side) + b * rule.stride_b +
                        h * rule.stride_h + q * rule.stride_q;
      bits &= mask_detail::byte_bits(row + key, mask.tk - key < 64 ? mask.tk - key : 64);
    } else {  // one query sees one range of keys, so keys_any is exact for it
      bits &= mask_detail::range_bits(mask_detail::keys_any(rule, mask, b, {q, q + 1}), key);
    }
  }
  return bits;
}

OMNIATTN_FN bool visible(const AttentionMask& mask, int64_t b, int64_t h, int64_t q, int64_t k) {
  return (visible_bits(mask, b, h, q, k) & 1) != 0;
}

}  // namespace omniattn
