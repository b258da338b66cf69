// fast_weights: its schemas. Elsewhere than on the CPU a composition of torch's ops implements it
// (python/omniattn/compositions/fast_weights.py).
#include "ops/recurrences/fast_weights.h"

#include "ops/registry.h"

namespace omniattn::ops::fast_weights {
namespace {

const Registry registry([](Registry& ops) {
  ops.define<decltype(fast_weights)>("fast_weights", differentiable);
  ops.define<decltype(fast_weights_backward)>("fast_weights_backward");
});

}  // namespace
}  // namespace omniattn::ops::fast_weights
