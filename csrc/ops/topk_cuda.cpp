// top_k on CUDA.
#include "kernels/topk/topk_cuda.h"
#include "ops/cuda.h"
#include "ops/topk.h"

namespace omniattn::ops::topk {

void run(const char* op, const TopKParams& p, int64_t rows) {
  require_launched(op, launch_top_k(p, rows, stream()));
}

}  // namespace omniattn::ops::topk
