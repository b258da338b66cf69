// top_k: checks, allocation, and the split over threads.
#include "kernels/topk/topk.h"

#include "ops/device.h"
#include "ops/registry.h"

namespace omniattn::ops::topk {
namespace {

// Runs shards of rows, each with its own memory.
void run_cpu(const TopKParams& p, int64_t rows) {
  const int64_t work = rows * (p.n + 64 * p.k);
  const int64_t shards = std::max<int64_t>(
      1, std::min({rows, work / kTaskElements, int64_t{torch::stable::get_num_threads()}}));
  const int64_t elements = top_k_scratch(p.n);
  const DType dtype = accumulator(p.dtype);
  const Tensor all = scratch(shards * elements, dtype);
  char* const memory = static_cast<char*>(all.mutable_data_ptr());
  parallel_shards(rows, shards, [&](int64_t s, int64_t begin, int64_t end) {
    topk_kernels(p.dtype).top_k(p, memory + s * elements * size_of(dtype), begin, end);
  });
}

OMNIATTN_FIELDS(Arguments, Tensor scores; SymInt k; OptTensor mask);

Tensor top_k(const OpCall& call, const Arguments& in) {
  const char* const op = call.op;
  const auto& [scores, k, mask] = in;
  const DeviceScope scope(scores);
  const DType dtype = dtype_of(op, "scores", scores);
  const Rows rows = as_rows(op, "scores", scores, dtype);
  require(k >= 0 && k <= rows.cols, op, "k must be in [0, ", rows.cols, "], got k=", k);
  OptRows allowed;
  if (mask.has_value()) {
    require_tensor(op, "mask", *mask, ScalarType::Bool);
    require_sizes(op, "mask", *mask, scores.sizes());
    allowed = as_rows(op, "mask", *mask);
  }
  const Tensor index =
      torch::stable::new_empty(scores, sizes_with_last(scores, k), ScalarType::Long);
  const TopKParams params{.dtype = dtype,
                          .n = rows.cols,
                          .k = k,
                          .scores = rows.data(),
                          .mask = static_cast<const uint8_t*>(data_or_null(allowed)),
                          .index = static_cast<int64_t*>(index.mutable_data_ptr()),
                          .scores_stride = rows.stride,
                          .mask_stride = stride_or_zero(allowed)};
  if constexpr (kOnCuda) {
    require_launched(op, launch_top_k(params, rows.rows, stream()));
  } else {
    run_cpu(params, rows.rows);
  }
  return index;
}

// Indices (..., k) int64 of the largest scores (..., n), stable; -1 if there are fewer than k.
const Registry registry([](Registry& ops) { ops.add<top_k>("top_k"); });

}  // namespace
}  // namespace omniattn::ops::topk
