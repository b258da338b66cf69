// What the launchers of CUDA kernels and their callers share, without CUDA's headers.
#pragma once

struct CUstream_st;

namespace omniattn {

using Stream = CUstream_st*;  // a cudaStream_t

// Null if the kernels were enqueued, else an error message.
using Status = const char*;

}  // namespace omniattn
