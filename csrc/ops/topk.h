// top_k: checks and allocation for either device. Included by topk_cpu.cpp and topk_cuda.cpp, each
// of which defines run.
#pragma once

#include "kernels/topk/topk.h"

#include <vector>

#include "ops/tensor.h"

namespace {

using namespace omniattn;
using namespace omniattn::ops;

void run(const TopKParams& p, int64_t rows);

Tensor top_k(const Tensor& scores, int64_t k, const OptTensor& mask) {
  constexpr const char* op = "top_k";
  const DeviceScope scope(scores);
  const DType dtype = dtype_of(op, "scores", scores);
  require_tensor(op, "scores", scores, dtype);
  const Rows rows = as_rows(op, "scores", scores);
  require(k >= 0 && k <= rows.cols, op, "k must be in [0, ", rows.cols, "], got k=", k);
  std::optional<Rows> allowed;
  if (mask.has_value()) {
    require(is_here(*mask) && mask->scalar_type() == ScalarType::Bool, op, "mask must be bool on ",
            kDeviceName, ", got scalar type ", static_cast<int>(mask->scalar_type()));
    require_sizes(op, "mask", *mask, scores.sizes());
    allowed = as_rows(op, "mask", *mask);
  }
  std::vector<int64_t> sizes(scores.sizes().begin(), scores.sizes().end());
  sizes.back() = k;
  const Tensor index =
      torch::stable::new_empty(scores, {sizes.data(), sizes.size()}, ScalarType::Long);
  const TopKParams p{.dtype = dtype,
                     .n = rows.cols,
                     .k = k,
                     .scores = rows.data(),
                     .mask = allowed ? static_cast<const uint8_t*>(allowed->data()) : nullptr,
                     .index = static_cast<int64_t*>(index.mutable_data_ptr()),
                     .scores_stride = rows.stride,
                     .mask_stride = allowed ? allowed->stride : 0};
  run(p, rows.rows);
  return index;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(omniattn, OMNIATTN_DISPATCH_KEY, m) {
  m.impl("top_k", TORCH_BOX(&top_k));
}
