// fast_weights and atlas_linear: their schemas. Elsewhere than on the CPU compositions of torch's
// ops implement them (python/omniattn/compositions/recurrences/fast_weights.py, atlas.py).
#include "ops/recurrences/fast_weights.h"

#include "ops/registry.h"

namespace omniattn::ops::fast_weights {
namespace {

const Registry registry([](Registry& ops) {
  ops.define<decltype(fast_weights)>("fast_weights", differentiable);
  ops.define<decltype(fast_weights_backward)>("fast_weights_backward");
  ops.define<decltype(atlas_linear)>("atlas_linear", differentiable);
  ops.define<decltype(atlas_linear_backward)>("atlas_linear_backward");
});

}  // namespace
}  // namespace omniattn::ops::fast_weights
