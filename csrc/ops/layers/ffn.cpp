// glu_mlp: products by this package's kernels or by torch's, with the gated activation between
// them.
#include <vector>

#include "kernels/activation/activation.h"
#include "ops/device.h"
#include "ops/layers/activation.h"
#include "ops/layers/gemm.h"
#include "ops/layers/linear.h"
#include "ops/layers/random.h"
#include "ops/registry.h"
#include "ops/seed.h"

namespace omniattn::ops::ffn {
namespace {

// x (..., d), gate_weight and up_weight (F, d), down_weight (n, F), gate_bias and up_bias (F),
// down_bias (n). native: use this library's products, split as split_bf16 says (gemm.h), else
// torch's. With recompute the forward keeps nothing for the backward.
OMNIATTN_FIELDS(Inputs, Tensor x, gate_weight; OptTensor up_weight; Tensor down_weight;
                OptTensor gate_bias, up_bias, down_bias, seed);
OMNIATTN_FIELDS(Options, double dropout_p; int64_t act; Floats clamp; bool recompute, native;
                int64_t split_bf16);

// The arguments that forward and backward share.
struct Layer {
  const char* op;
  const Inputs& in;
  const Options& options;

  DType dtype() const { return dtype_of(op, "x", in.x); }
  const gemm::LinearProducts& products() const {
    return options.native ? gemm::kNativeProducts : gemm::kTorchProducts;
  }
  Tensor none() const { return empty_tensor({0}, dtype()); }

  void require_vector(const char* name, const OptTensor& t, int64_t size) const {
    if (!t.has_value()) return;
    require_tensor(op, name, *t, dtype());
    require_sizes(op, name, *t, {size});
  }

  // Checks everything, so that errors name glu_mlp and not an op that it is composed of.
  void check() const {
    require_tensor(op, "x", in.x, dtype());
    require_tensor(op, "gate_weight", in.gate_weight, dtype());
    require_tensor(op, "down_weight", in.down_weight, dtype());
    require(in.x.dim() >= 1 && in.gate_weight.dim() == 2 && in.down_weight.dim() == 2, op,
            "x must have at least 1 dimension and weights 2, got ", in.x.dim(), ", ",
            in.gate_weight.dim(), " and ", in.down_weight.dim());
    const int64_t hidden = in.gate_weight.size(0), width = in.gate_weight.size(1);
    require(in.x.size(in.x.dim() - 1) == width, op, "x must have ", width, " columns, got ",
            in.x.size(in.x.dim() - 1));
    require_sizes(op, "down_weight", in.down_weight, {in.down_weight.size(0), hidden});
    if (in.up_weight.has_value()) {
      require_tensor(op, "up_weight", *in.up_weight, dtype());
      require_sizes(op, "up_weight", *in.up_weight, {hidden, width});
    }
    require_vector("gate_bias", in.gate_bias, hidden);
    require_vector("up_bias", in.up_bias, hidden);
    require_vector("down_bias", in.down_bias, in.down_weight.size(0));
    require(options.act >= 0 && options.act < kActivationCount, op, "act must be in [0, ",
            kActivationCount, "), got act=", options.act);
    require(options.clamp.empty() ||
                (options.clamp.size() == 2 && options.clamp[0] > 0 && options.clamp[1] > 0),
            op, "clamp must hold alpha > 0 and limit > 0 or nothing, got ", options.clamp.size(),
            " numbers");
    require(in.up_weight.has_value() || (options.clamp.empty() && !in.up_bias.has_value()), op,
            "clamp and up_bias need an up_weight, got up_weight=None");
    require(options.dropout_p >= 0 && options.dropout_p <= 1, op,
            "dropout_p must be in [0, 1], got dropout_p=", options.dropout_p);
    require(options.dropout_p == 0 || in.seed.has_value(), op,
            "dropout_p must be 0 without a seed, got dropout_p=", options.dropout_p);
    if (in.seed.has_value()) require_seed(op, *in.seed);
    gemm::require_split_bf16(op, options.split_bf16);
  }

  OpCall call() const { return {op, true}; }
  Tensor project(const Tensor& rows, const Tensor& weight, const OptTensor& bias) const {
    return products().forward(call(), {rows, weight, bias}, {options.split_bf16});
  }
  gemm::LayerGradients gradients(const Tensor& grad_y, const Tensor& rows, const Tensor& weight,
                                 const gemm::Wanted& wanted) const {
    return products().backward(call(), {grad_y, rows, weight}, {options.split_bf16}, wanted);
  }
  Tensor gate() const { return project(in.x, in.gate_weight, in.gate_bias); }
  OptTensor up() const {
    return in.up_weight.has_value() ? OptTensor(project(in.x, *in.up_weight, in.up_bias))
                                    : std::nullopt;
  }

