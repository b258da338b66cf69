// top_k on the CPU.
#include "ops/parallel.h"
#include "ops/topk.h"

namespace {

void run(const TopKParams& p, int64_t rows) {
  parallel_ranges(rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, p.n + p.k)),
                  [&](int64_t a, int64_t b) { topk_kernels().top_k(p, a, b); });
}

}  // namespace
