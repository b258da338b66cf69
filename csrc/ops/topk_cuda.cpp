// top_k on CUDA.
#include "kernels/topk/topk_cuda.h"

#include "ops/cuda.h"
#include "ops/topk.h"

namespace {

void run(const TopKParams& p, int64_t rows) {
  require_launched("top_k", launch_top_k(p, rows, stream()));
}

}  // namespace
