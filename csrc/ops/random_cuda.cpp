// dropout, uniform_like on CUDA.
#include "kernels/random/random_cuda.h"

#include "ops/cuda.h"
#include "ops/random.h"

namespace {

// A seed on the CPU is fixed when a graph is captured, one beside x is not.
template <class Params>
void launch(const char* op, Params p, const Tensor& seed,
            Status (*launcher)(const Params&, Stream)) {
  const Tensor words = torch::stable::contiguous(seed);
  if (is_here(words)) {
    p.seed = static_cast<const int64_t*>(words.const_data_ptr());
  } else {
    p.stream = read_seed(words);
  }
  require_launched(op, launcher(p, stream()));
}

void run(DropoutParams p, const Tensor& seed) { launch("dropout", p, seed, launch_dropout); }

void run(UniformParams p, const Tensor& seed) { launch("uniform_like", p, seed, launch_uniform); }

}  // namespace
