// Rotary position embedding (Su et al., arXiv 2104.09864): the elements of pair n, and the
// rotation (x, y) -> (x cos - y sin, x sin + y cos).
#pragma once

#include <cstdint>

#include "semantics/macros.h"

namespace omniattn {

struct RopePair {
  int64_t x, y;
};

// Elements of pair n among `half` pairs: adjacent (2n, 2n + 1) or half-split (n, n + half).
OMNIATTN_FN RopePair rope_pair(int64_t n, int64_t half, bool interleaved) {
  return interleaved ? RopePair{2 * n, 2 * n + 1} : RopePair{n, n + half};
}

template <class V>
OMNIATTN_FN V rope_x(V x, V y, V cos, V sin) {
  return x * cos - y * sin;
}
template <class V>
OMNIATTN_FN V rope_y(V x, V y, V cos, V sin) {
  return x * sin + y * cos;
}

}  // namespace omniattn
