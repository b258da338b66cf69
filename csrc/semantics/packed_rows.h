// Requirements on the boundaries of packed sequences, for kernels that alone can read them.
#pragma once

#include <cstdint>

#include "semantics/macros.h"

namespace omniattn {

// True if sequence n of `count`, rows [begin, begin + length), lies within `rows` rows, starts at
// row 0 if it is the first and ends at the last row if it is the last. If all sequences do, and
// each starts where the previous one ends, every row belongs to a sequence.
OMNIATTN_FN bool fits_rows(int64_t n, int64_t count, int64_t begin, int64_t length, int64_t rows) {
  const bool inside = begin >= 0 && length >= 0 && begin + length <= rows;
  return inside && (n > 0 || begin == 0) && (n + 1 < count || begin + length == rows);
}

}  // namespace omniattn
