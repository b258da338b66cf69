// Schemas of the steps, which only the CPU has: elsewhere layers decode by the ops that return new
// states, and compositions/recurrences/least_squares.py implements mesa_step by torch's ops.
#include "ops/recurrences/steps.h"

#include "ops/registry.h"

namespace omniattn::ops::steps {
namespace {

const Registry registry([](Registry& ops) {
  ops.define<decltype(causal_conv1d_inplace)>("causal_conv1d_");
  ops.define<decltype(ssd_inplace)>("ssd_");
  ops.define<decltype(mesa_step)>("mesa_step");
});

}  // namespace
}  // namespace omniattn::ops::steps
