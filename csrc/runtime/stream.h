// Stream and status types of CUDA launchers and their callers, free of CUDA's headers.
#pragma once

struct CUstream_st;

namespace omniattn {

using Stream = CUstream_st*;  // a cudaStream_t

// Null if the kernels were enqueued, else an error message.
using Status = const char*;

}  // namespace omniattn
