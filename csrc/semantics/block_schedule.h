// Which tiles a kernel visits: for a block of queries the blocks of keys, and transposed. Blocks
// start at multiples of their size, the last one is cut at the end of the sequence.
#pragma once

#include <cstdint>

#include "semantics/macros.h"
#include "semantics/mask.h"
#include "semantics/seqlen.h"

namespace omniattn {

// Blocks of `size` that meet `positions`, as a range of block numbers.
OMNIATTN_FN Range blocks_of(Range positions, int64_t size) {
  if (is_empty(positions)) return {0, 0};
  return {positions.begin / size, ceil_div(positions.end, size)};
}

// Positions of block n in a sequence of `length`.
OMNIATTN_FN Range block(int64_t n, int64_t size, int64_t length) {
  return intersect({n * size, (n + 1) * size}, {0, length});
}

// Numbers of the key blocks that the queries q see.
OMNIATTN_FN Range key_blocks(const MaskView& mask, int64_t b, Range q, int64_t size) {
  return blocks_of(visible_keys(mask, b, q), size);
}

// Numbers of the query blocks that see the keys k.
OMNIATTN_FN Range query_blocks(const MaskView& mask, int64_t b, Range k, int64_t size) {
  return blocks_of(visible_queries(mask, b, k), size);
}

// Numbers of blocks that are still to be visited, in order. What is visible decides where to go on,
// be it a range, the blocks of a table or a list: kernels do not look at what lies between.
struct BlockCursor {
  Range left;
  int64_t size;

  // The next block whose first position from `at` on that `next_visible` finds; -1: there is none.
  template <class F>
  OMNIATTN_FN int64_t next(const F& next_visible) {
    if (is_empty(left)) return -1;
    const int64_t n = next_visible(left.begin * size) / size;
    left.begin = n + 1;
    return n < left.end ? n : -1;
  }
};

// Walks the blocks of keys that some query of q may see in head h.
struct KeyCursor {
  MaskView mask;
  int64_t b, h;
  Range q;
  BlockCursor blocks;

  OMNIATTN_FN KeyCursor(const MaskView& mask_, int64_t b_, int64_t h_, Range q_, int64_t size)
      : mask(mask_), b(b_), h(h_), q(q_), blocks{key_blocks(mask_, b_, q_, size), size} {}
  OMNIATTN_FN int64_t next() {
    return blocks.next([&](int64_t key)
                           OMNIATTN_LAMBDA { return next_visible_key(mask, b, h, q, key); });
  }
};

// Walks the blocks of queries that may see some key of k in head h.
struct QueryCursor {
  MaskView mask;
  int64_t b, h;
  Range k;
  BlockCursor blocks;

  OMNIATTN_FN QueryCursor(const MaskView& mask_, int64_t b_, int64_t h_, Range k_, int64_t size)
      : mask(mask_), b(b_), h(h_), k(k_), blocks{query_blocks(mask_, b_, k_, size), size} {}
  OMNIATTN_FN int64_t next() {
    return blocks.next([&](int64_t query)
                           OMNIATTN_LAMBDA { return next_visible_query(mask, b, h, k, query); });
  }
};

}  // namespace omniattn
