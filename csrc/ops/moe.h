// moe, moe_backward: checks and allocation for either device. Included by moe_cpu.cpp and
// moe_cuda.cpp, each of which defines the two run functions.
#pragma once

#include "kernels/moe/moe.h"

#include <tuple>

#include "ops/tensor.h"

namespace {

using namespace omniattn;
using namespace omniattn::ops;

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Weights of all experts, logically (E, out, in): with unit stride along `in`, or along `out`.
struct Experts {
  Tensor tensor;
  int64_t experts, out, in;
  int64_t expert_stride, out_stride, in_stride;
  bool transposed;  // unit stride along `out`

  const void* data() const { return tensor.const_data_ptr(); }
  // As B of x W^T and of y W.
  MoeMatrix forward() const { return {data(), expert_stride, in_stride, out_stride}; }
  MoeMatrix backward() const { return {data(), expert_stride, out_stride, in_stride}; }
};

Experts as_experts(const char* op, const char* name, const Tensor& t, DType dtype) {
  require_tensor(op, name, t, dtype);
  require(t.dim() == 3, op, name, " must have 3 dimensions, got ", t.dim());
  const Sizes sizes = t.sizes();
  const auto fits = [&](int64_t dim) { return sizes[dim] <= 1 || t.strides()[dim] == 1; };
  const bool transposed = t.strides()[2] != 1 && t.strides()[1] == 1;
  const Tensor dense = transposed || fits(2) ? t : torch::stable::contiguous(t);
  const Sizes strides = dense.strides();
  return {dense,
          sizes[0],
          sizes[1],
          sizes[2],
          strides[0],
          transposed ? 1 : strides[1],
          transposed ? strides[2] : 1,
          transposed};
}

// A gradient in the layout of its weights; empty if not wanted.
Tensor empty_like(const Experts& w, DType dtype, bool wanted) {
  if (!wanted) {
    const int64_t none = 0;
    return empty_tensor({&none, 1}, dtype);
  }
  const std::array<int64_t, 3> sizes{w.experts, w.transposed ? w.in : w.out,
                                     w.transposed ? w.out : w.in};
  const Tensor t = empty_tensor({sizes.data(), 3}, dtype);
  return w.transposed ? torch::stable::transpose(t, 1, 2) : t;
}

// The arguments that forward and backward share, checked.
struct Problem {
  DType dtype, compute;
  Rows x;
  int64_t tokens, slots, experts, dim;
  Tensor index, weights;  // contiguous (tokens, slots)
  Experts up, down;
  OptTensor up_bias, down_bias;
  MoeHidden hidden;
  int64_t columns;  // of pre

  Problem(const char* op, const Tensor& x_, const Tensor& index_, const Tensor& weights_,
          const Tensor& up_, const OptTensor& up_bias_, const Tensor& down_,
          const OptTensor& down_bias_, int64_t act, int64_t gate, const std::vector<double>& clamp)
      : dtype(dtype_of(op, "x", x_)),
        compute(accumulator(dtype)),
        x(checked_rows(op, x_, dtype)),
        tokens(x.rows),
        dim(x.cols),
        index(index_),
        weights(weights_),
        up(as_experts(op, "up", up_, dtype)),
        down(as_experts(op, "down", down_, dtype)) {
    require(act >= 0 && act < kActivationCount, op, "act must be in [0, ", kActivationCount,
            "), got act=", act);
    require(gate >= 0 && gate < kMoeGateCount, op, "gate must be in [0, ", kMoeGateCount,
            "), got gate=", gate);
    require(clamp.empty() || clamp.size() == 2, op, "clamp must hold alpha and limit, got ",
            clamp.size(), " numbers");
    hidden = {static_cast<Activation>(act), static_cast<MoeGate>(gate), 0, 0, down.in};
    if (!clamp.empty()) {
      require(clamp[0] > 0 && clamp[1] > 0 && hidden.gate != MoeGate::none, op,
              "clamp must have alpha > 0 and limit > 0 and needs a gate, got alpha=", clamp[0],
              ", limit=", clamp[1]);
      hidden.alpha = clamp[0];
      hidden.limit = clamp[1];
    }
    experts = up.experts;
    columns = hidden.columns();
    require(up.out == columns && up.in == dim, op, "up must have shape (E, ", columns, ", ", dim,
            ") to fit x and down, got (", experts, ", ", up.out, ", ", up.in, ")");
    require(down.experts == experts && down.out == dim, op, "down must have shape (", experts, ", ",
            dim, ", F), got (", down.experts, ", ", down.out, ", ", down.in, ")");
    up_bias = bias(op, "up_bias", up_bias_, columns);
    down_bias = bias(op, "down_bias", down_bias_, dim);

    require(is_here(index) && index.scalar_type() == ScalarType::Long && index.dim() == 2 &&
                index.size(0) == tokens,
            op, "index must be int64 of shape (", tokens, ", k) on ", kDeviceName);
    slots = index.size(1);
    require_tensor(op, "weights", weights, compute);
    require_sizes(op, "weights", weights, index.sizes());
    if (!index.is_contiguous()) index = torch::stable::contiguous(index);
    if (!weights.is_contiguous()) weights = torch::stable::contiguous(weights);
  }

