// CUDA launchers of the losses, see loss.h. A target out of range stops the kernel.
#pragma once

#include "kernels/loss/loss.h"
#include "runtime/stream.h"

namespace omniattn {

Status launch_cross_entropy(const CrossEntropyParams& p, Stream stream);
Status launch_cross_entropy_backward(const CrossEntropyBackwardParams& p, Stream stream);

// total = sum of p.loss, over the number of kept rows (at least 1) for the mean.
Status launch_loss_total(const CrossEntropyParams& p, bool mean, void* total, Stream stream);

// weights (rows) = grad (rows), or one for all rows where not per_row, over the number of kept rows
// for the mean.
Status launch_row_weights(const CrossEntropyParams& p, bool mean, bool per_row, const void* grad,
                          void* weights, Stream stream);

}  // namespace omniattn
