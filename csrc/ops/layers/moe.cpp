// moe_experts: checks and allocation.
#include "ops/layers/moe.h"

#include "ops/registry.h"

namespace omniattn::ops::moe {
namespace {

Rows token_rows(const char* op, const Tensor& x, DType dtype) {
  require(x.dim() == 2, op, "x must have 2 dimensions, got ", x.dim());
  return as_rows(op, "x", x, dtype);
}

Experts as_experts(const char* op, const char* name, const Tensor& t, DType dtype) {
  require_tensor(op, name, t, dtype);
  require(t.dim() == 3, op, name, " must have 3 dimensions, got ", t.dim());
  const Sizes sizes = t.sizes(), given = t.strides();
  const bool transposed = given[2] != 1 && given[1] == 1;
  const bool fits = transposed || sizes[2] <= 1 || given[2] == 1;
  const Tensor dense = fits ? t : torch::stable::contiguous(t);
  const Sizes strides = dense.strides();
  return {.tensor = dense,
          .experts = sizes[0],
          .out = sizes[1],
          .in = sizes[2],
          .expert_stride = strides[0],
          .out_stride = transposed ? 1 : strides[1],
          .in_stride = transposed ? strides[2] : 1,
          .transposed = transposed};
}

OptTensor as_biases(const char* op, const char* name, const OptTensor& t, DType dtype,
                    int64_t experts, int64_t cols) {
  if (!t.has_value()) return t;
  require_tensor(op, name, *t, dtype);
  require_sizes(op, name, *t, {experts, cols});
  return as_dense(t);
}

// Describes how h is computed.
MoeHidden as_hidden(const char* op, const Form& form, int64_t features) {
  const auto& [act, gate, clamp] = form;
  require(act >= 0 && act < kActivationCount, op, "act must be in [0, ", kActivationCount,
          "), got act=", act);
  require(gate >= 0 && gate < kMoeGateCount, op, "gate must be in [0, ", kMoeGateCount,
          "), got gate=", gate);
  require(clamp.empty() || clamp.size() == 2, op, "clamp must hold alpha and limit, got ",
          clamp.size(), " numbers");
  const bool clamped = !clamp.empty();
  const auto place = static_cast<MoeGate>(gate);
  require(!clamped || (clamp[0] > 0 && clamp[1] > 0 && place != MoeGate::none), op,
          "clamp must have alpha > 0 and limit > 0 and needs a gate, got alpha=",
          clamped ? clamp[0] : 0, ", limit=", clamped ? clamp[1] : 0);
  return {.act = static_cast<Activation>(act),
          .gate = place,
          .clamp = clamped ? Clamp{.alpha = clamp[0], .limit = clamp[1]} : Clamp{},
          .features = features};
}

// Gradient of the weights of all experts, in the layout of the weights.
class WeightOutput {
 public:
  WeightOutput(bool wanted, const Experts& w, DType dtype)
      : memory_(wanted, {w.experts, w.transposed ? w.in : w.out, w.transposed ? w.out : w.in},
                dtype),
        transposed_(wanted && w.transposed) {}

  void* data() const { return memory_.data(); }
  Tensor tensor() const {
    return transposed_ ? torch::stable::transpose(memory_.tensor(), 1, 2) : memory_.tensor();
  }

