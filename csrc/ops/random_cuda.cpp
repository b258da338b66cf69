// dropout, uniform_like on CUDA.
#include "kernels/random/random_cuda.h"
#include "ops/cuda.h"
#include "ops/random.h"

namespace omniattn::ops::random {
namespace {

// A seed on the CPU is fixed when a graph is captured, one on the device of x is not.
template <class Params>
void launch(const char* op, Params p, const Tensor& seed,
            Status (*launcher)(const Params&, Stream)) {
  const Tensor words = as_dense(seed);
  if (is_here(words)) {
    p.seed = static_cast<const int64_t*>(words.const_data_ptr());
  } else {
    p.stream = read_seed(words);
  }
  require_launched(op, launcher(p, stream()));
}

}  // namespace

void run(const char* op, DropoutParams p, const Tensor& seed) {
  launch(op, p, seed, launch_dropout);
}

void run(const char* op, UniformParams p, const Tensor& seed) {
  launch(op, p, seed, launch_uniform);
}

}  // namespace omniattn::ops::random
