// top_k: checks and allocation.
#include "ops/topk.h"

#include "ops/registry.h"

namespace omniattn::ops::topk {
namespace {

Tensor top_k(const Tensor& scores, int64_t k, const OptTensor& mask) {
  constexpr const char* op = "top_k";
  const DeviceScope scope(scores);
  const DType dtype = dtype_of(op, "scores", scores);
  const Rows rows = as_rows(op, "scores", scores, dtype);
  require(k >= 0 && k <= rows.cols, op, "k must be in [0, ", rows.cols, "], got k=", k);
  OptRows allowed;
  if (mask.has_value()) {
    require(is_here(*mask) && mask->scalar_type() == ScalarType::Bool, op, "mask must be bool on ",
            kDeviceName, ", got scalar type ", static_cast<int>(mask->scalar_type()));
    require_sizes(op, "mask", *mask, scores.sizes());
    allowed = as_rows(op, "mask", *mask);
  }
  const Tensor index =
      torch::stable::new_empty(scores, sizes_with_last(scores, k), ScalarType::Long);
  run(op,
      {.dtype = dtype,
       .n = rows.cols,
       .k = k,
       .scores = rows.data(),
       .mask = static_cast<const uint8_t*>(data_or_null(allowed)),
       .index = static_cast<int64_t*>(index.mutable_data_ptr()),
       .scores_stride = rows.stride,
       .mask_stride = stride_or_zero(allowed)},
      rows.rows);
  return index;
}

// Indices (..., k) int64 of the largest scores (..., n), stable, -1 where there are fewer.
const Registry registry([](Registry& ops) {
  ops.add<top_k>("top_k(Tensor scores, SymInt k, Tensor? mask) -> Tensor");
});

}  // namespace
}  // namespace omniattn::ops::topk
