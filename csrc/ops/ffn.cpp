// glu_mlp: products by this package's kernels or by torch's, with the gated activation between
// them.
#include <vector>

#include "kernels/activation/activation.h"
#include "ops/activation.h"
#include "ops/device.h"
#include "ops/gemm.h"
#include "ops/linear.h"
#include "ops/random.h"
#include "ops/registry.h"
#include "ops/seed.h"

namespace omniattn::ops::ffn {
namespace {

// The arguments that forward and backward share: x (..., d), gate_weight and up_weight (F, d),
// down_weight (n, F), gate_bias and up_bias (F), down_bias (n).
struct Layer {
  const char* op;
  const Tensor& x;
  const Tensor& gate_weight;
  const OptTensor& up_weight;
  const Tensor& down_weight;
  const OptTensor& gate_bias;
  const OptTensor& up_bias;
  const OptTensor& down_bias;
  const OptTensor& seed;
  double dropout_p;
  int64_t act;
  const std::vector<double>& clamp;
  bool native;
  int64_t split_bf16;

  DType dtype() const { return dtype_of(op, "x", x); }
  const gemm::LinearProducts& products() const {
    return native ? gemm::kNativeProducts : gemm::kTorchProducts;
  }
  Tensor none() const { return empty_tensor({0}, dtype()); }

  void require_vector(const char* name, const OptTensor& t, int64_t size) const {
    if (!t.has_value()) return;
    require_tensor(op, name, *t, dtype());
    require_sizes(op, name, *t, {size});
  }

  // Checks everything, so that errors name glu_mlp and not an op that it is composed of.
  void check() const {
    require_tensor(op, "x", x, dtype());
    require_tensor(op, "gate_weight", gate_weight, dtype());
    require_tensor(op, "down_weight", down_weight, dtype());
    require(x.dim() >= 1 && gate_weight.dim() == 2 && down_weight.dim() == 2, op,
            "x must have at least 1 dimension and weights 2, got ", x.dim(), ", ",
            gate_weight.dim(), " and ", down_weight.dim());
    const int64_t hidden = gate_weight.size(0), width = gate_weight.size(1);
    require(x.size(x.dim() - 1) == width, op, "x must have ", width, " columns, got ",
            x.size(x.dim() - 1));
    require_sizes(op, "down_weight", down_weight, {down_weight.size(0), hidden});
    if (up_weight.has_value()) {
      require_tensor(op, "up_weight", *up_weight, dtype());
      require_sizes(op, "up_weight", *up_weight, {hidden, width});
    }
    require_vector("gate_bias", gate_bias, hidden);
    require_vector("up_bias", up_bias, hidden);
    require_vector("down_bias", down_bias, down_weight.size(0));
    require(act >= 0 && act < kActivationCount, op, "act must be in [0, ", kActivationCount,
            "), got act=", act);
    require(clamp.empty() || (clamp.size() == 2 && clamp[0] > 0 && clamp[1] > 0), op,
            "clamp must hold alpha > 0 and limit > 0 or nothing, got ", clamp.size(), " numbers");
    require(up_weight.has_value() || (clamp.empty() && !up_bias.has_value()), op,
            "clamp and up_bias need an up_weight, got up_weight=None");
    require(dropout_p >= 0 && dropout_p <= 1, op,
            "dropout_p must be in [0, 1], got dropout_p=", dropout_p);
    require(dropout_p == 0 || seed.has_value(), op,
            "dropout_p must be 0 without a seed, got dropout_p=", dropout_p);
    if (seed.has_value()) require_seed(op, *seed);
    gemm::require_split_bf16(op, split_bf16);
  }

  Tensor project(const Tensor& in, const Tensor& weight, const OptTensor& bias) const {
    return products().forward(in, weight, bias, split_bf16);
  }
  Tensor gate() const { return project(x, gate_weight, gate_bias); }
  OptTensor up() const {
    return up_weight.has_value() ? OptTensor(project(x, *up_weight, up_bias)) : std::nullopt;
  }

  // Applies dropout to the hidden layer or to its gradient.
  Tensor drop(const Tensor& hidden_) const {
    return seed.has_value() ? random::dropout(hidden_, *seed, dropout_p) : hidden_;
  }
  Tensor hidden(const Tensor& gate_, const OptTensor& up_) const {
    return drop(up_.has_value() ? activation::glu(gate_, up_, act, clamp)
                                : activation::activate(gate_, act));
  }

