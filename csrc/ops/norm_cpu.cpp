// rms_norm and layer_norm on the CPU: split over threads.
#include "ops/norm.h"
#include "ops/sum_over_rows.h"

namespace omniattn::ops::norm {

void run_forward(const char*, const NormParams& p) {
  const auto forward = norm_kernels().forward;
  parallel_ranges(p.rows, grain_of(p.cols), [&](int64_t a, int64_t b) { forward(p, a, b); });
}

void run_backward(const char*, const NormBackwardParams& p, void* dweight, void* dbias) {
  const auto backward = norm_kernels().backward;
  sum_over_rows(p.dtype, p.rows, p.cols, {dweight, 1}, {dbias, 1},
                [&](void* dw, void* db, int64_t a, int64_t b) { backward(p, dw, db, a, b); });
}

}  // namespace omniattn::ops::norm
