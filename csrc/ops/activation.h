// glu and activate with their backwards: checks and allocation for either device. Included by
// activation_cpu.cpp and activation_cuda.cpp, each of which defines the two run functions.
#pragma once
#include "kernels/activation/activation.h"

#include <tuple>

#include "ops/tensor.h"

namespace {

using namespace omniattn;
using namespace omniattn::ops;

void run_glu(const GluParams& p, int64_t rows);
void run_glu_backward(const GluBackwardParams& p, int64_t rows);

// The gate and up halves as rows of `cols` columns each.
struct Halves {
  Rows gate;
  std::optional<Rows> up;  // empty: the right half of the gate's rows
  int64_t cols;
  DType dtype;

  const void* gate_data() const { return gate.data(); }
  const void* up_data() const {
    return up ? up->data() : static_cast<const char*>(gate.data()) + cols * size_of(dtype);
  }
  int64_t up_row() const { return up ? up->stride : gate.stride; }
};

void require_activation(const char* op, int64_t act) {
  require(act >= 0 && act < kActivationCount, op, "act must be in [0, ", kActivationCount,
          "), got act=", act);
}

// What is activated without an up half.
struct Plain {
  DType dtype;
  Rows rows;

  Plain(const char* op, const Tensor& x, int64_t act)
      : dtype(dtype_of(op, "x", x)), rows(as_rows(op, "x", x)) {
    require_activation(op, act);
    require_tensor(op, "x", x, dtype);
  }
};

Halves halves(const char* op, const Tensor& gate, const OptTensor& up, int64_t act) {
  require_activation(op, act);
  const DType dtype = dtype_of(op, "gate", gate);
  require_tensor(op, "gate", gate, dtype);
  Halves h{as_rows(op, "gate", gate), std::nullopt, 0, dtype};
  h.cols = h.gate.cols;
  if (up.has_value()) {
    require_tensor(op, "up", *up, dtype);
    require_sizes(op, "up", *up, gate.sizes());
    h.up = as_rows(op, "up", *up);
  } else {
    require(h.cols % 2 == 0, op, "packed gate must have an even last size, got ", h.cols);
    h.cols /= 2;
  }
  return h;
}

Tensor glu(const Tensor& gate, const OptTensor& up, int64_t act) {
  const DeviceScope scope(gate);
  const Halves h = halves("glu", gate, up, act);
  std::vector<int64_t> sizes(gate.sizes().begin(), gate.sizes().end());
  sizes.back() = h.cols;
  const Tensor y = empty_tensor({sizes.data(), sizes.size()}, h.dtype);
  GluParams p{};
  p.dtype = h.dtype;
  p.act = static_cast<Activation>(act);
  p.cols = h.cols;
  p.gate = h.gate_data();
  p.up = h.up_data();
  p.y = y.mutable_data_ptr();
  p.gate_row = h.gate.stride;
  p.up_row = h.up_row();
  p.y_row = h.cols;
  run_glu(p, h.gate.rows);
  return y;
}

// dgate and dup are contiguous; dup is null if both lie side by side, as a packed gate's do.
void glu_backward_into(const Halves& h, int64_t act, const Rows& grad_y, void* dgate, void* dup) {
  const int64_t half = h.cols * size_of(h.dtype);
  GluBackwardParams p{};
  p.dtype = h.dtype;
  p.act = static_cast<Activation>(act);
  p.cols = h.cols;
  p.grad_y = grad_y.data();
  p.gate = h.gate_data();
  p.up = h.up_data();
  p.dgate = dgate;
  p.dup = dup != nullptr ? dup : static_cast<char*>(dgate) + half;
  p.grad_y_row = grad_y.stride;
  p.gate_row = h.gate.stride;
  p.up_row = h.up_row();
  p.dgate_row = p.dup_row = h.gate.cols;
  run_glu_backward(p, h.gate.rows);
}

// A packed gate has one packed gradient; dup is then empty.
std::tuple<Tensor, Tensor> glu_backward(const Tensor& grad_y, const Tensor& gate,
                                        const OptTensor& up, int64_t act) {
  constexpr const char* op = "glu_backward";
  const DeviceScope scope(gate);
  const Halves h = halves(op, gate, up, act);
  std::vector<int64_t> sizes(gate.sizes().begin(), gate.sizes().end());
  sizes.back() = h.cols;
  require_tensor(op, "grad_y", grad_y, h.dtype);
  require_sizes(op, "grad_y", grad_y, {sizes.data(), sizes.size()});
  const int64_t none = 0;
  const Tensor dgate = empty_tensor(gate.sizes(), h.dtype);
  const Tensor dup = empty_tensor(h.up ? gate.sizes() : Sizes(&none, 1), h.dtype);
  glu_backward_into(h, act, as_rows(op, "grad_y", grad_y), dgate.mutable_data_ptr(),
                    h.up ? dup.mutable_data_ptr() : nullptr);
  return {dgate, dup};
}

// Requires a tensor that gradients of `x` can be written over.
void require_like(const char* op, const char* name, const Tensor& t, const Tensor& x, DType dtype) {
  require_tensor(op, name, t, dtype);
  require_sizes(op, name, t, x.sizes());
  require(t.is_contiguous(), op, name, " must be contiguous");
}

// The same without new memory: dgate goes into a tensor of the caller, dup takes grad_y's place.
void glu_backward_inplace(const Tensor& grad_y, const Tensor& gate, const Tensor& up, int64_t act,
                          const Tensor& dgate) {
  constexpr const char* op = "glu_backward_";
  const DeviceScope scope(gate);
  const Halves h = halves(op, gate, up, act);
  require_like(op, "grad_y", grad_y, gate, h.dtype);
  require_like(op, "dgate", dgate, gate, h.dtype);
  glu_backward_into(h, act, as_rows(op, "grad_y", grad_y), dgate.mutable_data_ptr(),
                    grad_y.mutable_data_ptr());
}

// act(x) alone.
Tensor activate(const Tensor& x, int64_t act) {
  constexpr const char* op = "activate";
  const DeviceScope scope(x);
  const Plain plain(op, x, act);
  const Tensor y = empty_tensor(x.sizes(), plain.dtype);
  GluParams p{};
  p.dtype = plain.dtype;
  p.act = static_cast<Activation>(act);
  p.cols = p.y_row = plain.rows.cols;
  p.gate = plain.rows.data();
  p.gate_row = plain.rows.stride;
  p.y = y.mutable_data_ptr();
  run_glu(p, plain.rows.rows);
  return y;
}

// dx takes grad_y's place.
void activate_backward_inplace(const Tensor& grad_y, const Tensor& x, int64_t act) {
  constexpr const char* op = "activate_backward_";
  const DeviceScope scope(x);
  const Plain plain(op, x, act);
  require_like(op, "grad_y", grad_y, x, plain.dtype);
  GluBackwardParams p{};
  p.dtype = plain.dtype;
  p.act = static_cast<Activation>(act);
  p.cols = p.grad_y_row = p.dgate_row = plain.rows.cols;
  p.gate = plain.rows.data();
  p.gate_row = plain.rows.stride;
  p.grad_y = p.dgate = grad_y.mutable_data_ptr();
  run_glu_backward(p, plain.rows.rows);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omniattn, OMNIATTN_DISPATCH_KEY, m) {
  OMNIATTN_IMPL(m, "glu", glu);
  m.impl("glu_backward", TORCH_BOX(&glu_backward));
  m.impl("glu_backward_", TORCH_BOX(&glu_backward_inplace));
  m.impl("activate", TORCH_BOX(&activate));
  m.impl("activate_backward_", TORCH_BOX(&activate_backward_inplace));
}
