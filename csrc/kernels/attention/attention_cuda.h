// CUDA launchers of attention, see attention.h. No launcher allocates or waits.
#pragma once

#include "kernels/attention/attention.h"
#include "runtime/stream.h"

namespace omniattn {

// Any dtype and head size: products by FMA in the compute type.
Status launch_attention(const AttentionForwardParams& p, Stream stream);

// Whether tensor cores can be used: 16-bit elements, heads of at most 256 in whole 16 bytes.
bool takes_mma_path(const AttentionProblem& p);
Status launch_attention_mma(const AttentionForwardParams& p, Stream stream);

// Few query rows per kv head, heads of at most 512: `workspace` holds attention_decode_workspace
// elements of the compute type.
bool takes_split_path(const AttentionProblem& p);
int64_t attention_decode_workspace(const AttentionProblem& p);
Status launch_attention_decode(const AttentionForwardParams& p, Stream stream);

// The backward in three steps. Delta = rowsum(dO * O) - dlse, into `workspace`: query_rows in the
// compute type ...
Status launch_attention_delta(const AttentionBackwardParams& p, Stream stream);
// ... the gradients of q, k and v ...
Status launch_attention_gradients(const AttentionBackwardParams& p, Stream stream);
// ... by tensor cores, where these can be used ...
bool takes_mma_path(const AttentionBackwardParams& p);
Status launch_attention_gradients_mma(const AttentionBackwardParams& p, Stream stream);
// ... and of the bias, where it is wanted.
Status launch_attention_bias_gradient(const AttentionBackwardParams& p, Stream stream);

}  // namespace omniattn
