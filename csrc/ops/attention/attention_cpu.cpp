// attention, attention_backward, attention_tangents, attention_weights and attention_select on the
// CPU: choice of kernels, memory, threads.
#include <algorithm>
#include <span>
#include <type_traits>
#include <utility>

#include "kernels/attention/attention_kernels_cpu.h"
#include "kernels/attention/attention_sizes_cpu.h"
#include "kernels/attention/attention_terms.h"
#include "kernels/attention_tangents/attention_tangents.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_parts.h"
#include "ops/attention/attention_sequences.h"
#include "ops/parallel.h"
#include "ops/path.h"
#include "ops/stage.h"
#include "runtime/denormals.h"
#include "runtime/measured_isa.h"

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

// Sum of f(problem), and its largest value.
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

// Gives each problem its own part of one workspace, in units of whole cache lines.
template <class Params, class F>
Tensor share_workspace(std::span<Params> problems, const F& elements) {
  const DType dtype = problems.front().problem.dtype;
  const auto whole_lines = [&](const Params& x) { return round_up(elements(x), 16); };
  const Tensor memory = buffer(total(problems, whole_lines), dtype);
  char* next = static_cast<char*>(memory.mutable_data_ptr());
  for (Params& x : problems) {
    x.workspace = next;
    next += whole_lines(x) * size_of(accumulator(dtype));
  }
  return memory;
}

// Runs the items of all problems on as many threads as they are worth. Kernels flush denormals.
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

// Size of a call, from which a path decides whether to take a problem.
struct Load {
  int64_t heads;    // items that would own whole heads
  int64_t threads;  // number of threads that they are worth
};
template <class Problems, class F>
Load load_of(const Problems& problems, const F& heads) {
  const int64_t items = total(problems, heads);
  return {items, thread_count(problems, items)};
}
// True if whole heads, each with its own workspace, keep the threads busy.
bool has_heads_enough(const Load& load) { return load.heads >= 4 * load.threads; }

// The fastest level for the multiply-adds of a kv head, disregarding masks. Rows of distances are
// multiplied in the compute type.
Isa isa_of(const AttentionProblem& p) {
  return isa_for(MeasuredOp::attention, has_distance_rows(p) ? accumulator(p.dtype) : p.dtype,
                 group_size(p) * p.tq * p.tk * (p.d + p.dv));
}

// True if a problem has few queries, for which decoding is faster. Its sums are not those of
// blocks.
bool is_decoded(const AttentionProblem& p) {
  return takes_decode_path_cpu(p) && !is_batch_invariant();
}

// Runs problems of one level, each by the first path that takes it.
template <class Table, class Params, class F>
void run_paths_of_level(const Table& table, std::span<Params> problems, const F& heads) {
  for (auto path = table.begin(); !problems.empty(); ++path) {
    const Load load = load_of(problems, heads);
    const auto rest = std::stable_partition(problems.begin(), problems.end(), [&](const Params& x) {
      return table.refusal(*path, x, load) == nullptr;
    });
    const auto taken = static_cast<size_t>(rest - problems.begin());
    if (taken == 0) continue;
    table.report(*path);
    path->run(problems.first(taken));
    problems = problems.subspan(taken);
  }
}

// Runs problems of any level, one level after the other, and reorders them.
template <class Table, class Params, class F>
void run_paths(const Table& table, std::span<Params> problems, const F& heads) {
  while (!problems.empty()) {
    const Isa isa = isa_of(problems[0].problem);
    const auto rest = std::stable_partition(problems.begin(), problems.end(), [&](const Params& x) {
      return isa_of(x.problem) == isa;
    });
    const auto same = static_cast<size_t>(rest - problems.begin());
    run_paths_of_level(table, problems.first(same), heads);
    problems = problems.subspan(same);
  }
}

// The problems of a call, the largest first: items are handed out in order.
template <class Params>
std::vector<Params> problems_of(const Params& x, const Sequences& sequences) {
  if (sequences.count == 0) return {x};
  std::vector<Params> problems;
  for (const Sequence& s : sequences.list()) {
    if (s.tq > 0) problems.push_back(of_sequence(x, s));
  }
  if (problems.size() > 1) {  // a sort allocates memory even for one
    std::stable_sort(problems.begin(), problems.end(), [](const Params& a, const Params& b) {
      return a.problem.tq * a.problem.tk > b.problem.tq * b.problem.tk;
    });
  }
  return problems;
}

// Expands the table term, if there is one, into the returned memory and points `relative` to it.
OptTensor expand_table(AttentionProblem& p) {
  if (p.table.kind == ScoreKind::none) return std::nullopt;
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
    attention_terms_kernels(p.dtype).expand_table(p, memory.mutable_data_ptr(), begin, end);
  });
  return memory;
}