 private:
  static Rows checked_rows(const char* op, const Tensor& t, DType dtype) {
    require_tensor(op, "x", t, dtype);
    require(t.dim() == 2, op, "x must have 2 dimensions, got ", t.dim());
    return as_rows(op, "x", t);
  }

  OptTensor bias(const char* op, const char* name, const OptTensor& t, int64_t cols) const {
    if (!t.has_value()) return t;
    const std::array<int64_t, 2> sizes{experts, cols};
    require_tensor(op, name, *t, dtype);
    require_sizes(op, name, *t, {sizes.data(), 2});
    return contiguous(t);
  }
};

// Where gradients go, null: not wanted. Those of the weights are in the layout of the weights.
struct MoeGradients {
  void *x, *weights, *up, *up_bias, *down, *down_bias;
};

// pre: (tokens slots, columns) to keep pre-activations in, or null; zeros where there are none.
void run_forward(const Problem& p, void* y, void* pre);
// pre: null to compute them again.
void run_backward(const Problem& p, const Rows& grad_y, const void* pre, const MoeGradients& grads);

std::tuple<Tensor, Tensor> moe(const Tensor& x, const Tensor& index, const Tensor& weights,
                               const Tensor& up_weight, const OptTensor& up_bias,
                               const Tensor& down_weight, const OptTensor& down_bias, int64_t act,
                               int64_t gate, std::vector<double> clamp, bool keep) {
  const DeviceScope scope(x);
  const Problem p("moe", x, index, weights, up_weight, up_bias, down_weight, down_bias, act, gate,
                  clamp);
  const std::array<int64_t, 2> pre_sizes{keep ? p.tokens * p.slots : 0, p.columns};
  const Tensor pre = empty_tensor({pre_sizes.data(), 2}, p.dtype);
  const Tensor y = empty_tensor(x.sizes(), p.dtype);
  run_forward(p, y.mutable_data_ptr(), keep ? pre.mutable_data_ptr() : nullptr);
  return {y, pre};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> moe_backward(
    const Tensor& grad_y, const Tensor& x, const Tensor& index, const Tensor& weights,
    const Tensor& up_weight, const OptTensor& up_bias, const Tensor& down_weight,
    const OptTensor& down_bias, const Tensor& pre, int64_t act, int64_t gate,
    std::vector<double> clamp, bool x_grad, bool weights_grad, bool up_grad, bool up_bias_grad,
    bool down_grad, bool down_bias_grad) {
  constexpr const char* op = "moe_backward";
  const DeviceScope scope(x);
  const Problem p(op, x, index, weights, up_weight, up_bias, down_weight, down_bias, act, gate,
                  clamp);
  require_tensor(op, "grad_y", grad_y, p.dtype);
  require_sizes(op, "grad_y", grad_y, x.sizes());
  const Rows grad_rows = as_rows(op, "grad_y", grad_y);
  require_tensor(op, "pre", pre, p.dtype);
  const bool kept = pre.dim() != 2 || pre.size(0) != 0;
  const std::array<int64_t, 2> pre_sizes{kept ? p.tokens * p.slots : 0, p.columns};
  require_sizes(op, "pre", pre, {pre_sizes.data(), 2});
  const Tensor dense_pre = pre.is_contiguous() ? pre : torch::stable::contiguous(pre);

  const auto empty = [&](bool wanted, int64_t cols) {
    const std::array<int64_t, 2> sizes{wanted ? p.experts : 0, cols};
    return empty_tensor({sizes.data(), wanted ? size_t{2} : size_t{1}}, p.dtype);
  };
  const int64_t none = 0;
  const Tensor dx = empty_tensor(x_grad ? x.sizes() : Sizes(&none, 1), p.dtype);
  const Tensor dweights =
      empty_tensor(weights_grad ? p.weights.sizes() : Sizes(&none, 1), p.compute);
  const Tensor dup = empty_like(p.up, p.dtype, up_grad);
  const Tensor dup_bias = empty(up_bias_grad, p.columns);
  const Tensor ddown = empty_like(p.down, p.dtype, down_grad);
  const Tensor ddown_bias = empty(down_bias_grad, p.dim);
  const auto wanted = [](bool is, const Tensor& t) { return is ? t.mutable_data_ptr() : nullptr; };
  run_backward(p, grad_rows, kept ? dense_pre.const_data_ptr() : nullptr,
               {wanted(x_grad, dx), wanted(weights_grad, dweights), wanted(up_grad, dup),
                wanted(up_bias_grad, dup_bias), wanted(down_grad, ddown),
                wanted(down_bias_grad, ddown_bias)});
  return {dx, dweights, dup, dup_bias, ddown, ddown_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omniattn, OMNIATTN_DISPATCH_KEY, m) {
  OMNIATTN_IMPL(m, "moe", moe);
  m.impl("moe_backward", TORCH_BOX(&moe_backward));
}
