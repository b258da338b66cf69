// CUDA launchers of the elementwise draws, see random.h.
#pragma once

#include "kernels/random/random.h"
#include "runtime/stream.h"

namespace omniattn {

Status launch_dropout(const DropoutParams& p, Stream stream);
Status launch_uniform(const UniformParams& p, Stream stream);

}  // namespace omniattn