using Forward = AttentionForwardParams;
using ForwardProblems = std::span<Forward>;
// Kernels of the level that all problems of a path share.
const AttentionForwardKernels& kernels_of(ForwardProblems problems) {
  const AttentionProblem& p = problems[0].problem;
  return attention_forward_kernels_on(isa_of(p), p.dtype);
}

int64_t kv_heads(const Forward& x) { return kv_head_items(x.problem); }

void run_decode(ForwardProblems problems) {
  const Tensor workspace = share_workspace(
      problems, [](const Forward& x) { return decode_workspace_elements(x.problem); });
  const auto& kernels = attention_decode_kernels(problems[0].problem.dtype);
  run<Forward>(
      kernels.decode, problems, [](const Forward& x) { return decode_items(x.problem); },
      largest(problems, [](const Forward& x) { return decode_scratch_elements(x.problem); }));
  // Most merges take less time than opening the pool.
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

// Packs and multiplies one kv head at a time.
void run_heads(ForwardProblems problems) {
  run<Forward>(kernels_of(problems).forward_heads, problems, kv_heads,
               largest(problems, [](const Forward& x) {
                 return forward_scratch_elements(x.problem) + packed_head_elements(x.problem);
               }));
}

// Packs all keys, then multiplies block by block of queries.
void run_blocks(ForwardProblems problems) {
  const auto& kernels = kernels_of(problems);
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
        {"decode", [](const Forward& x, const Load&) { return is_decoded(x.problem); }, run_decode},
        {"heads", [](const Forward&, const Load& load) { return has_heads_enough(load); },
         run_heads},
        {"blocks", [](const Forward&, const Load&) { return true; }, run_blocks},
    });

using Backward = AttentionBackwardParams;
using BackwardProblems = std::span<Backward>;
const AttentionBackwardKernels& kernels_of(BackwardProblems problems) {
  const AttentionProblem& p = problems[0].problem;
  return attention_backward_kernels_on(isa_of(p), p.dtype);
}

// A function that is always inlined cannot be called through its address.
constexpr auto owners_of = [](const Backward& x) { return backward_owners(x); };

void run_backward_heads(BackwardProblems problems) {
  run<Backward>(kernels_of(problems).backward_heads, problems, owners_of,
                largest(problems, [](const Backward& x) {
                  const int64_t rows = group_size(x.problem) * x.problem.tq;
                  return backward_scratch_elements(x) + backward_workspace_elements(x, rows);
                }));
}

void run_backward_blocks(BackwardProblems problems) {
  const auto& kernels = kernels_of(problems);
  const Tensor workspace = share_workspace(problems, [](const Backward& x) {
    return backward_workspace_elements(x, query_rows(x.problem));
  });
  const auto query_blocks = [](const Backward& x) { return forward_items(x.problem); };
  run<Backward>(kernels.prepare, problems, query_blocks, 0);
  run<Backward>(
      kernels.backward, problems, [](const Backward& x) { return backward_items(x); },
      largest(problems, [](const Backward& x) { return backward_scratch_elements(x); }));
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

const PathTable<bool(const AttentionProblem&), void(const AttentionWeightsParams&)> kWeightsPaths(
    "attention_weights",
    {
        {"rows",
         [](const AttentionProblem& p) { return takes_decode_path(p) && !is_batch_invariant(); },
         [](const AttentionWeightsParams& w) {
           run<AttentionWeightsParams>(
               attention_few_weights_kernels(w.problem.dtype).weights, {&w, 1},
               [](const AttentionWeightsParams& x) { return few_rows_items(x.problem); },
               few_rows_scratch_elements(w.problem));
         }},
        {"blocks", [](const AttentionProblem&) { return true; },
         [](const AttentionWeightsParams& w) {
           run<AttentionWeightsParams>(
               attention_weights_kernels_on(isa_of(w.problem), w.problem.dtype).weights, {&w, 1},
               weights_items, weights_scratch_elements(w.problem));
         }},
    });

// Fits the tails of large lse (see fit_tails); output and lse keep their values.
void fit_tail(const Forward& x, Tensors& gathered) {
  const AttentionProblem& p = x.problem;
  const bool has_lse = divides_rows(p.score) || is_stick(p.score);
  if (x.lse_tail == nullptr || !is_decoded(p) || !has_lse) return;
  const auto& kernels = attention_terms_kernels(p.dtype);
  if (!kernels.has_large_lse(x)) return;
  const Tensor out = empty_tensor({p.batch, p.tq, p.hq, p.dv}, p.dtype);
  const int64_t rows = p.batch * p.hq * p.lse_stride;
  const Tensor lse = buffer(rows, p.dtype), tail = buffer(rows, p.dtype);
  Forward blocks{p, mutable_view_of(out), lse.mutable_data_ptr(), tail.mutable_data_ptr(), nullptr};
  if (is_gathered(p)) gather_rows(blocks.problem, gathered);
  run_blocks({&blocks, 1});
  kernels.fit_tails(x, blocks);
}

void set_interpreter(AttentionProblem& p) {
  if (p.program == nullptr) return;
  const auto& kernels = score_program_kernels(p.dtype);
  p.run_program = p.dtype == DType::f64 ? kernels.run_double : kernels.run_float;
}

}  // namespace

