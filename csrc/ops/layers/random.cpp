// dropout and uniform_like.
#include "ops/layers/random.h"

#include "kernels/random/random.h"
#include "ops/device.h"
#include "ops/registry.h"
#include "ops/seed.h"
#include "semantics/arith.h"

namespace omniattn::ops::random {
namespace {

// CUDA kernels read a seed on their device themselves, so that a captured graph can be replayed
// with another seed; a seed on the CPU is fixed when the graph is captured.
template <class Params>
void take_seed(Params& p, const Tensor& seed) {
  if (kOnCuda && is_here(seed)) {
    p.seed = static_cast<const int64_t*>(seed.const_data_ptr());
  } else {
    p.stream = read_seed(seed);
  }
}

template <class Params>
void run_blocks(const Params& p, void (*kernel)(const Params&, int64_t, int64_t)) {
  run_items(p, ceil_div(p.n, kRandomBlock), kRandomBlock, kernel);
}

}  // namespace

Tensor dropout(const OpCall& call, const Draw& in, const DropoutOptions& options) {
  const char* const op = call.op;
  const auto& [x, seed] = in;
  const double probability = options.p;
  const DeviceScope scope(x);
  const DType dtype = dtype_of(op, "x", x);
  require_tensor(op, "x", x, dtype);
  require(probability >= 0 && probability <= 1, op, "p must be in [0, 1], got p=", probability);
  require_seed(op, seed);
  const Tensor y = empty_tensor(x.sizes(), dtype);
  if (probability == 1) return torch::stable::fill_(y, 0);
  const Tensor dense = as_dense(x);
  const Dropout rule = make_dropout(probability, 0, 0);
  const Tensor words = as_dense(seed);
  DropoutParams params{.dtype = dtype,
                       .n = x.numel(),
                       .x = dense.const_data_ptr(),
                       .y = y.mutable_data_ptr(),
                       .threshold = static_cast<uint32_t>(rule.threshold),
                       .scale = rule.scale,
                       .stream = {},
                       .seed = nullptr};
  take_seed(params, words);
  if constexpr (kOnCuda) {
    require_launched(op, launch_dropout(params, stream()));
  } else {
    run_blocks(params, random_kernels(dtype).dropout);
  }
  return y;
}

namespace {

Tensor uniform_like(const OpCall& call, const Draw& in) {
  const char* const op = call.op;
  const auto& [x, seed] = in;
  const DeviceScope scope(x);
  require(is_here(x), op, "x must be on ", kDeviceName);
  require_seed(op, seed);
  const Tensor y = empty_tensor(x.sizes(), DType::f32);
  const Tensor words = as_dense(seed);
  UniformParams params{.n = x.numel(),
                       .y = static_cast<float*>(y.mutable_data_ptr()),
                       .stream = {},
                       .seed = nullptr};
  take_seed(params, words);
  if constexpr (kOnCuda) {
    require_launched(op, launch_uniform(params, stream()));
  } else {
    run_blocks(params, random_kernels(DType::f32).uniform);
  }
  return y;
}

// dropout: y = x / (1 - p) where an element's draw keeps it, else 0. uniform_like: fp32 numbers in
// [0, 1) in x's shape. A draw is a function of seed = [seed, offset] and the element's index.
const Registry registry([](Registry& ops) {
  ops.add<dropout>("dropout", differentiable);
  ops.add<uniform_like>("uniform_like");
});

}  // namespace
}  // namespace omniattn::ops::random
