// log_linear_attention: its schemas. Elsewhere than on the CPU a composition of torch's ops
// implements it (python/omniattn/compositions/recurrences/log_linear.py).
#include "ops/recurrences/log_linear.h"

#include "ops/registry.h"

namespace omniattn::ops::log_linear {
namespace {

const Registry registry([](Registry& ops) {
  ops.define<decltype(log_linear_attention)>("log_linear_attention", differentiable);
  ops.define<decltype(log_linear_attention_backward)>("log_linear_attention_backward");
});

}  // namespace
}  // namespace omniattn::ops::log_linear
