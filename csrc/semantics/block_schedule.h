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

}  // namespace omniattn
