// gated_norm, gated_norm_backward on the CPU: split over threads.
#include "ops/gated_norm.h"

#include "ops/norm_cpu.h"

namespace {

void run_forward(const GatedNormParams& p) {
  const auto forward = gated_norm_kernels().forward;
  parallel_ranges(p.rows, norm_grain(p.groups * p.cols),
                  [&](int64_t a, int64_t b) { forward(p, a, b); });
}

void run_backward(const GatedNormBackwardParams& p, void* dweight, void* dbias) {
  const auto backward = gated_norm_kernels().backward;
  sum_over_rows(p.dtype, p.rows, p.groups, p.cols, dweight, dbias,
                [&](void* dw, void* db, int64_t a, int64_t b) { backward(p, dw, db, a, b); });
}

}  // namespace
