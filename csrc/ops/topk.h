// How a device runs top_k; defined in topk_cpu.cpp and topk_cuda.cpp.
#pragma once

#include "kernels/topk/topk.h"

namespace omniattn::ops::topk {

void run(const char* op, const TopKParams& p, int64_t rows);

}  // namespace omniattn::ops::topk
