// cross_entropy on the CPU: split over threads.
#include "ops/loss.h"
#include "ops/parallel.h"

namespace omniattn::ops::loss {

bool writes_gradients(DType, DType) { return false; }

void check_targets(const char* op, const CrossEntropyParams& p) {
  for (int64_t i = 0; i < p.rows; ++i) {
    const int64_t t = p.target[i];
    require((t >= 0 && t < p.cols) || t == p.ignore_index, op, "target must be in [0, ", p.cols,
            ") or ignore_index=", p.ignore_index, ", got target=", t, " at flat index ", i);
  }
}

void run_forward(const char*, const CrossEntropyParams& p) {
  const auto forward = loss_kernels().forward;
  parallel_ranges(p.rows, grain_of(p.cols), [&](int64_t a, int64_t b) { forward(p, a, b); });
}

void run_backward(const char*, const CrossEntropyBackwardParams& p) {
  const auto backward = loss_kernels().backward;
  parallel_ranges(p.forward.rows, grain_of(p.forward.cols),
                  [&](int64_t a, int64_t b) { backward(p, a, b); });
}

void run_total(const char*, const CrossEntropyParams& p, bool mean, void* total) {
  loss_kernels().total(p, mean, total);
}

void run_row_weights(const char*, const CrossEntropyParams& p, bool mean, bool per_row,
                     const void* grad, void* weights) {
  loss_kernels().row_weights(p, mean, per_row, grad, weights);
}

}  // namespace omniattn::ops::loss
