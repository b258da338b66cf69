// dropout, uniform_like on the CPU: split over threads.
#include "ops/parallel.h"
#include "ops/random.h"
#include "semantics/seqlen.h"

namespace omniattn::ops::random {
namespace {

template <class Params>
void parallel_blocks(Params p, const Tensor& seed,
                     void (*kernel)(const Params&, int64_t, int64_t)) {
  p.stream = read_seed(seed);
  parallel_ranges(ceil_div(p.n, kRandomBlock), grain_of(kRandomBlock),
                  [&](int64_t a, int64_t b) { kernel(p, a, b); });
}

}  // namespace

void run(const char*, DropoutParams p, const Tensor& seed) {
  parallel_blocks(p, seed, random_kernels().dropout);
}

void run(const char*, UniformParams p, const Tensor& seed) {
  parallel_blocks(p, seed, random_kernels().uniform);
}

}  // namespace omniattn::ops::random
