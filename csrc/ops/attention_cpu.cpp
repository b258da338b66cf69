// attention, attention_backward, attention_weights and attention_select on the CPU: choice of
// kernels, memory, threads.
#include "ops/attention.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "ops/parallel.h"
#include "runtime/denormals.h"

namespace {

Tensor buffer(int64_t elements, DType dtype) {
  return empty_tensor({&elements, 1}, accumulator(dtype));
}

template <class Params>
int64_t thread_count(const std::vector<Params>& problems, int64_t items) {
  // Small problems stay on this thread: opening the pool costs about 2 us, some 100 kFLOP.
  int64_t work = 0;
  for (const Params& x : problems) {
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
template <class Params, class F>
int64_t total(const std::vector<Params>& problems, const F& f) {
  int64_t sum = 0;
  for (const Params& x : problems) sum += f(x);
  return sum;
}
template <class Params, class F>
int64_t largest(const std::vector<Params>& problems, const F& f) {
  int64_t found = 0;
  for (const Params& x : problems) found = std::max(found, f(x));
  return found;
}

// Gives each problem its own part of one workspace.
template <class Params, class F>
Tensor share_workspace(std::vector<Params>& problems, const F& elements) {
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
void run_stage(Kernel kernel, const std::vector<Params>& problems, const Items& items,
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

// Whether whole kv heads, each with its own workspace, keep the threads busy.
template <class Params>
bool has_heads_enough(const std::vector<Params>& problems, int64_t items) {
  return items >= 4 * thread_count(problems, items);
}

// ---- sequences ----------------------------------------------------------------------------------

void decode_seed(Call& call, const Tensor& seed) { read_seed(call.p.dropout, seed); }

// Element of an int32 or int64 tensor.
int64_t integer_at(const Tensor& t, int64_t offset) {
  const void* const data = t.const_data_ptr();
  return t.scalar_type() == ScalarType::Long ? static_cast<const int64_t*>(data)[offset]
                                             : static_cast<const int32_t*>(data)[offset];
}

// Row numbers of a layout: `count` integers in [0, limit].
Ints read_rows(const char* op, const char* name, const Tensor& t, int64_t count, int64_t limit) {
  require_integers(op, name, t);
  require_sizes(op, name, t, {&count, 1});
  Ints rows(static_cast<size_t>(count));
  for (int64_t n = 0; n < count; ++n) {
    const int64_t row = integer_at(t, n * t.stride(0));
    require(row >= 0 && row <= limit, op, name, " must lie in [0, ", limit, "], got ", row);
    rows[static_cast<size_t>(n)] = row;
  }
  return rows;
}

// Boundaries of packed sequences of at most `longest` rows.
Ints read_boundaries(const char* op, const char* name, const Tensor& t, int64_t rows,
                     int64_t longest) {
  require(t.dim() == 1 && t.size(0) >= 1, op, name, " must have shape (N + 1,)");
  const Ints found = read_rows(op, name, t, t.size(0), rows);
  for (size_t n = 1; n < found.size(); ++n) {
    const int64_t length = found[n] - found[n - 1];
    require(length >= 0 && length <= longest, op, name, " must grow by 0 to ", longest, ", got ",
            found[n - 1], " then ", found[n]);
  }
  return found;
}

// Reads the pages that sequences of these lengths have; what the table holds behind is not read. k
// and v are (pages, size, Hkv, .).
void decode_pages(const char* op, Call& call, const Tensor& table, const Tensor& lengths) {
  AttentionProblem& p = call.p;
  const int64_t pages = call.kept[1].size(0), size = p.tk;
  require_integers(op, "block_table", table);
  require(table.dim() == 2 && table.size(0) == p.batch, op,
          "block_table must have shape (B, N) with B=", p.batch, ", got ", table.dim(),
          " dimensions");
  const int64_t width = table.size(1);
  require(size > 0 && width <= kMaskParamLimit / size, op,
          "pages must hold tokens, and those of a sequence less than 2^40, got page size ", size,
          " and N=", width);
  p.tk = width * size;
  const Ints found = read_rows(op, "cache_seqlens", lengths, p.batch, p.tk);
  const int64_t longest = found.empty() ? 0 : *std::max_element(found.begin(), found.end());
  p.pages = {nullptr, ceil_div(longest, size), size};
  call.block_table.resize(static_cast<size_t>(p.batch * p.pages.stride_b));
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t length = found[static_cast<size_t>(b)];
    for (int64_t n = 0; n < ceil_div(length, size); ++n) {
      const int64_t page = integer_at(table, b * table.stride(0) + n * table.stride(1));
      require(page >= 0 && page < pages, op, "block_table must name pages in [0, ", pages,
              "), got ", page, " in row ", b);
      call.block_table[static_cast<size_t>(b * p.pages.stride_b + n)] = page;
    }
    call.sequences.push_back({b, b, 0, p.tq, 0, length});
  }
  p.pages.table = call.block_table.data();
}

// Errors name the public function: what is wrong are values that only this code reads.
void decode_layout(const char*, Call& call, LayoutKind kind, const Ints& code, const Tensors& aux) {
  const char* const op = kind == LayoutKind::packed ? "attention_varlen" : "attention_cached";
  AttentionProblem& p = call.p;
  if (kind == LayoutKind::paged) {
    const Tensor& table = side_tensor(op, aux, code[3]);
    return decode_pages(op, call, table, side_tensor(op, aux, code[3] + 1));
  }
  if (kind == LayoutKind::cached) {
    const Ints lengths =
        read_rows(op, "cache_seqlens", side_tensor(op, aux, code[3]), p.batch, p.tk);
    for (int64_t b = 0; b < p.batch; ++b) {
      call.sequences.push_back({b, b, 0, p.tq, 0, lengths[static_cast<size_t>(b)]});
    }
    return;
  }
  const Ints q = read_boundaries(op, "cu_seqlens_q", side_tensor(op, aux, code[3]), p.tq, code[1]);
  const Ints k =
      read_boundaries(op, "cu_seqlens_k", side_tensor(op, aux, code[3] + 1), p.tk, code[2]);
  require(q.size() == k.size(), op, "cu_seqlens_q and cu_seqlens_k must have the same length, got ",
          q.size(), " and ", k.size());
  for (size_t n = 0; n + 1 < q.size(); ++n) {
    call.sequences.push_back(
        {static_cast<int64_t>(n), 0, q[n], q[n + 1] - q[n], k[n], k[n + 1] - k[n]});
  }
  p.batch = static_cast<int64_t>(call.sequences.size());
  p.tq = code[1];
  p.tk = code[2];
}

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
  if (sequences.empty()) return {x};
  std::vector<Params> problems;
  for (const Sequence& s : sequences) {
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

// ---- entries ------------------------------------------------------------------------------------

void run_decode(std::vector<AttentionForwardParams> problems) {
  using Params = AttentionForwardParams;
  if (problems.empty()) return;
  const Tensor workspace = share_workspace(
      problems, [](const Params& x) { return decode_workspace_elements(x.problem); });
  const auto& kernels = attention_decode_kernels();
  run_stage(
      kernels.decode, problems, [](const Params& x) { return decode_items(x.problem); },
      largest(problems, [](const Params& x) { return decode_scratch_elements(x.problem); }));
  // Most merges take less time than it takes to open the pool.
  constexpr int64_t kLargeMerge = 1 << 18;
  const auto rows = [](const Params& x) { return merge_items(x.problem); };
  if (total(problems, [](const Params& x) {
        return merge_items(x.problem) * decode_splits(x.problem) * x.problem.dv;
      }) >= kLargeMerge) {
    run_stage(kernels.merge, problems, rows, 0);
  } else {
    for (const Params& x : problems) kernels.merge(x, 0, rows(x));
  }
}

void run_tiled(std::vector<AttentionForwardParams> problems) {
  using Params = AttentionForwardParams;
  if (problems.empty()) return;
  const auto& kernels = attention_forward_kernels(problems[0].problem.dtype);
  const int64_t scratch =
      largest(problems, [](const Params& x) { return forward_scratch_elements(x.problem); });
  const auto kv_heads = [](const Params& x) { return kv_head_items(x.problem); };
  if (has_heads_enough(problems, total(problems, kv_heads))) {
    run_stage(kernels.forward_heads, problems, kv_heads, scratch,
              largest(problems, [](const Params& x) { return packed_head_elements(x.problem); }));
  } else {
    const Tensor workspace = share_workspace(
        problems, [](const Params& x) { return forward_workspace_elements(x.problem); });
    run_stage(kernels.pack, problems, [](const Params& x) { return pack_items(x.problem); }, 0);
    run_stage(
        kernels.forward, problems, [](const Params& x) { return forward_items(x.problem); },
        scratch);
  }
}

void run_forward(AttentionForwardParams f, const Sequences& sequences) {
  const Tensor table = expand_table(f.problem);
  std::vector<AttentionForwardParams> tiled, decoded;
  Tensors gathered;
  for (AttentionForwardParams& x : problems_of(f, sequences)) {
    const bool decode = takes_decode_path_cpu(x.problem);
    if (x.problem.pages.table != nullptr && !decode) gather_pages(x.problem, gathered);
    (decode ? decoded : tiled).push_back(x);
  }
  run_decode(std::move(decoded));
  run_tiled(std::move(tiled));
}

// Problems that may run at the same time.
void run_together(std::vector<AttentionBackwardParams> problems) {
  using Params = AttentionBackwardParams;
  const auto& kernels = attention_backward_kernels(problems[0].problem.dtype);
  const int64_t scratch =
      largest(problems, [](const Params& x) { return backward_scratch_elements(x); });
  const auto owners = [](const Params& x) { return backward_owners(x); };
  if (largest(problems, [](const Params& x) { return x.splits; }) == 1 &&
      has_heads_enough(problems, total(problems, owners))) {
    run_stage(kernels.backward_heads, problems, owners, scratch,
              largest(problems, [](const Params& x) {
                return backward_workspace_elements(x, group_size(x.problem) * x.problem.tq);
              }));
  } else {
    const Tensor workspace = share_workspace(problems, [](const Params& x) {
      return backward_workspace_elements(x, query_rows(x.problem));
    });
    const auto query_blocks = [](const Params& x) { return forward_items(x.problem); };
    run_stage(kernels.prepare, problems, query_blocks, 0);
    run_stage(
        kernels.backward, problems, [](const Params& x) { return backward_items(x); }, scratch);
    run_stage(kernels.finish, problems, query_blocks, 0);
  }
}

void run_backward(AttentionBackwardParams x, const Sequences& sequences) {
  const Tensor table = expand_table(x.problem);
  const AttentionProblem& p = x.problem;
  auto problems = problems_of(x, sequences);
  const int64_t owners =
      total(problems, [](const AttentionBackwardParams& b) { return backward_owners(b); });
  Tensors parts;
  const auto part = [&](int64_t elements) {
    parts.push_back(buffer(elements, p.dtype));
    return parts.back().mutable_data_ptr();
  };
  for (AttentionBackwardParams& b : problems) {
    b.splits = backward_splits(b, owners);
    if (b.grad_table != nullptr) {
      b.part_relative_plane = plane_elements(p);
      b.part_relative = part(b.splits * table_parts(b) * p.hq * b.part_relative_plane);
      fill(parts.back(), 0);
    }
    if (b.grad_sinks != nullptr) b.part_sinks = part(forward_items(b.problem));
    if (b.grad_head_scale != nullptr) b.part_head_scale = part(forward_items(b.problem));
  }
  // Sequences that add to one bias gradient take turns.
  const bool shared = x.grad_bias != nullptr && x.grad_bias_stride_b == 0;
  if (shared && problems.size() > 1) {
    for (const AttentionBackwardParams& b : problems) run_together({b});
  } else if (!problems.empty()) {
    run_together(problems);
  }
  if (x.grad_table != nullptr) gather_table(x, problems);
  for (const AttentionBackwardParams& b : problems) {
    if (b.grad_sinks != nullptr) gather_heads(b.problem, b.part_sinks, b.grad_sinks);
    if (b.grad_head_scale != nullptr) {
      gather_heads(b.problem, b.part_head_scale, b.grad_head_scale);
    }
  }
}

void run_weights(AttentionWeightsParams w) {
  const Tensor table = expand_table(w.problem);
  run_stage(
      attention_weights_kernels().weights, std::vector{w},
      [](const AttentionWeightsParams& x) { return weights_items(x.problem); },
      weights_scratch_elements(w.problem));
}

void run_select(AttentionSelectParams x) {
  const Tensor table = expand_table(x.problem);
  run_stage(
      attention_select_kernels().select, std::vector{x},
      [](const AttentionSelectParams& y) { return forward_items(y.problem); },
      select_scratch_elements(x.problem));
}

}  // namespace
