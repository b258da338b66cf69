// Dropout as a part of other ops.
#pragma once

#include "ops/fields.h"
#include "ops/tensor.h"

namespace omniattn::ops::random {

// y = x / (1 - p) where the draw of an element keeps it, else 0; seed: [seed, offset].
OMNIATTN_FIELDS(Draw, Tensor x, seed);
OMNIATTN_FIELDS(DropoutOptions, double p);
Tensor dropout(const OpCall& call, const Draw& in, const DropoutOptions& options);

}  // namespace omniattn::ops::random
