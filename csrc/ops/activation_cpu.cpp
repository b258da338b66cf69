// glu, glu_backward on the CPU: split over threads.
#include "ops/activation.h"

#include "ops/parallel.h"

namespace {

// About 16 Ki elements per task, so that a task costs more than handing it out.
template <class Params>
void parallel_blocks(const Params& p, int64_t rows,
                     void (*kernel)(const Params&, int64_t, int64_t)) {
  const int64_t width = std::clamp<int64_t>(p.cols, 1, kGluBlock);
  const int64_t blocks = (p.cols + kGluBlock - 1) / kGluBlock;
  parallel_ranges(rows * blocks, std::max<int64_t>(1, 16384 / width),
                  [&](int64_t a, int64_t b) { kernel(p, a, b); });
}

void run_glu(const GluParams& p, int64_t rows) {
  parallel_blocks(p, rows, activation_kernels().glu);
}

void run_glu_backward(const GluBackwardParams& p, int64_t rows) {
  parallel_blocks(p, rows, activation_kernels().glu_backward);
}

}  // namespace
