// A mask rule's parameters and side tensors, the place where it is evaluated, and base classes
// shared by several rules.
#pragma once

#include <cstdint>

#include "semantics/macros.h"
#include "semantics/mask_ranges.h"
#include "semantics/seqlen.h"

namespace omniattn {

enum class MaskKind : int32_t;  // mask_rules.h

// Parameters are checked against this bound, so that sums of positions and parameters cannot
// overflow.
constexpr int64_t kMaskParamLimit = int64_t{1} << 40;

// The side tensors of a rule; csrc/ops checks their shapes and dtypes.
enum class SideTensor : int32_t {
  none,
  per_batch,  // int64 (B,)
  per_score,  // bool, broadcast to (B, H, Tq, Tk)
  ids,        // int64 (B, Tq) and int64 (B, Tk)
  // int32, broadcast to (B, H, query blocks, key blocks): 0 hidden, 1 visible, 2 + n: row n of the
  // second tensor, int64 (N, 64), whose word q has bit k set if q sees k. The decoded rule has
  // b = N.
  blocks,
};

struct MaskRule {
  MaskKind kind;
  int64_t a, b;
  const void* side;    // first side tensor, or null
  const void* second;  // second side tensor, or null
  // Strides of the first side tensor, in elements. Keys (for ids: queries) have unit stride.
  int64_t stride_b, stride_h, stride_q;
  int64_t second_stride_b;
};

namespace mask_rules {

// A rule evaluated in one batch entry and head of a problem.
struct Place {
  const MaskRule& rule;
  int64_t tq, tk;
  int64_t batch, head;

  // Position of query q among the keys, bottom-right aligned: i in mask_rules.h.
  OMNIATTN_FN int64_t position(int64_t q) const { return q + bottom_right_offset(tq, tk); }
  OMNIATTN_FN Range positions(Range q) const { return {position(q.begin), position(q.end)}; }
  // The queries at positions i.
  OMNIATTN_FN Range queries(Range i) const {
    const int64_t off = bottom_right_offset(tq, tk);
    return {i.begin - off, i.end - off};
  }
};

struct AnyParameters {
  OMNIATTN_FN static bool parameters_fit(int64_t, int64_t) { return true; }
};

// Skips no key or query within the ranges of keys_any and queries_any.
struct InRange {
  OMNIATTN_FN static int64_t next_key(const Place&, Range, int64_t key) { return key; }
  OMNIATTN_FN static int64_t next_query(const Place&, Range, int64_t query) { return query; }
};

// Each query sees one range of keys, Rule::keys. Both ends are non-decreasing in the query.
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

// Any query may see any key.
struct Anywhere : InRange {
  OMNIATTN_FN static Range keys_any(const Place& x, Range) { return {0, x.tk}; }
  OMNIATTN_FN static Range queries_any(const Place& x, Range) { return {0, x.tq}; }
};

}  // namespace mask_rules
}  // namespace omniattn
