// Orders the work of a mixture of experts on the CPU.
#include "ops/layers/moe_routing.h"

#include <algorithm>

namespace omniattn::ops::moe {
namespace {

// Bytes of intermediate arrays of the experts of a wave; more would only cost memory.
constexpr int64_t kWaveBytes = int64_t{32} << 20;

}  // namespace

Routing::Routing(const Problem& p)
    : offsets(static_cast<size_t>(p.experts) + 1, 0), row_of_slot(p.pairs(), -1) {
  const auto* const experts_of = static_cast<const int64_t*>(p.index.const_data_ptr());
  const int64_t count = p.pairs();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t e = experts_of[i];
    require(e >= -1 && e < p.experts, p.op, "index must be in [0, ", p.experts,
            ") or -1 for none, got index=", e, " at flat position ", i);
    if (e >= 0) ++offsets[e + 1];
  }
  for (int64_t e = 0; e < p.experts; ++e) offsets[e + 1] += offsets[e];
  std::vector<int64_t> next(offsets.begin(), offsets.end() - 1);
  token_of_row.resize(rows());
  slot_of_row.resize(rows());
  for (int64_t i = 0; i < count; ++i) {
    if (experts_of[i] < 0) continue;
    const int64_t row = next[experts_of[i]]++;
    token_of_row[row] = i / p.slots;
    slot_of_row[row] = i;
    row_of_slot[i] = row;
  }
}

std::vector<Wave> waves(const Routing& routing, int64_t bytes_per_row) {
  const int64_t limit = std::max<int64_t>(1, kWaveBytes / std::max<int64_t>(1, bytes_per_row));
  std::vector<Wave> result;
  const auto experts = static_cast<int64_t>(routing.offsets.size()) - 1;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t begin = routing.offsets[e], rows = routing.offsets[e + 1] - begin;
    if (result.empty() || begin + rows - result.back().row > limit) {
      result.push_back({e, 0, begin, 0, {}});
    }
    Wave& wave = result.back();
    const int64_t pieces = ceil_div(rows, kMoeBlockRows);
    for (int64_t i = 0; i < pieces; ++i) {
      const int64_t from = rows * i / pieces, to = rows * (i + 1) / pieces;
      wave.blocks.push_back({e, begin + from - wave.row, to - from});
    }
    ++wave.experts;
    wave.rows += rows;
  }
  for (Wave& wave : result) {
    std::stable_sort(wave.blocks.begin(), wave.blocks.end(),
                     [](const MoeBlock& a, const MoeBlock& b) { return a.rows > b.rows; });
  }
  return result;
}

int64_t most_rows(const std::vector<Wave>& all) {
  int64_t rows = 0;
  for (const Wave& wave : all) rows = std::max(rows, wave.rows);
  return rows;
}

}  // namespace omniattn::ops::moe
