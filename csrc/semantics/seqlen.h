// Lengths, offsets and head maps shared by every sequence op.
#pragma once

#include <cstdint>

#include "semantics/arith.h"

namespace omniattn {

// Half-open range of positions.
struct Range {
  int64_t begin, end;
};

OMNIATTN_FN bool is_empty(Range r) { return r.begin >= r.end; }

OMNIATTN_FN Range intersect(Range x, Range y) {
  return {x.begin > y.begin ? x.begin : y.begin, x.end < y.end ? x.end : y.end};
}

OMNIATTN_FN bool contains(Range outer, Range inner) {
  return outer.begin <= inner.begin && inner.end <= outer.end;
}

// Key aligned with query 0 when the last query is aligned with the last key.
OMNIATTN_FN int64_t bottom_right_offset(int64_t tq, int64_t tk) { return tk - tq; }

// Key/value head of a query head's group.
OMNIATTN_FN int64_t kv_head(int64_t q_head, int64_t hq, int64_t hkv) { return q_head / (hq / hkv); }

}  // namespace omniattn