  activation::GluOptions glu_options() const { return {options.act, options.clamp}; }
  // Applies dropout to the hidden layer or to its gradient.
  Tensor drop(const Tensor& hidden_) const {
    return in.seed.has_value() ? random::dropout(call(), {hidden_, *in.seed}, {options.dropout_p})
                               : hidden_;
  }
  Tensor hidden(const Tensor& gate_, const OptTensor& up_) const {
    return drop(up_.has_value() ? activation::glu(call(), {gate_, up_}, glu_options())
                                : activation::activate(call(), {gate_, options.act}));
  }

  // Requires a tensor like a projection onto `columns` columns.
  void require_projection(const char* name, const Tensor& t, int64_t columns) const {
    require_tensor(op, name, t, dtype());
    require_sizes(op, name, t, sizes_with_last(in.x, columns));
  }
};

OMNIATTN_FIELDS(Results, Tensor y, gate, up);

// y = (act(x gate_weight^T + gate_bias) * (x up_weight^T + up_bias)) down_weight^T + down_bias;
// without up_weight only the activation; with alpha and limit in clamp the clamped GLU of gpt-oss.
// gate and up are empty with recompute.
Results glu_mlp(const OpCall& call, const Inputs& in, const Options& options) {
  const DeviceScope scope(in.x);
  const Layer layer{call.op, in, options};
  layer.check();
  const Tensor gate = layer.gate();
  const OptTensor up = layer.up();
  const Tensor y = layer.project(layer.hidden(gate, up), in.down_weight, in.down_bias);
  if (options.recompute) return {y, layer.none(), layer.none()};
  return {y, gate, up.has_value() ? *up : layer.none()};
}

OMNIATTN_FIELDS(Backward, Tensor grad_y, gate, up; Bools needs);

// Gradients of x, the three weights and the three biases, without elements where not needed.
Tensors glu_mlp_backward(const OpCall& call, const Backward& given, const Inputs& in,
                         const Options& options) {
  const auto& [grad_y, kept_gate, kept_up, needs] = given;
  const DeviceScope scope(in.x);
  const Layer layer{call.op, in, options};
  layer.check();
  const bool two = in.up_weight.has_value();
  require(needs.size() == 8, layer.op, "needs must have one entry per tensor, 8, got ",
          needs.size());
  layer.require_projection("grad_y", grad_y, in.down_weight.size(0));
  if (!options.recompute) {
    layer.require_projection("gate", kept_gate, in.gate_weight.size(0));
    if (two) layer.require_projection("up", kept_up, in.gate_weight.size(0));
  }
  const Tensor gate = options.recompute ? layer.gate() : kept_gate;
  const OptTensor up = options.recompute ? layer.up() : two ? OptTensor(kept_up) : std::nullopt;
  OptTensor hidden = layer.hidden(gate, up);
  auto [grad, ddown, ddown_bias] = layer.gradients(
      grad_y, *hidden, in.down_weight, {true, needs[3], needs[6] && in.down_bias.has_value()});
  const Tensor dhidden = layer.drop(grad);
  // The gradients of the projections overwrite dhidden and hidden.
  const Tensor dgate = two ? *hidden : dhidden;
  const Tensor& dup = dhidden;
  hidden.reset();
  if (two) {
    activation::glu_backward_inplace(layer.call(), {dhidden}, {gate, *up}, layer.glu_options(),
                                     {dgate});
  } else {
    activation::activate_backward_inplace(layer.call(), {dhidden}, {gate, options.act});
  }
  auto [dx, dgate_weight, dgate_bias] =
      layer.gradients(dgate, in.x, in.gate_weight,
                      {needs[0] && !two, needs[1], needs[4] && in.gate_bias.has_value()});
  Tensor dup_weight = layer.none(), dup_bias = layer.none();
  if (two) {
    const gemm::LayerGradients of_up = layer.gradients(
        dup, in.x, *in.up_weight, {false, needs[2], needs[5] && in.up_bias.has_value()});
    dup_weight = of_up.dweight;
    dup_bias = of_up.dbias;
    if (needs[0]) {
      dx = layer.products().sum_of_input_gradients(dgate, in.gate_weight, dup, *in.up_weight,
                                                   options.split_bf16);
    }
  }
  return {dx, dgate_weight, dup_weight, ddown, dgate_bias, dup_bias, ddown_bias};
}

const Registry registry([](Registry& ops) {
  ops.add<glu_mlp>("glu_mlp", differentiable);
  ops.add<glu_mlp_backward>("glu_mlp_backward");
});

}  // namespace
}  // namespace omniattn::ops::ffn
