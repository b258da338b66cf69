// Rotary position embedding (Su et al., arXiv 2104.09864; spec positional 3): which elements form
// pair n, its angle, and the rotation (x, y) -> (x cos - y sin, x sin + y cos).
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

// Angle of a position. The fp32 product defines the tables up to 2^20; beyond, its rounding would
// move the angle by up to 0.06 rad and more, so the product is taken in fp64.
OMNIATTN_FN double rope_angle(int64_t position, float frequency) {
  constexpr int64_t kExact = int64_t{1} << 20;
  if (position <= kExact && position >= -kExact) return static_cast<float>(position) * frequency;
  return static_cast<double>(position) * static_cast<double>(frequency);
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
