// Gradients that several items of a kernel on the CPU share: each item has a part, and the parts
// are added in order.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/sums/sums.h"
#include "ops/device.h"

namespace omniattn::ops {

class Shards {
 public:
  // `count` parts of gradients of `dtype`, which are in its accumulator type unless there is one.
  Shards(DType dtype, int64_t count) : dtype_(dtype), acc_(accumulator(dtype)), count_(count) {}

  int64_t count() const { return count_; }
  // Memory for the parts of a gradient, which items set; null if it is not wanted.
  void* parts_of(const Output& gradient) {
    if (count_ == 1 || gradient.data() == nullptr) return gradient.data();
    const Tensor out = gradient.tensor();
    pairs_.push_back({out, scratch(count_ * out.numel(), acc_)});
    return pairs_.back().parts.mutable_data_ptr();
  }
  // Memory for parts to which items add: in the accumulator type, 0 at first.
  void* zeros_of(const Output& gradient) {
    if (gradient.data() == nullptr) return nullptr;
    Tensor parts = gradient.tensor();
    if (count_ > 1 || dtype_ != acc_) {
      parts = scratch(count_ * parts.numel(), acc_);
      pairs_.push_back({gradient.tensor(), parts});
    }
    torch::stable::zero_(parts);
    return parts.mutable_data_ptr();
  }
  void sum() const {
    if constexpr (!kOnCuda) {
      for (const auto& [out, parts] : pairs_) sum(out, parts);
    }
  }

 private:
  struct Pair {
    Tensor out, parts;
  };

  void sum(Tensor out, const Tensor& parts) const {
    const int64_t count = out.numel(), element = size_of(acc_);
    const Tensor sums = dtype_ == acc_ ? out : empty_tensor(out.sizes(), acc_);
    const auto* const from = static_cast<const char*>(parts.const_data_ptr());
    char* const to = static_cast<char*>(sums.mutable_data_ptr());
    parallel_ranges(count, kTaskElements, [&](int64_t begin, int64_t end) {
      sum_kernels(acc_).sum_shards(acc_, from + begin * element, count_, count, end - begin,
                                   to + begin * element);
    });
    if (dtype_ != acc_) torch::stable::copy_(out, sums);
  }

  DType dtype_, acc_;
  int64_t count_;
  std::vector<Pair> pairs_;
};

}  // namespace omniattn::ops
