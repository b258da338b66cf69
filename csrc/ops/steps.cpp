// Single steps of recurrences in place, without gradients. Native on the CPU only (steps_cpu.cpp);
// elsewhere layers decode by the ops that return new states.
#include "ops/registry.h"

namespace omniattn::ops::steps {
namespace {

// x (B, 1, D), weight (D, K), states (B, D, W): the last W >= K - 1 inputs. ssd_: x, z (B,1,H,P),
// dt (B, 1, H), A (H), B, C (B, 1, G, N), D (H) or (H, P), dt_bias (H), states (B, H, P, N).
const Registry registry([](Registry& ops) {
  ops.define(
      "causal_conv1d_(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) initial_state, bool silu)"
      " -> Tensor");
  ops.define(
      "ssd_(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z,"
      " Tensor? dt_bias, Tensor(a!) initial_state, bool dt_softplus, float least, float largest)"
      " -> Tensor");
});

}  // namespace
}  // namespace omniattn::ops::steps
