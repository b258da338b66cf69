// rms_norm_gated and group_norm on the CPU: split over threads.
#include "ops/gated_norm.h"
#include "ops/sum_over_rows.h"

namespace omniattn::ops::gated_norm {

void run_forward(const char*, const GatedNormParams& p) {
  const auto forward = gated_norm_kernels().forward;
  parallel_ranges(p.rows, grain_of(p.groups * p.cols),
                  [&](int64_t a, int64_t b) { forward(p, a, b); });
}

void run_backward(const char*, const GatedNormBackwardParams& p, void* dweight, void* dbias) {
  const auto backward = gated_norm_kernels().backward;
  sum_over_rows(p.dtype, p.rows, p.cols, {dweight, p.groups}, {dbias, p.groups},
                [&](void* dw, void* db, int64_t a, int64_t b) { backward(p, dw, db, a, b); });
}

}  // namespace omniattn::ops::gated_norm
