// mamba3_inputs: its schemas. Elsewhere than on the CPU a composition of torch's ops implements it
// (python/omniattn/compositions/state_space/mamba3.py).
#include "ops/state_space/mamba3.h"

#include "ops/registry.h"

namespace omniattn::ops::mamba3 {
namespace {

const Registry registry([](Registry& ops) {
  ops.define<decltype(mamba3_inputs)>("mamba3_inputs", differentiable);
  ops.define<decltype(mamba3_inputs_backward)>("mamba3_inputs_backward");
});

}  // namespace
}  // namespace omniattn::ops::mamba3
