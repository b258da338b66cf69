// moe_experts: checks and allocation.
#include "ops/moe.h"

#include <tuple>

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

// Describes how h is computed; clamp: alpha and limit, or empty.
MoeHidden as_hidden(const char* op, int64_t act, int64_t gate, const std::vector<double>& clamp,
                    int64_t features) {
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

Problem::Problem(const char* op_, const Tensor& x_, const Tensor& index_, const Tensor& weights_,
                 const Tensor& up_, const OptTensor& up_bias_, const Tensor& down_,
                 const OptTensor& down_bias_, int64_t act, int64_t gate,
                 const std::vector<double>& clamp, int64_t split_bf16_)
    : op(op_),
      dtype(dtype_of(op, "x", x_)),
      compute(accumulator(dtype)),
      x(token_rows(op, x_, dtype)),
      tokens(x.rows),
      dim(x.cols),
      index(index_),
      weights(weights_),
      up(as_experts(op, "up", up_, dtype)),
      down(as_experts(op, "down", down_, dtype)),
      hidden(as_hidden(op, act, gate, clamp, down.in)),
      split_bf16(split_bf16_) {
  gemm::require_split_bf16(op, split_bf16);
  experts = up.experts;
  columns = hidden.columns();
  require(up.out == columns && up.in == dim, op, "up must have shape (E, ", columns, ", ", dim,
          ") to fit x and down, got (", experts, ", ", up.out, ", ", up.in, ")");
  require(down.experts == experts && down.out == dim, op, "down must have shape (", experts, ", ",
          dim, ", F), got (", down.experts, ", ", down.out, ", ", down.in, ")");
  up_bias = as_biases(op, "up_bias", up_bias_, dtype, experts, columns);
  down_bias = as_biases(op, "down_bias", down_bias_, dtype, experts, dim);

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

std::tuple<Tensor, Tensor> moe(const Tensor& x, const Tensor& index, const Tensor& weights,
                               const Tensor& up, const OptTensor& up_bias, const Tensor& down,
                               const OptTensor& down_bias, int64_t act, int64_t gate,
                               std::vector<double> clamp, bool keep, int64_t split_bf16) {
  const DeviceScope scope(x);
  const Problem p("moe_experts", x, index, weights, up, up_bias, down, down_bias, act, gate, clamp,
                  split_bf16);
  const Tensor pre = empty_tensor({keep ? p.pairs() : 0, p.columns}, p.dtype);
  const Tensor y = empty_tensor(x.sizes(), p.dtype);
  run_forward(p, y.mutable_data_ptr(), keep ? pre.mutable_data_ptr() : nullptr);
  return {y, pre};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> moe_backward(
    const Tensor& grad_y, const Tensor& x, const Tensor& index, const Tensor& weights,
    const Tensor& up, const OptTensor& up_bias, const Tensor& down, const OptTensor& down_bias,
    const Tensor& pre, int64_t act, int64_t gate, std::vector<double> clamp, int64_t split_bf16,
    bool x_grad, bool weights_grad, bool up_grad, bool up_bias_grad, bool down_grad,
    bool down_bias_grad) {
  const DeviceScope scope(x);
  const Problem p("moe_experts_backward", x, index, weights, up, up_bias, down, down_bias, act,
                  gate, clamp, split_bf16);
  const Rows grad_rows = as_rows(p.op, "grad_y", grad_y, p.dtype, x.sizes());
  const bool kept = pre.dim() != 2 || pre.size(0) != 0;
  require_tensor(p.op, "pre", pre, p.dtype);
  require_sizes(p.op, "pre", pre, {kept ? p.pairs() : 0, p.columns});
  const Tensor dense_pre = as_dense(pre);

  const Output dx(x_grad, x.sizes(), p.dtype);
  const Output dweights(weights_grad, p.weights.sizes(), p.compute);
  const WeightOutput dup(up_grad, p.up, p.dtype), ddown(down_grad, p.down, p.dtype);
  const Output dup_bias(up_bias_grad, {p.experts, p.columns}, p.dtype);
  const Output ddown_bias(down_bias_grad, {p.experts, p.dim}, p.dtype);
  run_backward(p, grad_rows, kept ? dense_pre.const_data_ptr() : nullptr,
               {.x = dx.data(),
                .weights = dweights.data(),
                .up = dup.data(),
                .up_bias = dup_bias.data(),
                .down = ddown.data(),
                .down_bias = ddown_bias.data()});
  return {dx.tensor(),       dweights.tensor(), dup.tensor(),
          dup_bias.tensor(), ddown.tensor(),    ddown_bias.tensor()};
}

// y (N, d) = sum over a token's slots of weights (N, k) times expert index (N, k), -1: none,
// applied to x (N, d). up (E, F or 2F, d), down (E, d, F). act: Activation; gate: MoeGate; clamp:
// alpha and limit of gpt-oss, or empty. pre (N k, F or 2F), sorted by expert, is kept for the
// backward if `keep`, else empty. split_bf16: for fp32 on the CPU, see gemm.h.
const Registry registry([](Registry& ops) {
  ops.name("moe", {{"moe_experts"}});
  ops.add<moe>(
      "moe(Tensor x, Tensor index, Tensor weights, Tensor up, Tensor? up_bias, Tensor down,"
      " Tensor? down_bias, int act, int gate, float[] clamp, bool keep, int split_bf16)"
      " -> (Tensor y, Tensor pre)",
      differentiable);
  ops.add<moe_backward>(
      "moe_backward(Tensor grad_y, Tensor x, Tensor index, Tensor weights, Tensor up,"
      " Tensor? up_bias, Tensor down, Tensor? down_bias, Tensor pre, int act, int gate,"
      " float[] clamp, int split_bf16, bool x_grad, bool weights_grad, bool up_grad,"
      " bool up_bias_grad, bool down_grad, bool down_bias_grad)"
      " -> (Tensor dx, Tensor dweights, Tensor dup, Tensor dup_bias, Tensor ddown,"
      " Tensor ddown_bias)");
});

}  // namespace
}  // namespace omniattn::ops::moe
