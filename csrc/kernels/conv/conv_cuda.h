// CUDA launchers of the causal convolution, see conv.h.
#pragma once

#include "kernels/conv/conv.h"
#include "runtime/stream.h"

namespace omniattn {

Status launch_causal_conv(const CausalConvParams& p, Stream stream);

// Partial sums of dweight and dbias that the backward keeps; depends on the shape only.
int64_t causal_conv_shards(const CausalConv& p);

struct CausalConvScratch {
  void* g;        // (B, T, D) in the accumulator type, see conv.h
  void* partial;  // (shards, K + 1, D) in the accumulator type
};

// dweight: (K, D), dbias: (D), or null.
Status launch_causal_conv_backward(const CausalConvBackwardParams& p,
                                   const CausalConvScratch& scratch, void* dweight, void* dbias,
                                   Stream stream);

}  // namespace omniattn
