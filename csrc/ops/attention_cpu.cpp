// attention, attention_backward, attention_weights and attention_select on the CPU: choice of
// kernels, memory, threads.
#include <algorithm>
#include <cstring>
#include <span>
#include <type_traits>
#include <utility>

#include "ops/attention.h"
#include "ops/parallel.h"
#include "ops/path.h"
#include "runtime/denormals.h"

namespace omniattn::ops::attention {
namespace {

Tensor buffer(int64_t elements, DType dtype) {
  return empty_tensor({&elements, 1}, accumulator(dtype));
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

// Items of a stage over the threads, problem after problem. Each thread has its own scratch, its
// own workspace where `workspace_elements` asks for one, and its own copy of the parameters of the
// problem that it works on.
template <class Params, class Kernel, class Items>
void run_stage(Kernel kernel, std::span<Params> problems, const Items& items,
               int64_t scratch_elements, int64_t workspace_elements = 0) {
  std::vector<int64_t> ends;  // of the items of each problem
  for (const Params& x : problems) ends.push_back((ends.empty() ? 0 : ends.back()) + items(x));
  if (ends.empty() || ends.back() == 0) return;
  const DType dtype = problems.front().problem.dtype;
  const int64_t threads = thread_count(problems, ends.back());
  const PerThread scratch(threads, scratch_elements, dtype);
  const PerThread workspace(threads, workspace_elements, dtype);
  struct Copy {
    size_t problem;
    Params params;
  };
  std::vector<Copy> copies(static_cast<size_t>(threads), {problems.size(), problems.front()});
  parallel_queue(ends.back(), threads, [&](int64_t thread, int64_t item) {
    const auto n =
        static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), item) - ends.begin());
    Copy& mine = copies[static_cast<size_t>(thread)];
    if (mine.problem != n) {
      mine = {n, problems[n]};
      mine.params.scratch = scratch.of(thread);
      if constexpr (requires { mine.params.workspace; }) {
        if (workspace_elements > 0) mine.params.workspace = workspace.of(thread);
      }
    }
    const int64_t local = n == 0 ? item : item - ends[n - 1];
    const FlushDenormals flush;
    kernel(mine.params, local, local + 1);
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
    const int64_t sizes[] = {p.tk, p.hkv, width}, size = size_of(p.dtype);
    memory.push_back(empty_tensor({sizes, 3}, p.dtype));
    auto* to = static_cast<char*>(memory.back().mutable_data_ptr());
    for (int64_t t = 0; t < p.tk; ++t) {
      const int64_t page = p.pages.table[t / p.pages.size];
      const int64_t row = page * x.stride_b + t % p.pages.size * x.stride_t;
      for (int64_t h = 0; h < p.hkv; ++h, to += width * size) {
        std::memcpy(to, moved(x.data, row + h * x.stride_h, size), width * size);
      }
    }
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
      const double factor = table_factor(p.table, i, k);
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

// Adds the planes (splits, table_parts, Hq) of all problems up, in order, to the gradient of the
// table of the whole call x.
void gather_table(const AttentionBackwardParams& x,
                  const std::vector<AttentionBackwardParams>& problems) {
  const AttentionProblem& p = x.problem;
  const auto gather = [&](auto type) {
    using A = decltype(type);
    auto* const grad = static_cast<A*>(x.grad_table);
    const int64_t batches = p.table.stride_b == 0 ? 1 : p.batch;
    std::vector<double> sums(static_cast<size_t>(batches * p.table.rows * p.hq));
    std::vector<double> plane;  // of all that read the same table
    for (int64_t head = 0; head < batches * p.hq; ++head) {
      const int64_t batch = head / p.hq, h = head % p.hq;
      plane.assign(static_cast<size_t>(plane_elements(p)), 0);
      for (const AttentionBackwardParams& b : problems) {
        for (int64_t n = 0; n < b.splits * table_parts(b); ++n) {
          if (batches > 1 && b.problem.first_batch + n % table_parts(b) != batch) continue;
          const A* const part =
              static_cast<const A*>(b.part_relative) + (n * p.hq + h) * b.part_relative_plane;
          for (size_t e = 0; e < plane.size(); ++e) plane[e] += part[e];
        }
      }
      for_plane(p, [&](int64_t e, int64_t i, int64_t k) {
        const int64_t row = batch * p.table.stride_b + table_row(p.table, i, k) * p.hq + h;
        sums[static_cast<size_t>(row)] +=
            table_factor(p.table, i, k) * plane[static_cast<size_t>(e)];
      });
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
      static_cast<A*>(grad)[h] += static_cast<A>(sum);
    }
  };
  p.dtype == DType::f64 ? gather(double{}) : gather(float{});
}

// ---- forward ------------------------------------------------------------------------------------

using Forward = AttentionForwardParams;
using ForwardProblems = std::span<Forward>;

int64_t kv_heads(const Forward& x) { return kv_head_items(x.problem); }

void run_decode(ForwardProblems problems) {
  const Tensor workspace = share_workspace(
      problems, [](const Forward& x) { return decode_workspace_elements(x.problem); });
  const auto& kernels = attention_decode_kernels();
  run_stage(
      kernels.decode, problems, [](const Forward& x) { return decode_items(x.problem); },
      largest(problems, [](const Forward& x) { return decode_scratch_elements(x.problem); }));
  // Most merges take less time than it takes to open the pool.
  constexpr int64_t kLargeMerge = 1 << 18;
  const auto rows = [](const Forward& x) { return merge_items(x.problem); };
  if (total(problems, [](const Forward& x) {
        return merge_items(x.problem) * decode_splits(x.problem) * x.problem.dv;
      }) >= kLargeMerge) {
    run_stage(kernels.merge, problems, rows, 0);
  } else {
    for (const Forward& x : problems) kernels.merge(x, 0, rows(x));
  }
}

int64_t forward_scratch(ForwardProblems problems) {
  return largest(problems, [](const Forward& x) { return forward_scratch_elements(x.problem); });
}

// Packs and multiplies one kv head after the other.
void run_heads(ForwardProblems problems) {
  run_stage(attention_forward_kernels(problems[0].problem.dtype).forward_heads, problems, kv_heads,
            forward_scratch(problems),
            largest(problems, [](const Forward& x) { return packed_head_elements(x.problem); }));
}

// Packs all keys, then multiplies block by block of queries.
void run_blocks(ForwardProblems problems) {
  const auto& kernels = attention_forward_kernels(problems[0].problem.dtype);
  const Tensor workspace = share_workspace(
      problems, [](const Forward& x) { return forward_workspace_elements(x.problem); });
  run_stage(kernels.pack, problems, [](const Forward& x) { return pack_items(x.problem); }, 0);
  run_stage(
      kernels.forward, problems, [](const Forward& x) { return forward_items(x.problem); },
      forward_scratch(problems));
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

int64_t backward_scratch(BackwardProblems problems) {
  return largest(problems, [](const Backward& x) { return backward_scratch_elements(x); });
}

void run_backward_heads(BackwardProblems problems) {
  run_stage(attention_backward_kernels(problems[0].problem.dtype).backward_heads, problems,
            backward_owners, backward_scratch(problems), largest(problems, [](const Backward& x) {
              return backward_workspace_elements(x, group_size(x.problem) * x.problem.tq);
            }));
}

void run_backward_blocks(BackwardProblems problems) {
  const auto& kernels = attention_backward_kernels(problems[0].problem.dtype);
  const Tensor workspace = share_workspace(problems, [](const Backward& x) {
    return backward_workspace_elements(x, query_rows(x.problem));
  });
  const auto query_blocks = [](const Backward& x) { return forward_items(x.problem); };
  run_stage(kernels.prepare, problems, query_blocks, 0);
  run_stage(kernels.backward, problems, backward_items, backward_scratch(problems));
  run_stage(kernels.finish, problems, query_blocks, 0);
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
  if (x.grad_table != nullptr) gather_table(x, problems);
  for (const Backward& b : problems) {
    if (b.grad_sinks != nullptr) gather_heads(b.problem, b.part_sinks, b.grad_sinks);
    if (b.grad_head_scale != nullptr) {
      gather_heads(b.problem, b.part_head_scale, b.grad_head_scale);
    }
  }
}

void run_weights(AttentionWeightsParams w) {
  const Tensor table = expand_table(w.problem);
  run_stage(
      attention_weights_kernels().weights, std::span(&w, 1),
      [](const AttentionWeightsParams& x) { return weights_items(x.problem); },
      weights_scratch_elements(w.problem));
}

void run_select(AttentionSelectParams x) {
  const Tensor table = expand_table(x.problem);
  run_stage(
      attention_select_kernels().select, std::span(&x, 1),
      [](const AttentionSelectParams& y) { return forward_items(y.problem); },
      select_scratch_elements(x.problem));
}

}  // namespace omniattn::ops::attention
