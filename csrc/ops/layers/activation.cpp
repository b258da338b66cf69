// glu and activate; mlp is composed of activate.
#include "ops/layers/activation.h"

#include "kernels/activation/activation.h"
#include "ops/device.h"
#include "ops/registry.h"
#include "semantics/arith.h"

namespace omniattn::ops::activation {
namespace {

// Checked arguments of forward and backward: rows of `cols` columns of the gate and of up. `up` is
// the right half of the gate's rows if they are packed, or null.
struct Problem {
  const char* op;
  DType dtype;
  Rows gate;
  OptRows up_rows;
  Activation act;
  int64_t cols;
  Clamp clamp{};
  const void* up = nullptr;
  int64_t up_stride = 0;

  // Activation of x alone, without a product.
  Problem(const char* op_, const char* name, const Tensor& x, int64_t act_)
      : op(op_),
        dtype(dtype_of(op, name, x)),
        gate(as_rows(op, name, x, dtype)),
        act(static_cast<Activation>(act_)),
        cols(gate.cols) {
    require(act_ >= 0 && act_ < kActivationCount, op, "act must be in [0, ", kActivationCount,
            "), got act=", act_);
  }

  Problem(const char* op_, const Gate& in, const GluOptions& options)
      : Problem(op_, "gate", in.gate, options.act) {
    const Floats& given = options.clamp;
    require(given.empty() || (given.size() == 2 && given[0] > 0 && given[1] > 0), op,
            "clamp must hold alpha > 0 and limit > 0 or nothing, got ", given.size(), " numbers");
    if (!given.empty()) clamp = {.alpha = given[0], .limit = given[1]};
    if (in.up.has_value()) {
      up_rows = as_rows(op, "up", *in.up, dtype, in.gate.sizes());
      up = up_rows->data();
      up_stride = up_rows->stride;
    } else {
      require(cols % 2 == 0, op, "packed gate must have an even last size, got ", cols);
      cols /= 2;
      up = static_cast<const char*>(gate.data()) + cols * size_of(dtype);
      up_stride = gate.stride;
    }
  }
};

// On the CPU a long row is split into several items.
template <class Params>
void run_blocks(const Params& p, int64_t rows, void (*kernel)(const Params&, int64_t, int64_t)) {
  run_items(p, rows * ceil_div(p.cols, kGluBlock), smaller(p.cols, kGluBlock), kernel);
}

// y: (rows, cols) contiguous.
void forward(const Problem& p, const Tensor& y) {
  const GluParams params{.dtype = p.dtype,
                         .act = p.act,
                         .clamp = p.clamp,
                         .cols = p.cols,
                         .gate = p.gate.data(),
                         .up = p.up,
                         .y = y.mutable_data_ptr(),
                         .gate_row = p.gate.stride,
                         .up_row = p.up_stride,
                         .y_row = p.cols};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_glu(params, p.gate.rows, stream()));
  } else {
    run_blocks(params, p.gate.rows, activation_kernels(params.dtype).glu);
  }
}

// dgate and dup are contiguous. dup is null without up, and for a packed gate, where both gradients
// lie side by side.
void backward(const Problem& p, const Rows& grad_y, void* dgate, void* dup) {
  if (p.up != nullptr && !p.up_rows.has_value()) {
    dup = static_cast<char*>(dgate) + p.cols * size_of(p.dtype);
  }
  const GluBackwardParams params{.dtype = p.dtype,
                                 .act = p.act,
                                 .clamp = p.clamp,
                                 .cols = p.cols,
                                 .grad_y = grad_y.data(),
                                 .gate = p.gate.data(),
                                 .up = p.up,
                                 .dgate = dgate,
                                 .dup = dup,
                                 .grad_y_row = grad_y.stride,
                                 .gate_row = p.gate.stride,
                                 .up_row = p.up_stride,
                                 .dgate_row = p.gate.cols,
                                 .dup_row = p.gate.cols};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_glu_backward(params, p.gate.rows, stream()));
  } else {
    run_blocks(params, p.gate.rows, activation_kernels(params.dtype).glu_backward);
  }
}

}  // namespace

Tensor glu(const OpCall& call, const Gate& in, const GluOptions& options) {
  const DeviceScope scope(in.gate);
  const Problem p(call.op, in, options);
  const Tensor y = empty_tensor(sizes_with_last(in.gate, p.cols), p.dtype);
  forward(p, y);
  return y;
}

namespace {

OMNIATTN_FIELDS(Incoming, Tensor grad_y);
// A packed gate has one packed gradient; dup is then empty.
OMNIATTN_FIELDS(Gradients, Tensor dgate; Output dup);

Gradients glu_backward(const OpCall& call, const Incoming& grads, const Gate& in,
                       const GluOptions& options) {
  const DeviceScope scope(in.gate);
  const Problem p(call.op, in, options);
  const Rows rows =
      as_rows(p.op, "grad_y", grads.grad_y, p.dtype, sizes_with_last(in.gate, p.cols));
  const Tensor dgate = empty_tensor(in.gate.sizes(), p.dtype);
  const Output dup(in.up.has_value(), in.gate.sizes(), p.dtype);
  backward(p, rows, dgate.mutable_data_ptr(), dup.data());
  return {dgate, dup};
}

}  // namespace

void glu_backward_inplace(const OpCall& call, const InPlace& grads, const GateAndUp& in,
                          const GluOptions& options, const GateGradient& gradient) {
  const auto& [gate, up] = in;
  const Tensor &grad_y = grads.grad_y, &dgate = gradient.dgate;
  const DeviceScope scope(gate);
  const Problem p(call.op, {gate, up}, options);
  require_dense(p.op, "grad_y", grad_y, p.dtype, gate.sizes());
  require_dense(p.op, "dgate", dgate, p.dtype, gate.sizes());
  backward(p, as_rows(p.op, "grad_y", grad_y), dgate.mutable_data_ptr(), grad_y.mutable_data_ptr());
}

Tensor activate(const OpCall& call, const Activated& in) {
  const DeviceScope scope(in.x);
  const Problem p(call.op, "x", in.x, in.act);
  const Tensor y = empty_tensor(in.x.sizes(), p.dtype);
  forward(p, y);
  return y;
}

void activate_backward_inplace(const OpCall& call, const InPlace& grads, const Activated& in) {
  const Tensor& grad_y = grads.grad_y;
  const DeviceScope scope(in.x);
  const Problem p(call.op, "x", in.x, in.act);
  require_dense(p.op, "grad_y", grad_y, p.dtype, in.x.sizes());
  backward(p, as_rows(p.op, "grad_y", grad_y), grad_y.mutable_data_ptr(), nullptr);
}

namespace {

// glu: y = act(gate) * up, or its clamped form, over (..., F), or over a packed gate (..., 2F)
// without up. activate: act(x). The in-place backwards write dup, or dx, over grad_y.
const Registry registry([](Registry& ops) {
  ops.name("activate", {{"mlp"}});
  ops.add<glu>("glu", differentiable);
  ops.add<glu_backward>("glu_backward");
  ops.add<glu_backward_inplace>("glu_backward_");
  ops.add<activate>("activate");
  ops.add<activate_backward_inplace>("activate_backward_");
});

}  // namespace
}  // namespace omniattn::ops::activation
