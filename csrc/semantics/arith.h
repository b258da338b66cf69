// Integer arithmetic on sizes.
#pragma once

#include <cstdint>

#include "semantics/macros.h"

namespace omniattn {

OMNIATTN_FN int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
OMNIATTN_FN int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
OMNIATTN_FN int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }
OMNIATTN_FN int64_t round_up(int64_t n, int64_t d) { return ceil_div(n, d) * d; }

}  // namespace omniattn
