// multi_token_attention: its schemas. Elsewhere than on the CPU a composition of torch's ops
// implements it (python/omniattn/compositions/attention/multi_token.py).
#include "ops/attention/multi_token.h"

#include "ops/registry.h"

namespace omniattn::ops::multi_token {
namespace {

const Registry registry([](Registry& ops) {
  ops.define<decltype(multi_token_attention)>("multi_token_attention", differentiable);
  ops.define<decltype(multi_token_attention_backward)>("multi_token_attention_backward");
});

}  // namespace
}  // namespace omniattn::ops::multi_token
