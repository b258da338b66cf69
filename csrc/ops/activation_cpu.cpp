// The gated activations on the CPU: split over threads.
#include "ops/activation.h"
#include "ops/parallel.h"
#include "semantics/seqlen.h"

namespace omniattn::ops::activation {
namespace {

template <class Params>
void parallel_blocks(const Params& p, int64_t rows,
                     void (*kernel)(const Params&, int64_t, int64_t)) {
  parallel_ranges(rows * ceil_div(p.cols, kGluBlock), grain_of(std::min(p.cols, kGluBlock)),
                  [&](int64_t a, int64_t b) { kernel(p, a, b); });
}

}  // namespace

void run(const char*, const GluParams& p, int64_t rows) {
  parallel_blocks(p, rows, activation_kernels().glu);
}

void run(const char*, const GluBackwardParams& p, int64_t rows) {
  parallel_blocks(p, rows, activation_kernels().glu_backward);
}

}  // namespace omniattn::ops::activation
