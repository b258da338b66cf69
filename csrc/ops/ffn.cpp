// glu_mlp: composed of other ops in python/omniattn/compositions/ffn.py, on either device.
#include "ops/registry.h"

namespace omniattn::ops::ffn {
namespace {

// y = (act(x gate_weight^T + gate_bias) * (x up_weight^T + up_bias)) down_weight^T + down_bias;
// without up_weight only the activation; with alpha and limit in clamp the clamped GLU of gpt-oss.
// native: use this library's products, in `pieces` of bf16 (gemm.h), else torch's. keep: the kept
// elements of the hidden layer, times scale. gate and up are empty with recompute.
const Registry registry([](Registry& ops) {
  ops.define(
      "glu_mlp(Tensor x, Tensor gate_weight, Tensor? up_weight, Tensor down_weight,"
      " Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias, Tensor? seed, float dropout_p,"
      " int act, float[] clamp, bool recompute, bool native, int pieces)"
      " -> (Tensor y, Tensor gate, Tensor up)",
      differentiable);
  ops.define(
      "glu_mlp_backward(Tensor grad_y, Tensor gate, Tensor up, bool[] needs, Tensor x,"
      " Tensor gate_weight, Tensor? up_weight, Tensor down_weight, Tensor? gate_bias,"
      " Tensor? up_bias, Tensor? down_bias, Tensor? seed, float dropout_p, int act, float[] clamp,"
      " bool recompute, bool native, int pieces) -> Tensor[]");
});

}  // namespace
}  // namespace omniattn::ops::ffn
