// Shared by the scan ops: rows of sequences, states, and results.
#pragma once

#include "kernels/scan/scan.h"

#include <algorithm>
#include <array>
#include <vector>

#include "kernels/sums/sums.h"
#include "ops/sequence_problem.h"

namespace omniattn::ops {

// x (B, T, ..) as rows of C adjacent numbers: a copy if they are not adjacent.
struct ScanInput {
  Tensor tensor;

  ScanInput(const char* op, const char* name, const Tensor& t, DType dtype, Sizes sizes)
      : tensor(t) {
    require_tensor(op, name, t, dtype);
    require_sizes(op, name, t, sizes);
    int64_t stride = 1;
    for (int64_t i = t.dim() - 1; i >= 2; --i) {
      if (t.size(i) > 1 && t.stride(i) != stride) {
        tensor = torch::stable::contiguous(t);
        break;
      }
      stride *= t.size(i);
    }
  }
  ScanView view() const { return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1)}; }
};

struct ScanProblem : SequenceProblem {
  using SequenceProblem::SequenceProblem;

  ScanRows rows() const { return {sequences, steps, packed.rows.q}; }

  // Channels per item on the CPU: gives each thread a few items, of at most `most` channels.
  int64_t block(int64_t channels, int64_t most) const {
    constexpr int64_t kLeast = 64;
    const int64_t items = 4 * static_cast<int64_t>(torch::stable::get_num_threads());
    const int64_t parts = ceil_div(items, std::max<int64_t>(1, sequences));
    return std::clamp(round_up(ceil_div(channels, parts), kLeast), kLeast, most);
  }

  // Adds `shards` partial sums in A, `stride` elements apart, starting
  // with those at element `first`.
  void sum_shards(const Tensor& partial, int64_t first, int64_t shards, int64_t stride,
                  int64_t size, void* out) const {
    const void* const from =
        static_cast<const char*>(partial.const_data_ptr()) + first * size_of(acc);
    if constexpr (kOnCuda) {
      launch_sum_shards(acc, from, shards, stride, size, out, stream());
    } else {
      sum_kernels(acc).sum_shards(acc, from, shards, stride, size, out);
    }
  }
};

}  // namespace omniattn::ops
