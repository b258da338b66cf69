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

void run_forward(AttentionForwardParams f) {
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
  const AttentionProblem& p = b.problem;
  b.splits = backward_splits(b);
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
}

}  // namespace
