// attention and attention_backward on CUDA.
#include "kernels/attention/attention_cuda.h"

#include "ops/attention.h"
#include "ops/cuda.h"

namespace {

Tensor buffer(int64_t elements, DType dtype) {
  return empty_tensor({&elements, 1}, accumulator(dtype));
}

// Points `relative` into the memory it returns.
Tensor expand_table(const char* op, AttentionProblem& p) {
  if (p.table.kind == TableKind::none || p.tk == 0) return buffer(0, p.dtype);
  const Tensor memory = buffer(attention_table_elements(p), p.dtype);
  require_launched(op, launch_attention_expand_table(p, memory.mutable_data_ptr(), stream()));
  p.relative = attention_relative_view(p, memory.const_data_ptr());
  return memory;
}

void run_forward(AttentionForwardParams f, const Sequences&) {
  constexpr const char* op = "attention";
  const Tensor table = expand_table(op, f.problem);
  const AttentionProblem& p = f.problem;
  Status status;
  if (takes_split_path(p)) {
    const Tensor workspace = buffer(attention_decode_workspace(p), p.dtype);
    f.workspace = workspace.mutable_data_ptr();
    status = launch_attention_decode(f, stream());
  } else if (takes_mma_path(p)) {
    status = launch_attention_mma(f, stream());
  } else {
    status = launch_attention(f, stream());
  }
  require_launched(op, status);
}

void run_backward(AttentionBackwardParams b, const Sequences&) {
  constexpr const char* op = "attention_backward";
  const Tensor table = expand_table(op, b.problem);
  const AttentionProblem& p = b.problem;
  Tensors kept;
  const auto part = [&](const void* wanted, int64_t elements) -> void* {
    if (wanted == nullptr) return nullptr;
    kept.push_back(buffer(elements, p.dtype));
    return kept.back().mutable_data_ptr();
  };
  const auto run = [&](Status status) { require_launched(op, status); };
  const int64_t rows = query_rows(p), head_scale_parts = attention_head_scale_parts(p);
  b.workspace = part(b.lse, rows);
  b.part_sinks = part(b.grad_sinks, rows);
  b.part_head_scale = part(b.grad_head_scale, head_scale_parts * rows);
  run(launch_attention_delta(b, stream()));
  run(takes_mma_path(b) ? launch_attention_gradients_mma(b, stream())
                        : launch_attention_gradients(b, stream()));
  if (b.grad_sinks != nullptr) {
    run(launch_attention_sum_rows(p, b.part_sinks, 1, b.grad_sinks, stream()));
  }
  if (b.grad_head_scale != nullptr) {
    run(launch_attention_sum_rows(p, b.part_head_scale, head_scale_parts, b.grad_head_scale,
                                  stream()));
  }
  if (p.tk == 0) return;
  if (b.grad_bias != nullptr) run(launch_attention_bias_gradient(b, stream()));
  if (b.grad_table != nullptr) {
    b.part_relative = part(b.grad_table, attention_table_parts(p));
    run(launch_attention_table_gradient(b, stream()));
  }
}

}  // namespace
