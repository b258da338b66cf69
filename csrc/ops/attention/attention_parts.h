// Gradients of a call's parameters on the CPU: tables, sinks, factors of heads, rows of distances,
// and tables of a program.
#pragma once

#include <span>

#include "ops/attention/attention.h"

namespace omniattn::ops::attention {

// Memory in which the problems of a call accumulate their partial gradients. Both must outlive it.
class GradientParts {
 public:
  // Points the problems to this memory; their `splits` must be set.
  GradientParts(const AttentionBackwardParams& whole, std::span<AttentionBackwardParams> problems);

  GradientParts(const GradientParts&) = delete;
  GradientParts& operator=(const GradientParts&) = delete;

  // Sums the parts in order.
  void gather() const;

 private:
  void* take(int64_t elements);
  void* take_zeros(int64_t elements);
  void give_program();
  void gather_table() const;
  void gather_distances() const;
  void gather_heads() const;
  void gather_program() const;

  const AttentionBackwardParams& whole_;
  std::span<AttentionBackwardParams> problems_;
  Tensors memory_;
  ProgramGradients program_{};  // problems point to it
  int64_t program_parts_[kMaxProgramTables] = {};
};

}  // namespace omniattn::ops::attention
