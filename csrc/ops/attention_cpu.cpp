// attention, attention_backward, attention_weights and attention_select on the CPU: choice of
// kernels, memory, threads.
#include <algorithm>
#include <span>
#include <type_traits>
#include <utility>

#include "kernels/attention/attention_terms.h"
#include "ops/attention.h"
#include "ops/parallel.h"
#include "ops/path.h"
#include "ops/stage.h"
#include "runtime/denormals.h"

namespace omniattn::ops::attention {
namespace {

Tensor buffer(int64_t elements, DType dtype) {
  return empty_tensor({elements}, accumulator(dtype));
}

template <class Problems>
int64_t thread_count(const Problems& problems, int64_t items) {
  // Small problems stay on this thread: opening the pool costs about 2 us, some 100 kFLOP.
  int64_t work = 0;
  for (const auto& x : problems) {
    const AttentionProblem& p = x.problem;
    work += p.batch * p.hq * p.tq * p.tk * (p.d + p.dv);
  }
  return work < 50'000 ? 1 : std::min<int64_t>(items, torch::stable::get_num_threads());
}

// f(problem) added up, and its largest value.
template <class Problems, class F>
int64_t total(const Problems& problems, const F& f) {
  int64_t sum = 0;
  for (const auto& x : problems) sum += f(x);
  return sum;
}
template <class Problems, class F>
int64_t largest(const Problems& problems, const F& f) {
  int64_t found = 0;
  for (const auto& x : problems) found = std::max(found, f(x));
  return found;
}

// Gives each problem its own part of one workspace.
template <class Params, class F>
Tensor share_workspace(std::span<Params> problems, const F& elements) {
  const DType dtype = problems.front().problem.dtype;
  const Tensor memory = buffer(total(problems, elements), dtype);
  char* next = static_cast<char*>(memory.mutable_data_ptr());
  for (Params& x : problems) {
    x.workspace = next;
    next += elements(x) * size_of(accumulator(dtype));
  }
  return memory;
}

// Items of all problems over the threads they are worth. Kernels flush denormals.
template <class Params, class Items>
void run(AttentionKernel<Params> kernel, std::type_identity_t<std::span<const Params>> problems,
         const Items& items, int64_t scratch_elements) {
  const DType dtype = accumulator(problems.front().problem.dtype);
  const ThreadMemory memory(thread_count(problems, total(problems, items)),
                            scratch_elements * size_of(dtype));
  run_stage(problems, items, memory,
            [kernel](const Params& x, void* scratch, int64_t begin, int64_t end) {
              const FlushDenormals flush;
              kernel(x, scratch, begin, end);
            });
}

// The problems of a call, of which a path may take some.
struct Load {
  int64_t heads;    // items that have whole heads for themselves
  int64_t threads;  // that they are worth
};
template <class Problems, class F>
Load load_of(const Problems& problems, const F& heads) {
  const int64_t items = total(problems, heads);
  return {items, thread_count(problems, items)};
}
// Whether whole heads, each with its own workspace, keep the threads busy.
bool has_heads_enough(const Load& load) { return load.heads >= 4 * load.threads; }

// Runs each problem by the first path that takes it.
template <class Table, class Params, class F>
void run_paths(const Table& table, std::span<Params> problems, const F& heads) {
  for (auto path = table.begin(); !problems.empty(); ++path) {
    const Load load = load_of(problems, heads);
    const auto rest = std::stable_partition(problems.begin(), problems.end(),
                                            [&](const Params& x) { return path->takes(x, load); });
    const auto taken = static_cast<size_t>(rest - problems.begin());
    if (taken == 0) continue;
    table.report(*path);
    path->run(problems.first(taken));
    problems = problems.subspan(taken);
  }
}

// ---- sequences ----------------------------------------------------------------------------------

template <class P>
P* moved(P* data, int64_t elements, int64_t size) {
  using Byte = std::conditional_t<std::is_const_v<P>, const char, char>;
  return data == nullptr ? nullptr : static_cast<Byte*>(data) + elements * size;
}

template <class View>
void move_rows(View& x, const Sequence& s, int64_t row, int64_t size) {
  x.data = moved(x.data, s.row * x.stride_b + row * x.stride_t, size);
}

MaskRule rule_of(MaskRule rule, int64_t b) {
  switch (mask_side_tensor(rule.kind)) {
    case SideTensor::per_score:
      rule.side = moved(rule.side, b * rule.stride_b, 1);
      break;
    case SideTensor::blocks:
      rule.side = moved(rule.side, b * rule.stride_b, sizeof(int32_t));
      break;
    default:
      rule.side = moved(rule.side, b * rule.stride_b, sizeof(int64_t));
      rule.second = moved(rule.second, b * rule.second_stride_b, sizeof(int64_t));
  }
  return rule;
}

// Copies the pages of a sequence into contiguous keys and values, for kernels that pack them
// anyway.
void gather_pages(AttentionProblem& p, Tensors& memory) {
  const auto gather = [&](HeadView& x, int64_t width) {
    const int64_t sizes[] = {p.tk, p.hkv, width};
    memory.push_back(empty_tensor({sizes, 3}, p.dtype));
    void* const to = memory.back().mutable_data_ptr();
    parallel_ranges(p.tk, grain_of(p.hkv * width), [&](int64_t begin, int64_t end) {
      attention_terms_kernels().gather_pages(p, x, width, to, begin, end);
    });
    x = {memory.back().const_data_ptr(), 0, p.hkv * width, width};
  };
  gather(p.k, p.d);
  gather(p.v, p.dv);
  p.pages = {};
}

// A sequence as a problem of its own. Its table term ends where the longest one's does.
AttentionProblem problem_of(AttentionProblem p, const Sequence& s) {
  const int64_t size = size_of(p.dtype), wide = size_of(accumulator(p.dtype));
  if (is_relative(p.table.kind)) p.relative.origin = p.tk - 1 + s.tq - s.tk;
  p.relative.data = moved(p.relative.data, s.b * p.relative.stride_b, wide);
  p.batch = 1;
  p.sequences = {};
  p.tq = s.tq;
  p.tk = s.tk;
  p.first_batch = s.b;
  move_rows(p.q, s, s.q_begin, size);
  if (p.pages.table != nullptr) {
    p.pages.table += s.row * p.pages.stride_b;
  } else {
    move_rows(p.k, s, s.k_begin, size);
    move_rows(p.v, s, s.k_begin, size);
  }
  p.mask.tq = s.tq;
  p.mask.tk = s.tk;
  for (int32_t n = 0; n < p.mask.count; ++n) p.mask.rules[n] = rule_of(p.mask.rules[n], s.b);
  p.bias.data = moved(p.bias.data, s.b * p.bias.stride_b, size_of(p.bias.dtype));
  return p;
}

int64_t stat_offset(const AttentionProblem& p, const Sequence& s) {
  return s.row * p.hq * p.lse_stride + s.q_begin;
}

AttentionForwardParams of_sequence(AttentionForwardParams f, const Sequence& s) {
  const AttentionProblem& p = f.problem;
  const int64_t wide = size_of(accumulator(p.dtype));
  move_rows(f.out, s, s.q_begin, size_of(p.dtype));
  f.lse = moved(f.lse, stat_offset(p, s), wide);
  f.lse_tail = moved(f.lse_tail, stat_offset(p, s), wide);
  f.problem = problem_of(p, s);
  return f;
}

AttentionBackwardParams of_sequence(AttentionBackwardParams x, const Sequence& s) {
  const AttentionProblem& p = x.problem;
  const int64_t size = size_of(p.dtype), wide = size_of(accumulator(p.dtype));
  move_rows(x.out, s, s.q_begin, size);
  move_rows(x.grad_out, s, s.q_begin, size);
  move_rows(x.grad_q, s, s.q_begin, size);
  move_rows(x.grad_k, s, s.k_begin, size);
  move_rows(x.grad_v, s, s.k_begin, size);
  x.lse = moved(x.lse, stat_offset(p, s), wide);
  x.lse_tail = moved(x.lse_tail, stat_offset(p, s), wide);
  x.grad_lse = moved(x.grad_lse, stat_offset(p, s), wide);
  x.grad_bias = moved(x.grad_bias, s.b * x.grad_bias_stride_b, wide);
  x.problem = problem_of(p, s);
  return x;
}

// The problems of a call, the largest first: items are handed out in order.
template <class Params>
std::vector<Params> problems_of(const Params& x, const Sequences& sequences) {
  if (sequences.count == 0) return {x};
  std::vector<Params> problems;
  for (const Sequence& s : sequences.list()) {
    if (s.tq > 0) problems.push_back(of_sequence(x, s));
  }
  std::stable_sort(problems.begin(), problems.end(), [](const Params& a, const Params& b) {
    return a.problem.tq * a.problem.tk > b.problem.tq * b.problem.tk;
  });
  return problems;
}

// ---- terms and their gradients ------------------------------------------------------------------

// Points `relative` into the memory it returns.
Tensor expand_table(AttentionProblem& p) {
  if (p.table.kind == ScoreKind::none) return buffer(0, p.dtype);
  const bool relative = is_relative(p.table.kind);
  const int64_t plane = plane_elements(p);
  const Tensor memory = buffer(table_heads(p) * plane, p.dtype);
  p.relative.data = memory.const_data_ptr();
  p.relative.stride_h = plane;
  p.relative.stride_b = table_batches(p) == 1 ? 0 : p.hq * plane;
  // Element of a relative term: k - i + Tk - 1 with i = q + Tk - Tq.
  p.relative.origin = relative ? p.tq - 1 : 0;
  p.relative.stride_q = relative ? -1 : plane / p.tq;
  const int64_t item = (relative ? kExpandedDistances : p.tk) * table_heads(p);
  parallel_ranges(expand_items(p), grain_of(item), [&](int64_t begin, int64_t end) {
    attention_terms_kernels().expand_table(p, memory.mutable_data_ptr(), begin, end);
  });
  return memory;
}

// Sums of what the problems of a call x left for the gradients of parameters.
void gather_gradients(const AttentionBackwardParams& x,
                      const std::vector<AttentionBackwardParams>& problems) {
  const auto& kernels = attention_terms_kernels();
  if (x.grad_table != nullptr) {
    const AttentionTableGradient g{&x, problems.data(), static_cast<int64_t>(problems.size())};
    const int64_t items = table_heads(x.problem), grain = grain_of(plane_elements(x.problem));
    const ThreadMemory memory(
        std::min(ceil_div(items, grain), int64_t{torch::stable::get_num_threads()}),
        gather_scratch_bytes(x.problem));
    run_stage(
        std::span(&g, 1), [&](const AttentionTableGradient&) { return items; }, memory,
        kernels.gather_table);
  }
  for (const AttentionBackwardParams& b : problems) {
    const auto gather = [&](const void* parts, void* grad) {
      if (grad == nullptr) return;
      parallel_ranges(b.problem.hq, grain_of(forward_items(b.problem) / b.problem.hq),
                      [&](int64_t begin, int64_t end) {
                        kernels.gather_heads(b.problem, parts, grad, begin, end);
                      });
    };
    gather(b.part_sinks, b.grad_sinks);
    gather(b.part_head_scale, b.grad_head_scale);
  }
}

// ---- forward ------------------------------------------------------------------------------------

using Forward = AttentionForwardParams;
using ForwardProblems = std::span<Forward>;

int64_t kv_heads(const Forward& x) { return kv_head_items(x.problem); }

void run_decode(ForwardProblems problems) {
  const Tensor workspace = share_workspace(
      problems, [](const Forward& x) { return decode_workspace_elements(x.problem); });
  const auto& kernels = attention_decode_kernels();
  run<Forward>(
      kernels.decode, problems, [](const Forward& x) { return decode_items(x.problem); },
      largest(problems, [](const Forward& x) { return decode_scratch_elements(x.problem); }));
  // Most merges take less time than it takes to open the pool.
  constexpr int64_t kLargeMerge = 1 << 18;
  const auto rows = [](const Forward& x) { return merge_items(x.problem); };
  if (total(problems, [](const Forward& x) {
        return merge_items(x.problem) * decode_splits(x.problem) * x.problem.dv;
      }) >= kLargeMerge) {
    run<Forward>(kernels.merge, problems, rows, 0);
  } else {
    for (const Forward& x : problems) kernels.merge(x, nullptr, 0, rows(x));
  }
}

// Packs and multiplies one kv head after the other.
void run_heads(ForwardProblems problems) {
  run<Forward>(attention_forward_kernels(problems[0].problem.dtype).forward_heads, problems,
               kv_heads, largest(problems, [](const Forward& x) {
                 return forward_scratch_elements(x.problem) + packed_head_elements(x.problem);
               }));
}

// Packs all keys, then multiplies block by block of queries.
void run_blocks(ForwardProblems problems) {
  const auto& kernels = attention_forward_kernels(problems[0].problem.dtype);
  const Tensor workspace = share_workspace(
      problems, [](const Forward& x) { return forward_workspace_elements(x.problem); });
  run<Forward>(kernels.pack, problems, [](const Forward& x) { return pack_items(x.problem); }, 0);
  run<Forward>(
      kernels.forward, problems, [](const Forward& x) { return forward_items(x.problem); },
      largest(problems, [](const Forward& x) { return forward_scratch_elements(x.problem); }));
}

const PathTable<bool(const Forward&, const Load&), void(ForwardProblems)> kForwardPaths(
    "attention",
    {
        {"decode", [](const Forward& x, const Load&) { return takes_decode_path_cpu(x.problem); },
         run_decode},
        {"heads", [](const Forward&, const Load& load) { return has_heads_enough(load); },
         run_heads},
        {"blocks", [](const Forward&, const Load&) { return true; }, run_blocks},
    });

// ---- backward -----------------------------------------------------------------------------------

using Backward = AttentionBackwardParams;
using BackwardProblems = std::span<Backward>;

void run_backward_heads(BackwardProblems problems) {
  run<Backward>(attention_backward_kernels(problems[0].problem.dtype).backward_heads, problems,
                backward_owners, largest(problems, [](const Backward& x) {
                  const int64_t rows = group_size(x.problem) * x.problem.tq;
                  return backward_scratch_elements(x) + backward_workspace_elements(x, rows);
                }));
}

void run_backward_blocks(BackwardProblems problems) {
  const auto& kernels = attention_backward_kernels(problems[0].problem.dtype);
  const Tensor workspace = share_workspace(problems, [](const Backward& x) {
    return backward_workspace_elements(x, query_rows(x.problem));
  });
  const auto query_blocks = [](const Backward& x) { return forward_items(x.problem); };
  run<Backward>(kernels.prepare, problems, query_blocks, 0);
  run<Backward>(kernels.backward, problems, backward_items,
                largest(problems, backward_scratch_elements));
  run<Backward>(kernels.finish, problems, query_blocks, 0);
}

const PathTable<bool(const Backward&, const Load&), void(BackwardProblems)> kBackwardPaths(
    "attention_backward",
    {
        {"heads",
         [](const Backward& x, const Load& load) {
           return x.splits == 1 && has_heads_enough(load);
         },
         run_backward_heads},
        {"blocks", [](const Backward&, const Load&) { return true; }, run_backward_blocks},
    });

// What a problem adds to the gradients of parameters, in memory of its own.
Tensors give_parts(const AttentionProblem& whole, BackwardProblems problems) {
  Tensors memory;
  const auto part = [&](int64_t elements) {
    memory.push_back(buffer(elements, whole.dtype));
    return memory.back().mutable_data_ptr();
  };
  for (Backward& b : problems) {
    if (b.grad_table != nullptr) {
      b.part_relative_plane = plane_elements(whole);
      b.part_relative = part(b.splits * table_parts(b) * whole.hq * b.part_relative_plane);
      torch::stable::fill_(memory.back(), 0);
    }
    if (b.grad_sinks != nullptr) b.part_sinks = part(forward_items(b.problem));
    if (b.grad_head_scale != nullptr) b.part_head_scale = part(forward_items(b.problem));
  }
  return memory;
}

}  // namespace

void decode_seed(Call& call, const Tensor& seed) { read_seed(call, seed); }

void run_forward(AttentionForwardParams f, const Sequences& sequences) {
  const Tensor table = expand_table(f.problem);
  auto problems = problems_of(f, sequences);
  Tensors gathered;
  for (Forward& x : problems) {
    const bool reads_pages = takes_decode_path_cpu(x.problem);
    if (x.problem.pages.table != nullptr && !reads_pages) gather_pages(x.problem, gathered);
  }
  run_paths(kForwardPaths, std::span(problems), kv_heads);
}

void run_backward(AttentionBackwardParams x, const Sequences& sequences) {
  const Tensor table = expand_table(x.problem);
  auto problems = problems_of(x, sequences);
  const int64_t owners = total(problems, backward_owners);
  for (Backward& b : problems) b.splits = backward_splits(b, owners);
  const Tensors parts = give_parts(x.problem, problems);
  const auto run = [](BackwardProblems some) { run_paths(kBackwardPaths, some, backward_owners); };
  // Sequences that add to one bias gradient take turns.
  if (x.grad_bias != nullptr && x.grad_bias_stride_b == 0) {
    for (Backward& b : problems) run({&b, 1});
  } else {
    run(problems);
  }
  gather_gradients(x, problems);
}

void run_weights(AttentionWeightsParams w) {
  const Tensor table = expand_table(w.problem);
  run<AttentionWeightsParams>(
      attention_weights_kernels().weights, {&w, 1},
      [](const AttentionWeightsParams& x) { return weights_items(x.problem); },
      weights_scratch_elements(w.problem));
}

void run_select(AttentionSelectParams x) {
  const Tensor table = expand_table(x.problem);
  run<AttentionSelectParams>(
      attention_select_kernels().select, {&x, 1},
      [](const AttentionSelectParams& y) { return forward_items(y.problem); },
      select_scratch_elements(x.problem));
}

}  // namespace omniattn::ops::attention
