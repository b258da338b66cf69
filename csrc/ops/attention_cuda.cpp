// attention, attention_backward, attention_weights and attention_select on CUDA.
#include "kernels/attention/attention_cuda.h"

#include "ops/attention.h"
#include "ops/cuda.h"

namespace {

Tensor buffer(int64_t elements, DType dtype) {
  return empty_tensor({&elements, 1}, accumulator(dtype));
}

// A seed on the CPU is fixed when a graph is captured, one beside q is not.
void decode_seed(Call& call, const Tensor& seed) {
  if (!is_here(seed)) return read_seed(call.p.dropout, seed);
  call.kept.push_back(torch::stable::contiguous(seed));
  call.p.seed = static_cast<const int64_t*>(call.kept.back().const_data_ptr());
}

// Kernels read the rows of sequences: reading them here would wait for the GPU.
void decode_layout(const char* op, Call& call, LayoutKind kind, const Ints& code,
                   const Tensors& aux) {
  AttentionProblem& p = call.p;
  p.sequences.rows_q = p.tq;
  p.sequences.rows_k = p.tk;
  const auto integers = [&](const char* name, int64_t index) {
    const Tensor& t = side_tensor(op, aux, index);
    require_integers(op, name, t);
    call.kept.push_back(torch::stable::contiguous(torch::stable::to(t, ScalarType::Long)));
    return static_cast<const int64_t*>(call.kept.back().const_data_ptr());
  };
  const auto rows = [&](const char* name, int64_t index, int64_t count) {
    require_sizes(op, name, side_tensor(op, aux, index), {&count, 1});
    return integers(name, index);
  };
  if (kind == LayoutKind::paged) {
    const Tensor& table = side_tensor(op, aux, code[3]);
    require(table.dim() == 2 && table.size(0) == p.batch, op,
            "block_table must have shape (B, N) with B=", p.batch, ", got ", table.dim(),
            " dimensions");
    require(p.tk > 0 && table.size(1) <= kMaskParamLimit / p.tk, op,
            "pages must hold tokens, and those of a sequence less than 2^40, got page size ", p.tk,
            " and N=", table.size(1));
    p.pages = {integers("block_table", code[3]), table.size(1), p.tk};
    p.sequences.rows_k = call.kept[1].size(0);
    p.sequences.k = rows("lengths", code[3] + 1, p.batch);
    p.tk *= table.size(1);
    return;
  }
  if (kind == LayoutKind::cached) {
    p.sequences.k = rows("lengths", code[3], p.batch);
    return;
  }
  const Tensor& boundaries = side_tensor(op, aux, code[3]);
  require(boundaries.dim() == 1 && boundaries.size(0) >= 1, op,
          "cu_seqlens_q must have shape (N + 1,)");
  p.sequences.q = rows("cu_seqlens_q", code[3], boundaries.size(0));
  p.sequences.k = rows("cu_seqlens_k", code[3] + 1, boundaries.size(0));
  p.batch = boundaries.size(0) - 1;
  p.tq = code[1];
  p.tk = code[2];
}

// Points `relative` into the memory it returns.
Tensor expand_table(const char* op, AttentionProblem& p) {
  if (p.table.kind == TableKind::none || p.tk == 0) return buffer(0, p.dtype);
  const Tensor memory = buffer(attention_table_elements(p), p.dtype);
  require_launched(op, launch_attention_expand_table(p, memory.mutable_data_ptr(), stream()));
  p.relative = attention_relative_view(p, memory.const_data_ptr());
  return memory;
}

// Points k and v into the memory it returns, if they are paged.
Tensors gather_pages(const char* op, AttentionProblem& p) {
  if (p.pages.table == nullptr) return {};
  const auto gather = [&](const HeadView& from, int64_t width) {
    const int64_t sizes[] = {p.batch, p.tk, p.hkv, width};
    const Tensor rows = empty_tensor({sizes, 4}, p.dtype);
    require_launched(
        op, launch_attention_gather_pages(p, from, width, rows.mutable_data_ptr(), stream()));
    return rows;
  };
  const Tensors memory = {gather(p.k, p.d), gather(p.v, p.dv)};
  p.k = view_of(memory[0]);
  p.v = view_of(memory[1]);
  return memory;
}

void run_forward(AttentionForwardParams f, const Sequences&) {
  constexpr const char* op = "attention";
  const Tensors pages = gather_pages(op, f.problem);
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
  const int64_t rows = stat_rows(p), head_scale_parts = attention_head_scale_parts(p);
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

void run_weights(AttentionWeightsParams w) {
  constexpr const char* op = "attention_weights";
  const Tensor table = expand_table(op, w.problem);
  require_launched(op, launch_attention_weights(w, stream()));
}

void run_select(AttentionSelectParams x) {
  constexpr const char* op = "attention_select";
  const Tensor table = expand_table(op, x.problem);
  require_launched(op, launch_attention_select(x, stream()));
}

}  // namespace
