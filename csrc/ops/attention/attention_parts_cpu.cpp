#include <algorithm>

#include "kernels/attention/attention_sizes_cpu.h"
#include "kernels/attention/attention_terms.h"
#include "ops/attention/attention_parts.h"
#include "ops/parallel.h"
#include "ops/stage.h"

namespace omniattn::ops::attention {
namespace {

// Members of a distance term: its rows, their gradient and its parts.
struct DistanceGradient {
  DistanceRows AttentionProblem::* rows;
  void* AttentionBackwardParams::* grad;
  void* AttentionBackwardParams::* parts;
};
constexpr DistanceGradient kDistanceGradients[] = {
    {&AttentionProblem::relative_keys, &AttentionBackwardParams::grad_relative_keys,
     &AttentionBackwardParams::part_relative_keys},
    {&AttentionProblem::relative_queries, &AttentionBackwardParams::grad_relative_queries,
     &AttentionBackwardParams::part_relative_queries}};

}  // namespace

GradientParts::GradientParts(const AttentionBackwardParams& whole,
                             std::span<AttentionBackwardParams> problems)
    : whole_(whole), problems_(problems) {
  for (AttentionBackwardParams& b : problems) {
    if (b.grad_table != nullptr) {
      b.part_relative_plane = plane_elements(whole.problem);
      b.part_relative =
          take_zeros(b.splits * table_parts(b) * whole.problem.hq * b.part_relative_plane);
    }
    for (const DistanceGradient& d : kDistanceGradients) {
      if (b.*d.grad == nullptr) continue;
      const int64_t size = distance_part_elements(b.problem, b.problem.*d.rows);
      b.*d.parts = take_zeros(b.splits * distance_parts(b) * size);
    }
    if (b.grad_sinks != nullptr) b.part_sinks = take(forward_items(b.problem));
    if (b.grad_head_scale != nullptr) b.part_head_scale = take(forward_items(b.problem));
  }
  if (whole.grad_program != nullptr) give_program();
}

void GradientParts::gather() const {
  if (whole_.grad_table != nullptr) gather_table();
  gather_distances();
  gather_heads();
  if (whole_.grad_program != nullptr) gather_program();
}

void* GradientParts::take(int64_t elements) {
  memory_.push_back(empty_tensor({elements}, accumulator(whole_.problem.dtype)));
  return memory_.back().mutable_data_ptr();
}

void* GradientParts::take_zeros(int64_t elements) {
  void* const data = take(elements);
  torch::stable::fill_(memory_.back(), 0);
  return data;
}

void GradientParts::give_program() {
  program_ = *whole_.grad_program;
  for (int64_t n = 0; n < kMaxProgramTables; ++n) {
    ProgramGradients::Table& table = program_.tables[n];
    if (table.whole.data == nullptr || table.elements == 0) continue;
    for (const AttentionBackwardParams& b : problems_) {
      const AttentionProblem& p = b.problem;
      const int64_t last = program_part(b, table.has_heads, p.batch - 1, p.hkv - 1, b.splits - 1);
      program_parts_[n] = std::max(program_parts_[n], last + 1);
    }
    table.whole.data = take_zeros(program_parts_[n] * table.elements);
  }
  for (AttentionBackwardParams& b : problems_) b.grad_program = &program_;
}

void GradientParts::gather_table() const {
  const AttentionTableGradient g{&whole_, problems_.data(), static_cast<int64_t>(problems_.size())};
  const int64_t items = table_heads(whole_.problem);
  const int64_t grain = grain_of(plane_elements(whole_.problem));
  const ThreadMemory memory(
      std::min(ceil_div(items, grain), int64_t{torch::stable::get_num_threads()}),
      gather_scratch_bytes(whole_.problem));
  run_stage(
      std::span(&g, 1), [&](const AttentionTableGradient&) { return items; }, memory,
      attention_terms_kernels(whole_.problem.dtype).gather_table);
}

void GradientParts::gather_distances() const {
  const AttentionProblem& p = whole_.problem;
  for (const DistanceGradient& d : kDistanceGradients) {
    if (whole_.*d.grad == nullptr) continue;
    const auto count = static_cast<int64_t>(problems_.size());
    const AttentionDistanceGradient g{&whole_, problems_.data(), count, d.rows, d.parts, d.grad};
    parallel_ranges((p.*d.rows).rows, grain_of(p.hq * p.d * count),
                    [&](int64_t begin, int64_t end) {
                      attention_terms_kernels(p.dtype).gather_distances(g, begin, end);
                    });
  }
}

void GradientParts::gather_heads() const {
  for (const AttentionBackwardParams& b : problems_) {
    const auto gather = [&](const void* parts, void* grad) {
      if (grad == nullptr) return;
      parallel_ranges(b.problem.hq, grain_of(forward_items(b.problem) / b.problem.hq),
                      [&](int64_t begin, int64_t end) {
                        attention_terms_kernels(b.problem.dtype)
                            .gather_heads(b.problem, parts, grad, begin, end);
                      });
    };
    gather(b.part_sinks, b.grad_sinks);
    gather(b.part_head_scale, b.grad_head_scale);
  }
}

void GradientParts::gather_program() const {
  const DType dtype = whole_.problem.dtype;
  for (int64_t n = 0; n < kMaxProgramTables; ++n) {
    const int64_t count = program_parts_[n], size = program_.tables[n].elements;
    if (count == 0) continue;
    const void* const parts = program_.tables[n].whole.data;
    void* const whole = whole_.grad_program->tables[n].whole.data;
    parallel_ranges(size, grain_of(count), [&](int64_t begin, int64_t end) {
      score_program_kernels(dtype).sum_parts(dtype, parts, count, size, whole, begin, end);
    });
  }
}

}  // namespace omniattn::ops::attention
