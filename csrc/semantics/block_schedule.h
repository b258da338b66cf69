// Tiles that a kernel visits: the key blocks of a query block, and the query blocks of a key
// block. Blocks start at multiples of their size; the last one is cut at the end of the sequence.
#pragma once

#include <cstdint>

#include "semantics/macros.h"
#include "semantics/mask.h"
#include "semantics/seqlen.h"

namespace omniattn {

// Numbers of the blocks of `size` that overlap `positions`.
OMNIATTN_FN Range blocks_of(Range positions, int64_t size) {
  if (is_empty(positions)) return {0, 0};
  return {positions.begin / size, ceil_div(positions.end, size)};
}

// Positions of block n in a sequence of `length`.
OMNIATTN_FN Range block(int64_t n, int64_t size, int64_t length) {
  return intersect({n * size, (n + 1) * size}, {0, length});
}

// Numbers of the key blocks that some query of q may see.
OMNIATTN_FN Range key_blocks(const MaskView& mask, int64_t b, Range q, int64_t size) {
  return blocks_of(visible_keys(mask, b, q), size);
}

// Numbers of the query blocks that may see some key of k.
OMNIATTN_FN Range query_blocks(const MaskView& mask, int64_t b, Range k, int64_t size) {
  return blocks_of(visible_queries(mask, b, k), size);
}

// Direction of a walk: along the keys that some query of a range may see, or along the queries that
// may see some key of a range.
enum class Along { keys, queries };

// Walks the blocks of one head that hold such a key or query. The rules of the mask skip to the
// next such block, so kernels do not test the blocks in between.
template <Along kAlong>
struct Cursor {
  MaskView mask;
  int64_t b, h;
  Range others;  // the fixed range: queries if the walk is along keys, keys if along queries
  int64_t size;
  Range left;  // numbers of the blocks still to be visited, in order

  OMNIATTN_FN Cursor(const MaskView& mask_, int64_t b_, int64_t h_, Range others_, int64_t size_)
      : mask(mask_), b(b_), h(h_), others(others_), size(size_), left(candidates()) {}

  // The number of the next block, or -1 at the end.
  OMNIATTN_FN int64_t next() {
    if (is_empty(left)) return -1;
    const int64_t n = next_visible(left.begin * size) / size;
    left.begin = n + 1;
    return n < left.end ? n : -1;
  }

 private:
  OMNIATTN_FN Range candidates() const {
    if constexpr (kAlong == Along::keys) {
      return key_blocks(mask, b, others, size);
    } else {
      return query_blocks(mask, b, others, size);
    }
  }
  OMNIATTN_FN int64_t next_visible(int64_t position) const {
    if constexpr (kAlong == Along::keys) {
      return next_visible_key(mask, b, h, others, position);
    } else {
      return next_visible_query(mask, b, h, others, position);
    }
  }
};

}  // namespace omniattn
