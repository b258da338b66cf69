// Ops of torch, called through its dispatcher.
#pragma once

#include "ops/tensor.h"

namespace omniattn::ops {

// Disables autograd, which the ops that a kernel calls would enter again.
class NoGrad {
 public:
  NoGrad() : enabled_(aoti_torch_grad_mode_is_enabled()) {
    aoti_torch_grad_mode_set_enabled(false);
  }
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;
  ~NoGrad() { aoti_torch_grad_mode_set_enabled(enabled_); }

 private:
  bool enabled_;
};

// Arguments of an op of torch, then its results. A schema may have more arguments than are given,
// as in later releases of torch: they are 0, which is None, false and 0.
using TorchStack = std::array<StableIValue, 32>;

// Calls an op of torch. The stable ABI has no arguments of the type Scalar. Each tensor among the
// results must be taken from the stack.
template <class... Arguments>
TorchStack call_torch_op(const char* op, const char* overload, const Arguments&... arguments) {
  const NoGrad scope;
  TorchStack stack{torch::stable::detail::from(arguments)...};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION));
  return stack;
}
inline Tensor take_tensor(const TorchStack& stack, size_t result) {
  return torch::stable::detail::to<Tensor>(stack[result]);
}

// Calls an op that returns a tensor.
template <class... Arguments>
Tensor call_torch(const char* op, const char* overload, const Arguments&... arguments) {
  return take_tensor(call_torch_op(op, overload, arguments...), 0);
}

// The tensor that torch makes of None where a schema says Tensor.
inline Tensor undefined_tensor() {
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_uninitialized_tensor(&handle));
  return Tensor(handle);
}

// View of `count` entries of a dimension, from `first` on.
inline Tensor slice(Tensor t, int64_t dim, int64_t first, int64_t count) {
  return torch::stable::narrow(t, dim, first, count);
}

// `t`, or a copy of this dtype.
inline Tensor as_dtype(const Tensor& t, DType dtype) {
  return scalar_type(t) == scalar_type(dtype) ? t : torch::stable::to(t, scalar_type(dtype));
}

// c = a b, for matrices of one dtype. Sums and c are in the dtype of c, which may be the
// accumulator type.
inline void multiply(const Tensor& a, const Tensor& b, const Tensor& c) {
  const ScalarType type = scalar_type(c);
  if (scalar_type(a) == type) {
    call_torch("aten::mm", "out", a, b, c);
    return;
  }
#if defined(OMNIATTN_CUDA)
  call_torch("aten::mm", "dtype_out", a, b, type, c);
#else  // torch has no mixed products on the CPU
  call_torch("aten::mm", "out", torch::stable::to(a, type), torch::stable::to(b, type), c);
#endif
}
// c = a b, for batches of matrices of one dtype.
inline void multiply_batches(const Tensor& a, const Tensor& b, const Tensor& c) {
  call_torch("aten::bmm", "out", a, b, c);
}

}  // namespace omniattn::ops
