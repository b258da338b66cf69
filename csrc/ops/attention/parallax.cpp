// parallax_attention: its schemas. Elsewhere than on the CPU a composition of torch's ops
// implements it (python/omniattn/compositions/attention/parallax.py).
#include "ops/attention/parallax.h"

#include "ops/registry.h"

namespace omniattn::ops::parallax {
namespace {

const Registry registry([](Registry& ops) {
  ops.define<decltype(parallax_attention)>("parallax_attention", differentiable);
  ops.define<decltype(parallax_attention_backward)>("parallax_attention_backward");
});

}  // namespace
}  // namespace omniattn::ops::parallax
