// What the launchers of CUDA kernels share with their callers, without CUDA's headers.
#pragma once

struct CUstream_st;

namespace omniattn {

using Stream = CUstream_st*;  // a cudaStream_t

// Null if the kernels were enqueued, else what was wrong.
using Status = const char*;

}  // namespace omniattn
