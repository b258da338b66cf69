// What the ops of scans share: rows of sequences, states, and results.
#pragma once

#include "kernels/scan/scan.h"

#include <algorithm>
#include <array>
#include <vector>

#include "ops/device.h"
#include "ops/sequences.h"
#include "ops/stage.h"

namespace omniattn::ops {

// x (B, T, ..) as rows of C numbers: a copy where these are not next to each other.
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

// What the forward and the backward of a scan over x (B, T, ..) share.
struct ScanProblem {
  const char* op;
  DType dtype, acc;
  int64_t batch, steps, sequences;
  Sequences packed;

  ScanProblem(const char* op_, const char* name, const Tensor& x, int64_t dims,
              const OptTensor& cu_seqlens)
      : op(op_), dtype(dtype_of(op, name, x)), acc(accumulator(dtype)) {
    require(x.dim() == dims, op, name, " must have ", dims, " dimensions, got ", x.dim());
    batch = x.size(0), steps = x.size(1), sequences = batch;
    if (cu_seqlens.has_value()) {
      require(batch == 1, op, name, " must have B=1 with cu_seqlens, got B=", batch);
      const PackedRows rows{"cu_seqlens", *cu_seqlens, steps, steps};
      packed = packed_sequences(op, rows, rows);
      sequences = packed.count;
    }
  }

  ScanRows rows() const { return {sequences, steps, packed.rows.q}; }

  // A dense tensor of A, such as states.
  OptTensor dense(const char* name, const OptTensor& t, Sizes sizes) const {
    if (!t.has_value()) return t;
    require_tensor(op, name, *t, acc);
    require_sizes(op, name, *t, sizes);
    return as_dense(*t);
  }

  // A result (B, T, ..), with zeros in the rows outside of all sequences.
  Output result(bool wanted, Sizes sizes, DType type) const {
    const Output out(wanted, sizes, type);
    const int64_t* const ends = packed.rows.q;
    const auto covered = [&] { return ends[0] == 0 && ends[sequences] == steps; };
    if (out.data() != nullptr && ends != nullptr && (kOnCuda || !covered())) {
      Tensor rows = out.tensor();
      torch::stable::fill_(rows, 0);
    }
    return out;
  }

  // Channels of an item on the CPU: a few items for each thread, and at most `most`.
  int64_t block(int64_t channels, int64_t most) const {
    constexpr int64_t kLeast = 64;
    const int64_t items = 4 * static_cast<int64_t>(torch::stable::get_num_threads());
    const int64_t parts = ceil_div(items, std::max<int64_t>(1, sequences));
    return std::clamp(round_up(ceil_div(channels, parts), kLeast), kLeast, most);
  }

  // kernel(params, memory, item, item + 1) for all items over the threads.
  template <class Params, class Kernel>
  void run(const Params& params, int64_t items, int64_t bytes, const Kernel& kernel) const {
    const ThreadMemory memory(std::min<int64_t>(items, torch::stable::get_num_threads()), bytes);
    run_stage(std::span(&params, 1), [&](const Params&) { return items; }, memory, kernel);
  }
};

}  // namespace omniattn::ops
