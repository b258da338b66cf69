// dropout, uniform_like: checks and allocation for either device. Included by random_cpu.cpp and
// random_cuda.cpp, each of which defines `run`, which also takes the seed to where its kernels read
// it.
#pragma once

#include "kernels/random/random.h"

#include "ops/seed.h"

namespace {

using namespace omniattn;
using namespace omniattn::ops;

void run(DropoutParams p, const Tensor& seed);
void run(UniformParams p, const Tensor& seed);

Tensor dropout(const Tensor& x, const Tensor& seed, double probability) {
  constexpr const char* op = "dropout";
  const DeviceScope scope(x);
  const DType dtype = dtype_of(op, "x", x);
  require_tensor(op, "x", x, dtype);
  require(probability >= 0 && probability <= 1, op, "p must be in [0, 1], got p=", probability);
  require_seed(op, seed);
  const Tensor y = empty_tensor(x.sizes(), dtype);
  if (probability == 1) return torch::stable::fill_(y, 0);
  const Tensor dense = torch::stable::contiguous(x);
  const Dropout rule = make_dropout(probability, 0, 0);
  DropoutParams p{};
  p.dtype = dtype;
  p.n = x.numel();
  p.x = dense.const_data_ptr();
  p.y = y.mutable_data_ptr();
  p.threshold = static_cast<uint32_t>(rule.threshold);
  p.scale = rule.scale;
  run(p, seed);
  return y;
}

Tensor uniform_like(const Tensor& x, const Tensor& seed) {
  constexpr const char* op = "uniform_like";
  const DeviceScope scope(x);
  require(is_here(x), op, "x must be on ", kDeviceName);
  require_seed(op, seed);
  const Tensor y = empty_tensor(x.sizes(), DType::f32);
  UniformParams p{};
  p.n = x.numel();
  p.y = static_cast<float*>(y.mutable_data_ptr());
  run(p, seed);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omniattn, OMNIATTN_DISPATCH_KEY, m) {
  OMNIATTN_IMPL(m, "dropout", dropout);
  m.impl("uniform_like", TORCH_BOX(&uniform_like));
}