 private:
  Output memory_;
  bool transposed_;
};

}  // namespace

Problem::Problem(const OpCall& call, const Inputs& in, const Form& form, const Split& split)
    : op(call.op),
      dtype(dtype_of(op, "x", in.x)),
      compute(accumulator(dtype)),
      x(token_rows(op, in.x, dtype)),
      tokens(x.rows),
      dim(x.cols),
      index(in.index),
      weights(in.weights),
      up(as_experts(op, "up", in.up, dtype)),
      down(as_experts(op, "down", in.down, dtype)),
      hidden(as_hidden(op, form, down.in)),
      split_bf16(split.split_bf16),
      own_kernels(split.own_kernels) {
  gemm::require_split_bf16(op, split_bf16);
  experts = up.experts;
  columns = hidden.columns();
  require(up.out == columns && up.in == dim, op, "up must have shape (E, ", columns, ", ", dim,
          ") to fit x and down, got (", experts, ", ", up.out, ", ", up.in, ")");
  require(down.experts == experts && down.out == dim, op, "down must have shape (", experts, ", ",
          dim, ", F), got (", down.experts, ", ", down.out, ", ", down.in, ")");
  up_bias = as_biases(op, "up_bias", in.up_bias, dtype, experts, columns);
  down_bias = as_biases(op, "down_bias", in.down_bias, dtype, experts, dim);

  require_tensor(op, "index", index, ScalarType::Long);
  require(index.dim() == 2 && index.size(0) == tokens, op, "index must have shape (", tokens,
          ", k), got ", Shape{index.sizes().data(), index.sizes().size()});
  slots = index.size(1);
  require_tensor(op, "weights", weights, compute);
  require_sizes(op, "weights", weights, index.sizes());
  index = as_dense(index);
  weights = as_dense(weights);
}

namespace {

OMNIATTN_FIELDS(Kept, bool keep);
OMNIATTN_FIELDS(Results, Tensor y, pre);

// y (N, d) = sum over a token's slots of weights times the expert of the slot, applied to x. pre
// (N k, F or 2F), sorted by expert, is kept for the backward if `keep`, else empty.
Results moe(const OpCall& call, const Inputs& in, const Form& form, const Kept& kept,
            const Split& split) {
  const DeviceScope scope(in.x);
  const Problem p(call, in, form, split);
  const bool keep = kept.keep;
  const Tensor pre = empty_tensor({keep ? p.pairs() : 0, p.columns}, p.dtype);
  const Tensor y = empty_tensor(in.x.sizes(), p.dtype);
  run_forward(p, y.mutable_data_ptr(), keep ? pre.mutable_data_ptr() : nullptr);
  return {y, pre};
}

OMNIATTN_FIELDS(Incoming, Tensor grad_y);
OMNIATTN_FIELDS(Saved, Tensor pre);
OMNIATTN_FIELDS(Wanted, bool x_grad, weights_grad, up_grad, up_bias_grad, down_grad,
                down_bias_grad);
OMNIATTN_FIELDS(Gradients, Output dx, dweights; Tensor dup; Output dup_bias; Tensor ddown;
                Output ddown_bias);

Gradients moe_backward(const OpCall& call, const Incoming& grads, const Inputs& in,
                       const Saved& saved, const Form& form, const Split& split,
                       const Wanted& wanted) {
  const DeviceScope scope(in.x);
  const Problem p(call, in, form, split);
  const Tensor& pre = saved.pre;
  const Rows grad_rows = as_rows(p.op, "grad_y", grads.grad_y, p.dtype, in.x.sizes());
  const bool kept = pre.dim() != 2 || pre.size(0) != 0;
  require_tensor(p.op, "pre", pre, p.dtype);
  require_sizes(p.op, "pre", pre, {kept ? p.pairs() : 0, p.columns});
  const Tensor dense_pre = as_dense(pre);

  const Output dx(wanted.x_grad, in.x.sizes(), p.dtype);
  const Output dweights(wanted.weights_grad, p.weights.sizes(), p.compute);
  const WeightOutput dup(wanted.up_grad, p.up, p.dtype);
  const WeightOutput ddown(wanted.down_grad, p.down, p.dtype);
  const Output dup_bias(wanted.up_bias_grad, {p.experts, p.columns}, p.dtype);
  const Output ddown_bias(wanted.down_bias_grad, {p.experts, p.dim}, p.dtype);
  run_backward(p, grad_rows, kept ? dense_pre.const_data_ptr() : nullptr,
               {.x = dx.data(),
                .weights = dweights.data(),
                .up = dup.data(),
                .up_bias = dup_bias.data(),
                .down = ddown.data(),
                .down_bias = ddown_bias.data()});
  return {dx, dweights, dup.tensor(), dup_bias, ddown.tensor(), ddown_bias};
}

const Registry registry([](Registry& ops) {
  ops.name("moe", {{"moe_experts"}});
  ops.add<moe>("moe", differentiable);
  ops.add<moe_backward>("moe_backward");
});

}  // namespace
}  // namespace omniattn::ops::moe