void decode_seed(Call& call, const Tensor& seed) { read_seed(call, seed); }

void run_forward(AttentionForwardParams f, const Call& call) {
  set_interpreter(f.problem);
  const OptTensor table = expand_table(f.problem);
  auto problems = problems_of(f, call.sequences);
  Tensors gathered;
  for (Forward& x : problems) {
    const bool reads_in_place = is_decoded(x.problem);
    if (is_gathered(x.problem) && !reads_in_place) gather_rows(x.problem, gathered);
  }
  run_paths(kForwardPaths, std::span(problems), kv_heads);
  for (const Forward& x : problems) fit_tail(x, gathered);
}

void run_backward(AttentionBackwardParams x, const Call& call) {
  set_interpreter(x.problem);
  const OptTensor table = expand_table(x.problem);
  auto problems = problems_of(x, call.sequences);
  const int64_t owners = total(problems, owners_of);
  for (Backward& b : problems) b.splits = backward_splits(b, owners);
  const GradientParts parts(x, problems);
  // Runs a copy: gradients are added up in the order of `problems`.
  const auto run = [](std::vector<Backward> some) {
    run_paths(kBackwardPaths, std::span(some), owners_of);
  };
  // Sequences that add to a shared gradient run one by one.
  const bool shares_bias = x.grad_bias != nullptr && x.grad_bias_stride_b == 0;
  if (shares_bias || x.grad_program != nullptr) {
    for (const Backward& b : problems) run({b});
  } else {
    run(problems);
  }
  parts.gather();
}

void run_tangents(AttentionTangentParams x, const Call& call) {
  using Tangents = AttentionTangentParams;
  const OptTensor table = expand_table(x.problem);
  auto problems = problems_of(x, call.sequences);
  const auto heads = [](const Tangents& t) { return kv_head_items(t.problem); };
  const int64_t owners = total(problems, heads);
  for (Tangents& t : problems) t.splits = tangent_splits(t.problem, owners);
  const auto& kernels = attention_tangent_kernels(x.problem.dtype);
  const auto scratch = [](const Tangents& t) { return tangent_scratch_elements(t.problem); };
  const Load load = load_of(problems, heads);
  // The results of whole heads and of single blocks are bitwise equal.
  const auto rest = std::stable_partition(problems.begin(), problems.end(), [&](const Tangents& t) {
    return t.splits == 1 && has_heads_enough(load);
  });
  const std::span<Tangents> whole(problems.begin(), rest), split(rest, problems.end());
  if (!whole.empty()) {
    run<Tangents>(kernels.heads, whole, heads, largest(whole, [&](const Tangents& t) {
                    const int64_t rows = group_size(t.problem) * t.problem.tq;
                    return scratch(t) + tangent_workspace_elements(t, rows);
                  }));
  }
  if (split.empty()) return;
  const Tensor workspace = share_workspace(split, [](const Tangents& t) {
    return tangent_workspace_elements(t, query_rows(t.problem));
  });
  const auto blocks = [](const Tangents& t) { return forward_items(t.problem); };
  const auto items = [](const Tangents& t) { return tangent_items(t); };
  const int64_t elements = largest(split, scratch);
  run<Tangents>(kernels.prepare, split, blocks, 0);
  run<Tangents>(kernels.outputs, split, items, elements);
  run<Tangents>(kernels.join, split, blocks, 0);
  if (!has_gradients(x)) return;
  run<Tangents>(kernels.gradients, split, items, elements);
  run<Tangents>(kernels.finish, split, blocks, 0);
}

void run_weights(AttentionWeightsParams w) {
  set_interpreter(w.problem);
  const OptTensor table = expand_table(w.problem);
  kWeightsPaths.first(w.problem).run(w);
}

void run_select(AttentionSelectParams x) {
  set_interpreter(x.problem);
  const OptTensor table = expand_table(x.problem);
  run<AttentionSelectParams>(
      attention_select_kernels_on(isa_of(x.problem), x.problem.dtype).select, {&x, 1},
      [](const AttentionSelectParams& y) { return forward_items(y.problem); },
      select_scratch_elements(x.problem));
}

}  // namespace omniattn::ops::attention
