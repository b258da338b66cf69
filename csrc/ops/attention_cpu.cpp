// attention and attention_backward on the CPU: choice of kernels, memory, threads.
#include "ops/attention.h"

#include "ops/parallel.h"

namespace {

Tensor buffer(int64_t elements, DType dtype) {
  return empty_tensor({&elements, 1}, accumulator(dtype));
}

int64_t thread_count(const AttentionProblem& p, int64_t items) {
  // Small problems stay on this thread: opening the pool costs about 2 us, some 100 kFLOP.
  const bool small = p.batch * p.hq * p.tq * p.tk * (p.d + p.dv) < 50'000;
  return small ? 1 : std::min<int64_t>(items, torch::stable::get_num_threads());
}

// Memory of which each thread has a part of its own.
class PerThread {
 public:
  PerThread(int64_t threads, int64_t elements, DType dtype)
      : buffer_(buffer(threads * elements, dtype)),
        base_(static_cast<char*>(buffer_.mutable_data_ptr())),
        bytes_(elements * size_of(accumulator(dtype))) {}
  void* of(int64_t thread) const { return base_ + thread * bytes_; }

 private:
  Tensor buffer_;
  char* base_;
  int64_t bytes_;
};

// Items of a stage over the threads, each with a scratch of its own, and with a workspace of its
// own where `workspace_elements` asks for one.
template <class Params, class Kernel>
void run_stage(Kernel kernel, const Params& params, int64_t items, int64_t scratch_elements,
               int64_t workspace_elements = 0) {
  if (items == 0) return;
  const AttentionProblem& p = params.problem;
  const int64_t threads = thread_count(p, items);
  const PerThread scratch(threads, scratch_elements, p.dtype);
  const PerThread workspace(threads, workspace_elements, p.dtype);
  parallel_queue(items, threads, [&](int64_t thread, int64_t item) {
    Params mine = params;
    mine.scratch = scratch.of(thread);
    if (workspace_elements > 0) mine.workspace = workspace.of(thread);
    kernel(mine, item, item + 1);
  });
}

// Whether whole kv heads, each with its own workspace, keep the threads busy.
bool has_heads_enough(const AttentionProblem& p) {
  return kv_head_items(p) >= 4 * thread_count(p, kv_head_items(p));
}

// ---- the table's term of all pairs --------------------------------------------------------------

int64_t plane_elements(const AttentionProblem& p) {
  const int64_t keys = round_up(p.tk, kKeyPanel) + kKeyPanel;
  return is_relative(p.table.kind) ? p.tq + keys : p.tq * keys;
}

// f(element of a plane, i, k) for all pairs, where the term is relative one for each distance.
template <class F>
void for_plane(const AttentionProblem& p, const F& f) {
  if (is_relative(p.table.kind)) {
    for (int64_t e = 0; e < p.tq + p.tk - 1; ++e) f(e, int64_t{0}, e - (p.tk - 1));
  } else {
    for (int64_t q = 0; q < p.tq; ++q) {
      for (int64_t k = 0; k < p.tk; ++k) f(p.relative.origin + q * p.relative.stride_q + k, q, k);
    }
  }
}

// Points `relative` into the memory it returns.
Tensor expand_table(AttentionProblem& p) {
  if (p.table.kind == TableKind::none) return buffer(0, p.dtype);
  const int64_t plane = plane_elements(p), batches = p.table.stride_b == 0 ? 1 : p.batch;
  const Tensor memory = buffer(batches * p.hq * plane, p.dtype);
  p.relative.data = memory.const_data_ptr();
  p.relative.stride_h = plane;
  p.relative.stride_b = batches == 1 ? 0 : p.hq * plane;
  // Element of a relative term: k - i + Tk - 1 with i = q + Tk - Tq.
  p.relative.origin = is_relative(p.table.kind) ? p.tq - 1 : 0;
  p.relative.stride_q = is_relative(p.table.kind) ? -1 : plane / p.tq;
  const auto expand = [&](auto type) {
    using A = decltype(type);
    auto* const out = static_cast<A*>(memory.mutable_data_ptr());
    const auto* const table = static_cast<const A*>(p.table.data);
    for_plane(p, [&](int64_t e, int64_t i, int64_t k) {
      const int64_t row = table_row(p.table, i, k) * p.hq;
      const double factor = table_factor(p.table, i, k) * kLog2E;
      for (int64_t b = 0; b < batches; ++b) {
        for (int64_t h = 0; h < p.hq; ++h) {
          out[(b * p.hq + h) * plane + e] =
              static_cast<A>(table[b * p.table.stride_b + row + h] * factor);
        }
      }
    });
  };
  p.dtype == DType::f64 ? expand(double{}) : expand(float{});
  return memory;
}

// Adds the planes of part_relative up, in order, to the gradient of the table.
void gather_table(const AttentionBackwardParams& b) {
  const AttentionProblem& p = b.problem;
  const auto gather = [&](auto type) {
    using A = decltype(type);
    const auto* const parts = static_cast<const A*>(b.part_relative);
    auto* const grad = static_cast<A*>(b.grad_table);
    std::vector<double> sums(
        static_cast<size_t>((p.table.stride_b == 0 ? 1 : p.batch) * p.table.rows * p.hq));
    for (int64_t split = 0; split < b.splits; ++split) {
      for (int64_t i = 0; i < p.batch; ++i) {
        for (int64_t h = 0; h < p.hq; ++h) {
          const A* const part = parts + ((split * p.batch + i) * p.hq + h) * b.part_relative_plane;
          for_plane(p, [&](int64_t e, int64_t q, int64_t k) {
            const int64_t at = i * p.table.stride_b + table_row(p.table, q, k) * p.hq + h;
            sums[static_cast<size_t>(at)] += table_factor(p.table, q, k) * part[e];
          });
        }
      }
    }
    for (size_t n = 0; n < sums.size(); ++n) grad[n] = static_cast<A>(sums[n]);
  };
  p.dtype == DType::f64 ? gather(double{}) : gather(float{});
}

// Adds parts (B, Hq, query blocks) up, in order, to a gradient (Hq,).
void gather_heads(const AttentionProblem& p, const void* parts, void* grad) {
  const int64_t blocks = query_block_count(p);
  const auto gather = [&](auto type) {
    using A = decltype(type);
    for (int64_t h = 0; h < p.hq; ++h) {
      double sum = 0;
      for (int64_t n = 0; n < p.batch * blocks; ++n) {
        sum += static_cast<const A*>(parts)[(n / blocks * p.hq + h) * blocks + n % blocks];
      }
      static_cast<A*>(grad)[h] = static_cast<A>(sum);
    }
  };
  p.dtype == DType::f64 ? gather(double{}) : gather(float{});
}

// ---- entries ------------------------------------------------------------------------------------

void run_forward(AttentionForwardParams f) {
  const Tensor table = expand_table(f.problem);
  const AttentionProblem& p = f.problem;
  if (takes_decode_path(p)) {
    const Tensor workspace = buffer(decode_workspace_elements(p), p.dtype);
    f.workspace = workspace.mutable_data_ptr();
    const auto& kernels = attention_decode_kernels();
    run_stage(kernels.decode, f, decode_items(p), decode_scratch_elements(p));
    kernels.merge(f, 0, merge_items(p));
  } else if (const auto& kernels = attention_forward_kernels(); has_heads_enough(p)) {
    run_stage(kernels.forward_heads, f, kv_head_items(p), forward_scratch_elements(p),
              packed_head_elements(p));
  } else {
    const Tensor workspace = buffer(forward_workspace_elements(p), p.dtype);
    f.workspace = workspace.mutable_data_ptr();
    run_stage(kernels.pack, f, pack_items(p), 0);
    run_stage(kernels.forward, f, forward_items(p), forward_scratch_elements(p));
  }
}

void run_backward(AttentionBackwardParams b) {
  const Tensor table = expand_table(b.problem);
  const AttentionProblem& p = b.problem;
  b.splits = backward_splits(b);
  Tensors parts;
  const auto part = [&](int64_t elements) {
    parts.push_back(buffer(elements, p.dtype));
    return parts.back().mutable_data_ptr();
  };
  if (b.grad_table != nullptr) {
    b.part_relative_plane = plane_elements(p);
    b.part_relative = part(b.splits * p.batch * p.hq * b.part_relative_plane);
    fill(parts.back(), 0);
  }
  if (b.grad_sinks != nullptr) b.part_sinks = part(forward_items(p));
  if (b.grad_head_scale != nullptr) b.part_head_scale = part(forward_items(p));

  const auto& kernels = attention_backward_kernels();
  const int64_t scratch = backward_scratch_elements(b);
  if (b.splits == 1 && backward_owners(b) == kv_head_items(p) && has_heads_enough(p)) {
    run_stage(kernels.backward_heads, b, kv_head_items(p), scratch,
              backward_workspace_elements(b, group_size(p) * p.tq));
  } else {
    const Tensor workspace = buffer(backward_workspace_elements(b, query_rows(p)), p.dtype);
    b.workspace = workspace.mutable_data_ptr();
    run_stage(kernels.prepare, b, forward_items(p), 0);
    run_stage(kernels.backward, b, backward_items(b), scratch);
    run_stage(kernels.finish, b, forward_items(p), 0);
  }
  if (b.grad_table != nullptr) gather_table(b);
  if (b.grad_sinks != nullptr) gather_heads(p, b.part_sinks, b.grad_sinks);
  if (b.grad_head_scale != nullptr) gather_heads(p, b.part_head_scale, b.grad_head_scale);
}

}  // namespace
