// CUDA launchers of the GLU family, see activation.h.
#pragma once

#include "kernels/activation/activation.h"
#include "runtime/stream.h"

namespace omniattn {

Status launch_glu(const GluParams& p, int64_t rows, Stream stream);
Status launch_glu_backward(const GluBackwardParams& p, int64_t rows, Stream stream);

}  // namespace omniattn
