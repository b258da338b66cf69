// Dropout as a part of other ops.
#pragma once

#include "ops/tensor.h"

namespace omniattn::ops::random {

// y = x / (1 - p) where the draw of an element keeps it, else 0; seed: [seed, offset].
Tensor dropout(const Tensor& x, const Tensor& seed, double probability);

}  // namespace omniattn::ops::random
