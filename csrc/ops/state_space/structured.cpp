// vandermonde and cauchy.
#include "kernels/structured/cauchy.h"
#include "kernels/structured/vandermonde.h"
#include "ops/device.h"
#include "ops/registry.h"
#include "ops/stage.h"

namespace omniattn::ops::structured {
namespace {

// Tensors (H, N, 2) of complex pairs: the N terms of each row.
struct Terms {
  const char* op;
  DType dtype;
  int64_t rows, terms;
  Tensor first, second;

  Terms(const char* op_, const char* a_name, const Tensor& a, const char* b_name, const Tensor& b)
      : op(op_), dtype(dtype_of(op, a_name, a)) {
    require(size_of(dtype) >= 4, op, a_name, " must be float64 or float32, got ", name_of(dtype));
    require(a.dim() == 3 && a.size(2) == 2, op, a_name, " must have shape (H, N, 2), got ",
            Shape{a.sizes().data(), a.sizes().size()});
    rows = a.size(0), terms = a.size(1);
    first = dense(a_name, a, a.sizes());
    second = dense(b_name, b, a.sizes());
  }
  Tensor dense(const char* name, const Tensor& t, Sizes sizes) const {
    require_tensor(op, name, t, dtype);
    require_sizes(op, name, t, sizes);
    return as_dense(t);
  }
  Tensor gradient() const { return empty_tensor({rows, terms, 2}, dtype); }
  // Zero gradients for a call without outputs; the kernel could compute 0 * inf.
  Tensor no_gradient() const {
    Tensor zeros = gradient();
    torch::stable::fill_(zeros, 0);
    return zeros;
  }

  // Runs a kernel over the rows, on the CPU.
  template <class Params, class Kernel>
  void run(const Params& params, int64_t bytes, const Kernel& kernel) const {
    run_items(params, rows, bytes, kernel);
  }
};

constexpr int64_t kLongest = (int64_t{1} << 31) - 1;

Vandermonde vandermonde_of(const Terms& p, int64_t length) {
  return {.dtype = p.dtype,
          .rows = p.rows,
          .terms = p.terms,
          .length = length,
          .c = p.first.const_data_ptr(),
          .x = p.second.const_data_ptr()};
}

// c, x, v, w (H, N, 2) and z (L, 2) of pairs, y (H, L) or (H, L, 2), in fp32 or fp64.
OMNIATTN_FIELDS(Powers, Tensor c, x);
OMNIATTN_FIELDS(Length, SymInt length);
OMNIATTN_FIELDS(Incoming, Tensor grad_y);
OMNIATTN_FIELDS(PowerGradients, Tensor dc, dx);

Tensor vandermonde(const OpCall& call, const Powers& in, const Length& given) {
  const int64_t length = given.length;
  const DeviceScope scope(in.c);
  const Terms p(call.op, "c", in.c, "x", in.x);
  require(length >= 0 && length <= kLongest, p.op, "length must be in [0, ", kLongest,
          "], got length=", length);
  const Tensor y = empty_tensor({p.rows, length}, p.dtype);
  const VandermondeParams params{.sums = vandermonde_of(p, length), .y = y.mutable_data_ptr()};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_vandermonde(params, stream()));
  } else {
    const VandermondeKernels& kernels = vandermonde_kernels(p.dtype);
    p.run(params, kernels.bytes(params.sums), kernels.forward);
  }
  return y;
}

PowerGradients vandermonde_backward(const OpCall& call, const Powers& in, const Incoming& grads) {
  const Tensor& grad_y = grads.grad_y;
  const DeviceScope scope(in.c);
  const Terms p(call.op, "c", in.c, "x", in.x);
  require(grad_y.dim() == 2, p.op, "grad_y must have 2 dimensions, got ", grad_y.dim());
  const Tensor g = p.dense("grad_y", grad_y, {p.rows, grad_y.size(1)});
  if (g.size(1) == 0) return {p.no_gradient(), p.no_gradient()};
  const Tensor dc = p.gradient(), dx = p.gradient();
  const VandermondeBackwardParams params{.sums = vandermonde_of(p, g.size(1)),
                                         .grad_y = g.const_data_ptr(),
                                         .dc = dc.mutable_data_ptr(),
                                         .dx = dx.mutable_data_ptr()};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_vandermonde_backward(params, stream()));
  } else {
    const VandermondeKernels& kernels = vandermonde_kernels(p.dtype);
    p.run(params, kernels.bytes(params.sums), kernels.backward);
  }
  return {dc, dx};
}

// Checks z (L, 2), which all rows share.
Tensor points(const Terms& p, const Tensor& z) {
  require(z.dim() == 2, p.op, "z must have 2 dimensions, got ", z.dim());
  return p.dense("z", z, {z.size(0), 2});
}
Cauchy cauchy_of(const Terms& p, const Tensor& z) {
  return {.dtype = p.dtype,
          .rows = p.rows,
          .terms = p.terms,
          .length = z.size(0),
          .v = p.first.const_data_ptr(),
          .w = p.second.const_data_ptr(),
          .z = z.const_data_ptr()};
}

OMNIATTN_FIELDS(Poles, Tensor v, z, w);
OMNIATTN_FIELDS(PoleGradients, Tensor dv, dw);

Tensor cauchy(const OpCall& call, const Poles& in) {
  const DeviceScope scope(in.v);
  const Terms p(call.op, "v", in.v, "w", in.w);
  const Tensor at = points(p, in.z);
  const Tensor y = empty_tensor({p.rows, at.size(0), 2}, p.dtype);
  const CauchyParams params{.sums = cauchy_of(p, at), .y = y.mutable_data_ptr()};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_cauchy(params, stream()));
  } else {
    const CauchyKernels& kernels = cauchy_kernels(p.dtype);
    p.run(params, kernels.bytes(params.sums), kernels.forward);
  }
  return y;
}

PoleGradients cauchy_backward(const OpCall& call, const Poles& in, const Incoming& grads) {
  const DeviceScope scope(in.v);
  const Terms p(call.op, "v", in.v, "w", in.w);
  const Tensor at = points(p, in.z);
  const Tensor g = p.dense("grad_y", grads.grad_y, {p.rows, at.size(0), 2});
  if (at.size(0) == 0) return {p.no_gradient(), p.no_gradient()};
  const Tensor dv = p.gradient(), dw = p.gradient();
  const CauchyBackwardParams params{.sums = cauchy_of(p, at),
                                    .grad_y = g.const_data_ptr(),
                                    .dv = dv.mutable_data_ptr(),
                                    .dw = dw.mutable_data_ptr()};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_cauchy_backward(params, stream()));
  } else {
    const CauchyKernels& kernels = cauchy_kernels(p.dtype);
    p.run(params, kernels.bytes(params.sums), kernels.backward);
  }
  return {dv, dw};
}

const Registry registry([](Registry& ops) {
  ops.add<vandermonde>("vandermonde", differentiable);
  ops.add<vandermonde_backward>("vandermonde_backward");
  ops.add<cauchy>("cauchy", differentiable);
  ops.add<cauchy_backward>("cauchy_backward");
});

}  // namespace
}  // namespace omniattn::ops::structured