  // Requires a tensor like a projection onto `columns` columns.
  void require_projection(const char* name, const Tensor& t, int64_t columns) const {
    require_tensor(op, name, t, dtype());
    require_sizes(op, name, t, sizes_with_last(x, columns));
  }
};

std::tuple<Tensor, Tensor, Tensor> glu_mlp(const Tensor& x, const Tensor& gate_weight,
                                           const OptTensor& up_weight, const Tensor& down_weight,
                                           const OptTensor& gate_bias, const OptTensor& up_bias,
                                           const OptTensor& down_bias, const OptTensor& seed,
                                           double dropout_p, int64_t act, std::vector<double> clamp,
                                           bool recompute, bool native, int64_t split_bf16) {
  const DeviceScope scope(x);
  const Layer layer{"glu_mlp", x,    gate_weight, up_weight, down_weight, gate_bias, up_bias,
                    down_bias, seed, dropout_p,   act,       clamp,       native,    split_bf16};
  layer.check();
  const Tensor gate = layer.gate();
  const OptTensor up = layer.up();
  const Tensor y = layer.project(layer.hidden(gate, up), down_weight, down_bias);
  if (recompute) return {y, layer.none(), layer.none()};
  return {y, gate, up.has_value() ? *up : layer.none()};
}

// Gradients of x, the three weights and the three biases, without elements where not needed.
std::vector<Tensor> glu_mlp_backward(const Tensor& grad_y, const Tensor& kept_gate,
                                     const Tensor& kept_up, std::vector<bool> needs,
                                     const Tensor& x, const Tensor& gate_weight,
                                     const OptTensor& up_weight, const Tensor& down_weight,
                                     const OptTensor& gate_bias, const OptTensor& up_bias,
                                     const OptTensor& down_bias, const OptTensor& seed,
                                     double dropout_p, int64_t act, std::vector<double> clamp,
                                     bool recompute, bool native, int64_t split_bf16) {
  const DeviceScope scope(x);
  const Layer layer{
      "glu_mlp_backward", x,    gate_weight, up_weight, down_weight, gate_bias, up_bias,
      down_bias,          seed, dropout_p,   act,       clamp,       native,    split_bf16};
  layer.check();
  const bool two = up_weight.has_value();
  require(needs.size() == 8, layer.op, "needs must have one entry per tensor, 8, got ",
          needs.size());
  layer.require_projection("grad_y", grad_y, down_weight.size(0));
  if (!recompute) {
    layer.require_projection("gate", kept_gate, gate_weight.size(0));
    if (two) layer.require_projection("up", kept_up, gate_weight.size(0));
  }
  const gemm::LinearProducts& products = layer.products();
  const Tensor gate = recompute ? layer.gate() : kept_gate;
  const OptTensor up = recompute ? layer.up() : two ? OptTensor(kept_up) : std::nullopt;
  OptTensor hidden = layer.hidden(gate, up);
  auto [grad, ddown, ddown_bias] = products.backward(grad_y, *hidden, down_weight, split_bf16, true,
                                                     needs[3], needs[6] && down_bias.has_value());
  const Tensor dhidden = layer.drop(grad);
  // The gradients of the projections overwrite dhidden and hidden.
  const Tensor dgate = two ? *hidden : dhidden;
  const Tensor& dup = dhidden;
  hidden.reset();
  if (two) {
    activation::glu_backward_inplace(dhidden, gate, *up, act, clamp, dgate);
  } else {
    activation::activate_backward_inplace(dhidden, gate, act);
  }
  auto [dx, dgate_weight, dgate_bias] =
      products.backward(dgate, x, gate_weight, split_bf16, needs[0] && !two, needs[1],
                        needs[4] && gate_bias.has_value());
  Tensor dup_weight = layer.none(), dup_bias = layer.none();
  if (two) {
    std::tie(std::ignore, dup_weight, dup_bias) = products.backward(
        dup, x, *up_weight, split_bf16, false, needs[2], needs[5] && up_bias.has_value());
    if (needs[0]) {
      dx = products.sum_of_input_gradients(dgate, gate_weight, dup, *up_weight, split_bf16);
    }
  }
  return {dx, dgate_weight, dup_weight, ddown, dgate_bias, dup_bias, ddown_bias};
}

// y = (act(x gate_weight^T + gate_bias) * (x up_weight^T + up_bias)) down_weight^T + down_bias;
// without up_weight only the activation; with alpha and limit in clamp the clamped GLU of gpt-oss.
// native: use this library's products, split as split_bf16 says (gemm.h), else torch's. keep: the
// kept elements of the hidden layer, times scale. gate and up are empty with recompute.
const Registry registry([](Registry& ops) {
  ops.add<glu_mlp>(
      "glu_mlp(Tensor x, Tensor gate_weight, Tensor? up_weight, Tensor down_weight,"
      " Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias, Tensor? seed, float dropout_p,"
      " int act, float[] clamp, bool recompute, bool native, int split_bf16)"
      " -> (Tensor y, Tensor gate, Tensor up)",
      differentiable);
  ops.add<glu_mlp_backward>(
      "glu_mlp_backward(Tensor grad_y, Tensor gate, Tensor up, bool[] needs, Tensor x,"
      " Tensor gate_weight, Tensor? up_weight, Tensor down_weight, Tensor? gate_bias,"
      " Tensor? up_bias, Tensor? down_bias, Tensor? seed, float dropout_p, int act, float[] clamp,"
      " bool recompute, bool native, int split_bf16) -> Tensor[]");
});

}  // namespace
}  // namespace omniattn::ops::ffn
