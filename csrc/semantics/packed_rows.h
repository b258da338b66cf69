// Requirements on the boundaries of packed sequences, for kernels that alone can read them.
#pragma once

#include <cstdint>

#include "semantics/macros.h"

namespace omniattn {

// Whether sequence n of `count`, rows `begin` to `begin` + `length`, lies in `rows` rows, the first
// one at their start and the last one at their end. If all of them do and each starts where the one
// before it ends, each row is in a sequence.
OMNIATTN_FN bool fits_rows(int64_t n, int64_t count, int64_t begin, int64_t length, int64_t rows) {
  const bool inside = begin >= 0 && length >= 0 && begin + length <= rows;
  return inside && (n > 0 || begin == 0) && (n + 1 < count || begin + length == rows);
}

}  // namespace omniattn
