// attention, attention_backward, attention_weights and attention_select on CUDA.
#include "kernels/attention/attention_cuda.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "ops/attention/attention.h"
#include "ops/attention/attention_torch.h"
#include "ops/device.h"
#include "ops/path.h"

namespace omniattn::ops::attention {
namespace {

Tensor buffer(int64_t elements, DType dtype) {
  return empty_tensor({elements}, accumulator(dtype));
}

// Expands the table term into the returned memory and points `relative` to it.
Tensor expand_table(const char* op, AttentionProblem& p) {
  if (p.table.kind == ScoreKind::none || p.tk == 0) return buffer(0, p.dtype);
  const Tensor memory = buffer(attention_table_elements(p), p.dtype);
  require_launched(op, launch_attention_expand_table(p, memory.mutable_data_ptr(), stream()));
  p.relative = attention_relative_view(p, memory.const_data_ptr());
  return memory;
}

// Copies `program`, its steps and its constants to the returned GPU memory, and points p to it.
Tensor upload_program(const char* op, AttentionProblem& p) {
  if (p.program == nullptr) return buffer(0, p.dtype);
  const ScoreProgram& from = *p.program;
  ProgramRun runs[] = {from.forward, from.value, from.gradient};
  int64_t steps = 0;
  for (const ProgramRun& run : runs) steps += run.count;
  const int64_t steps_at = round_up(int64_t{sizeof(ScoreProgram)}, 8);
  const int64_t constants_at = round_up(steps_at + steps * int64_t{sizeof(ProgramStep)}, 8);
  const int64_t bytes = constants_at + from.constant_count * int64_t{sizeof(double)};
  const Tensor memory = empty_tensor({ceil_div(bytes, 8)}, DType::f64);
  auto* const to = static_cast<char*>(memory.mutable_data_ptr());
  ScoreProgram program = from;
  int64_t at = steps_at;
  for (ProgramRun* run : {&program.forward, &program.value, &program.gradient}) {
    run->steps = reinterpret_cast<const ProgramStep*>(to + at);
    at += run->count * int64_t{sizeof(ProgramStep)};
  }
  program.constants = reinterpret_cast<const double*>(to + constants_at);
  std::vector<char> image(static_cast<size_t>(bytes));
  std::memcpy(image.data(), &program, sizeof(program));
  std::memcpy(image.data() + steps_at, from.forward.steps,
              static_cast<size_t>(steps) * sizeof(ProgramStep));
  std::memcpy(image.data() + constants_at, from.constants,
              static_cast<size_t>(from.constant_count) * sizeof(double));
  require_launched(op, launch_attention_upload(image.data(), bytes, to, stream()));
  p.program = reinterpret_cast<const ScoreProgram*>(to);
  return memory;
}

// Computes the gradients of the tables of `program`, which is in CPU memory.
void run_program_gradients(const char* op, const AttentionBackwardParams& b,
                           const ScoreProgram& program) {
  Tensors parts(kMaxProgramTables);
  ProgramGradients gradients = *b.grad_program;
  for (size_t n = 0; n < parts.size(); ++n) {
    ProgramGradients::Table& table = gradients.tables[n];
    if (table.whole.data == nullptr || table.elements == 0) continue;
    parts[n] = buffer(attention_program_parts(b.problem) * table.elements, b.problem.dtype);
    torch::stable::fill_(parts[n], 0);
    table.whole.data = parts[n].mutable_data_ptr();
  }
  for (int64_t n = 0; n < program.gradient.count; ++n) {
    const ProgramStep& step = program.gradient.steps[n];
    if (step.op != ProgramOp::give && step.op != ProgramOp::give_at) continue;
    const ProgramGradients::Table& table =
        gradients.tables[step.op == ProgramOp::give ? step.b : step.c];
    if (table.whole.data == nullptr) continue;
    require_launched(op, launch_attention_program_gradient(b, table, n, stream()));
  }
  for (size_t n = 0; n < parts.size(); ++n) {
    const ProgramGradients::Table& table = gradients.tables[n];
    if (table.whole.data == nullptr || table.elements == 0) continue;
    require_launched(op,
                     launch_attention_sum_parts(b.problem, table.whole.data, table.elements,
                                                b.grad_program->tables[n].whole.data, stream()));
  }
}

// True if the call is decoded, by the kernel that reads pages and int8 in place.
bool takes_split(const AttentionProblem& p) {
  return p.program == nullptr && weighs_by_key(p.score) && takes_split_path(p);
}

// Copies k and v in pages or in int8 into the returned memory and points k and v to it.
Tensors gather_rows(const char* op, AttentionProblem& p) {
  if ((p.pages.table == nullptr && !p.is_int8) || takes_split(p)) return {};
  const auto gather = [&](const HeadView& from, const HeadView& factors, int64_t width) {
    const int64_t sizes[] = {p.batch, p.tk, p.hkv, width};
    const Tensor rows = empty_tensor({sizes, 4}, p.dtype);
    require_launched(op, launch_attention_gather_rows(p, from, factors, width,
                                                      rows.mutable_data_ptr(), stream()));
    return rows;
  };
  const Tensors memory = {gather(p.k, p.k_scale, p.d), gather(p.v, p.v_scale, p.dv)};
  p.k = view_of(memory[0]);
  p.v = view_of(memory[1]);
  p.pages = {};
  p.is_int8 = false;
  return memory;
}

// Gradients of q, k and v where weights break a stick.
Status run_stick_gradients(AttentionBackwardParams& b) {
  const AttentionProblem& p = b.problem;
  require(b.grad_bias == nullptr && b.grad_table == nullptr && b.grad_head_scale == nullptr &&
              p.program == nullptr && !has_distance_rows(p),
          "attention_backward",
          "with stick_breaking CUDA has gradients of q, k and v only, and none with a score_mod or "
          "rows of distances");
  const Tensor states[] = {buffer(attention_stick_states(p), p.dtype),
                           buffer(attention_stick_states(p), p.dtype)};
  const Tensor checkpoints = buffer(attention_stick_checkpoints(p), p.dtype);
  const Tensor sums = buffer(attention_stick_sums(p), p.dtype);
  Status status = nullptr;
  for (int64_t n = 0; status == nullptr && n * kStickKeys < std::max<int64_t>(p.tk, 1); ++n) {
    const Range keys = intersect({n * kStickKeys, (n + 1) * kStickKeys}, {0, p.tk});
    const StickSegment segment{keys, states[n % 2].const_data_ptr(),
                               states[(n + 1) % 2].mutable_data_ptr(),
                               checkpoints.mutable_data_ptr(), sums.mutable_data_ptr()};
    status = launch_attention_stick_gradients(b, segment, stream());
  }
  return status;
}

Status run_split(AttentionForwardParams& f) {
  const Tensor workspace = buffer(attention_decode_workspace(f.problem), f.problem.dtype);
  f.workspace = workspace.mutable_data_ptr();
  return launch_attention_decode(f, stream());
}

// A call with its parameters for our kernels, or with its results by a kernel of torch.
struct ForwardRun {
  const Call& call;
  AttentionForwardParams* ours;
  std::optional<TorchResults> found;
};
struct BackwardRun {
  const Call& call;
  AttentionBackwardParams& ours;
  const TorchBackward* in_torch;
  std::optional<TorchGradients> found;
};

const PathTable<const char*(const Call&, const AttentionProblem&), Status(ForwardRun&)>
    kForwardPaths(
        "attention",
        {
            {"split",
             [](const Call&, const AttentionProblem& p) { return refused_unless(takes_split(p)); },
             [](ForwardRun& f) { return run_split(*f.ours); }},
            {"torch_cudnn",
             [](const Call& call, const AttentionProblem&) { return why_not_cudnn(call); },
             [](ForwardRun& f) {
               f.found = run_cudnn(f.call);
               return Status{};
             }},
            {"torch_flash",
             [](const Call& call, const AttentionProblem&) { return why_not_flash(call); },
             [](ForwardRun& f) {
               f.found = run_flash(f.call);
               return Status{};
             }},
            {"stick",
             [](const Call&, const AttentionProblem& p) {
               return refused_unless(is_stick(p.score));
             },
             [](ForwardRun& f) { return launch_attention_stick(*f.ours, stream()); }},
            {"mma",
             [](const Call&, const AttentionProblem& p) {
               return refused_unless(p.program == nullptr && weighs_by_key(p.score) &&
                                     takes_mma_path(p));
             },
             [](ForwardRun& f) { return launch_attention_mma(*f.ours, stream()); }},
            {"fma", [](const Call&, const AttentionProblem&) { return refused_unless(true); },
             [](ForwardRun& f) { return launch_attention(*f.ours, stream()); }},
        });

const PathTable<const char*(const Call&, const AttentionBackwardParams&), Status(BackwardRun&)>
    kBackwardPaths(
        "attention_backward",
        {
            {"torch_flash",
             [](const Call& call, const AttentionBackwardParams& b) {
               return b.grad_lse != nullptr ? "lse has a gradient" : why_not_flash(call);
             },
             [](BackwardRun& b) {
               b.found = run_flash(b.call, *b.in_torch);
               return Status{};
             }},
            {"stick",
             [](const Call&, const AttentionBackwardParams& b) {
               return refused_unless(is_stick(b.problem.score));
             },
             [](BackwardRun& b) { return run_stick_gradients(b.ours); }},
            {"mma",
             [](const Call&, const AttentionBackwardParams& b) {
               return refused_unless(b.problem.program == nullptr &&
                                     weighs_by_key(b.problem.score) && takes_mma_path(b));
             },
             [](BackwardRun& b) { return launch_attention_gradients_mma(b.ours, stream()); }},
            {"fma",
             [](const Call&, const AttentionBackwardParams&) { return refused_unless(true); },
             [](BackwardRun& b) { return launch_attention_gradients(b.ours, stream()); }},
        });

// Runs a call by the first path that takes it, if that is one of torch's.
template <class Table, class Run, class... Problem>
void run_in_torch(const Table& table, Run& run, const Problem&... problem) {
  for (const auto& path : table) {
    if (table.refusal(path, problem...) != nullptr) continue;
    if (is_torch_path(path.name)) table.first(problem...).run(run);
    return;
  }
}

}  // namespace

std::optional<TorchResults> run_forward_in_torch(const Call& call) {
  ForwardRun run{call, nullptr, std::nullopt};
  run_in_torch(kForwardPaths, run, call, call.problem);
  return run.found;
}

std::optional<TorchGradients> run_backward_in_torch(const Call& call, AttentionBackwardParams& b,
                                                    const TorchBackward& tensors) {
  BackwardRun run{call, b, &tensors, std::nullopt};
  run_in_torch(kBackwardPaths, run, call, b);
  return run.found;
}

// A seed on the CPU is fixed when a graph is captured; a seed on the GPU is read at each replay.
void decode_seed(Call& call, const Tensor& seed) {
  if (!is_here(seed)) return read_seed(call, seed);
  call.kept.push_back(torch::stable::contiguous(seed));
  call.problem.seed = static_cast<const int64_t*>(call.kept.back().const_data_ptr());
}

void run_forward(AttentionForwardParams f, const Call& call) {
  constexpr const char* op = "attention";
  const Tensor program = upload_program(op, f.problem);
  const Tensors rows = gather_rows(op, f.problem);
  const Tensor table = expand_table(op, f.problem);
  ForwardRun run{call, &f, std::nullopt};
  require_launched(op, kForwardPaths.first(call, f.problem).run(run));
}

void run_backward(AttentionBackwardParams b, const Call& call) {
  constexpr const char* op = "attention_backward";
  const ScoreProgram* const steps = b.problem.program;
  const Tensor program = upload_program(op, b.problem);
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
  BackwardRun gradients{call, b, nullptr, std::nullopt};
  run(kBackwardPaths.first(call, b).run(gradients));
  if (b.grad_sinks != nullptr) {
    run(launch_attention_sum_rows(p, b.part_sinks, 1, b.grad_sinks, stream()));
  }
  if (b.grad_head_scale != nullptr) {
    run(launch_attention_sum_rows(p, b.part_head_scale, head_scale_parts, b.grad_head_scale,
                                  stream()));
  }
  if (p.tk == 0) return;
  if (b.grad_program != nullptr) run_program_gradients(op, b, *steps);
  if (b.grad_bias != nullptr) run(launch_attention_bias_gradient(b, stream()));
  b.part_relative_keys = part(b.grad_relative_keys, attention_distance_parts(p));
  b.part_relative_queries = part(b.grad_relative_queries, attention_distance_parts(p));
  run(launch_attention_distance_gradients(b, stream()));
  if (b.grad_table != nullptr) {
    b.part_relative = part(b.grad_table, attention_table_parts(p));
    run(launch_attention_table_gradient(b, stream()));
  }
}

void run_weights(AttentionWeightsParams w) {
  constexpr const char* op = "attention_weights";
  const Tensor program = upload_program(op, w.problem);
  const Tensor table = expand_table(op, w.problem);
  require_launched(op, launch_attention_weights(w, stream()));
}

void run_select(AttentionSelectParams x) {
  constexpr const char* op = "select_attention";
  const Tensor program = upload_program(op, x.problem);
  const Tensor table = expand_table(op, x.problem);
  require_launched(op, launch_attention_select(x, stream()));
}

}  // namespace omniattn::ops::attention
