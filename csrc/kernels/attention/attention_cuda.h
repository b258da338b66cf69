// CUDA launchers of attention, see attention.h. No launcher allocates or waits.
#pragma once

#include "kernels/attention/attention.h"
#include "runtime/stream.h"

namespace omniattn {

// Any dtype and head size: products by FMA in the compute type.
Status launch_attention(const AttentionForwardParams& p, Stream stream);

// `workspace` holds Delta = rowsum(dO * O) - dlse: query_rows in the compute type.
Status launch_attention_backward(const AttentionBackwardParams& p, Stream stream);

}  // namespace omniattn
