// Checked inputs (B, T, H) and (B, T, H, D) of kernels that read them by their strides.
#pragma once

#include <vector>

#include "kernels/recurrence/recurrence.h"
#include "ops/tensor.h"

namespace omniattn::ops {

// A view of a tensor of the given type and sizes. D must have unit stride in kernels: `copies`
// keeps the copy of a tensor in which it has another one.
inline StepView step_view(const char* op, const char* name, const Tensor& given, DType type,
                          Sizes want, std::vector<Tensor>& copies) {
  require_tensor(op, name, given, type);
  require_sizes(op, name, given, want);
  const Tensor& t = given.dim() == 4 ? copies.emplace_back(with_unit_last_stride(given)) : given;
  return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

}  // namespace omniattn::ops
