// Order of the rows and experts of a mixture of experts, on the CPU.
#pragma once

#include <vector>

#include "ops/layers/moe.h"

namespace omniattn::ops::moe {

// Consecutive experts whose intermediate arrays fit into a fixed size; at least one expert.
struct Wave {
  int64_t first_expert, experts;
  int64_t row, rows;
  std::vector<MoeBlock> blocks;  // rows counted from `row`, largest block first
};

// The (token, slot) pairs, stably sorted by expert: expert e has rows offsets[e] .. offsets[e + 1].
struct Routing {
  std::vector<int64_t> offsets, token_of_row, slot_of_row, row_of_slot;

  explicit Routing(const Problem& p);
  int64_t rows() const { return offsets.back(); }
  const int64_t* tokens_of(const Wave& wave) const { return token_of_row.data() + wave.row; }
};

std::vector<Wave> waves(const Routing& routing, int64_t bytes_per_row);
int64_t most_rows(const std::vector<Wave>& all);

}  // namespace omniattn::ops::moe
