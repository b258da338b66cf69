// dropout, uniform_like on the CPU: split over threads.
#include "ops/parallel.h"
#include "ops/random.h"

namespace {

template <class Params>
void parallel_blocks(Params p, const Tensor& seed,
                     void (*kernel)(const Params&, int64_t, int64_t)) {
  constexpr int64_t kGrain = 16384 / kRandomBlock;  // a task costs more than handing it out
  p.stream = read_seed(seed);
  parallel_ranges((p.n + kRandomBlock - 1) / kRandomBlock, kGrain,
                  [&](int64_t a, int64_t b) { kernel(p, a, b); });
}

void run(DropoutParams p, const Tensor& seed) {
  parallel_blocks(p, seed, random_kernels().dropout);
}

void run(UniformParams p, const Tensor& seed) {
  parallel_blocks(p, seed, random_kernels().uniform);
}

}  // namespace
