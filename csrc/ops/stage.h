// A stage of an op on the CPU: the items of one or more problems, spread over the threads, each
// thread with its own memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "ops/parallel.h"
#include "ops/tensor.h"
#include "semantics/arith.h"

namespace omniattn::ops {

// Memory with a part for each thread, in whole cache lines. A little is in the object itself, since
// an allocation takes 0.3 us. From the size of a huge page on it uses huge pages, which are read
// from L3 at twice the rate of small ones.
class ThreadMemory {
 public:
  ThreadMemory(int64_t threads, int64_t bytes)
      : threads_(threads), bytes_(round_up(bytes, kLine)), first_(little_) {
    if (threads_ * bytes_ <= kLittle) return;
    memory_ = empty_tensor({(threads_ * bytes_ + padding()) / size_of(DType::f32)}, DType::f32);
    first_ = static_cast<char*>(memory_->mutable_data_ptr());
    if (padding() == 0) return;
    first_ += -reinterpret_cast<uintptr_t>(first_) % kHugePage;
    advise_huge_pages(first_, round_up(threads_ * bytes_, kHugePage));
  }
  ThreadMemory(const ThreadMemory&) = delete;
  ThreadMemory& operator=(const ThreadMemory&) = delete;

  int64_t threads() const { return threads_; }
  void* of(int64_t thread) const { return first_ + thread * bytes_; }

 private:
  static constexpr int64_t kLine = 64, kLittle = 4096, kHugePage = int64_t{1} << 21;
  // Room to align the start and to make the last page a whole one.
  int64_t padding() const { return threads_ * bytes_ < kHugePage ? 0 : 2 * kHugePage; }

  alignas(kLine) char little_[kLittle];
  int64_t threads_, bytes_;
  OptTensor memory_;
  char* first_;
};

// Calls kernel(problem, thread's memory, item, item + 1) for all items of all problems, handed out
// in order: put the longest first. `items(problem)` is the number of items.
template <class Params, class Items, class Kernel>
void run_stage(std::span<const Params> problems, const Items& items, const ThreadMemory& memory,
               const Kernel& kernel) {
  if (problems.size() == 1) {
    const int64_t count = items(problems[0]);
    parallel_queue(count, std::min(count, memory.threads()), [&](int64_t thread, int64_t item) {
      kernel(problems[0], memory.of(thread), item, item + 1);
    });
    return;
  }
  std::vector<int64_t> ends;  // end of each problem's items
  for (const Params& x : problems) ends.push_back((ends.empty() ? 0 : ends.back()) + items(x));
  const int64_t count = ends.empty() ? 0 : ends.back();
  parallel_queue(count, std::min(count, memory.threads()), [&](int64_t thread, int64_t item) {
    const auto n =
        static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), item) - ends.begin());
    const int64_t local = n == 0 ? item : item - ends[n - 1];
    kernel(problems[n], memory.of(thread), local, local + 1);
  });
}

// Runs a stage of one problem, with `bytes` of memory for each thread.
template <class Params, class Kernel>
void run_items(const Params& x, int64_t items, int64_t bytes, const Kernel& kernel) {
  const int64_t threads = std::min<int64_t>(items, torch::stable::get_num_threads());
  const ThreadMemory memory(std::max<int64_t>(1, threads), bytes);
  run_stage(std::span(&x, 1), [items](const Params&) { return items; }, memory, kernel);
}

}  // namespace omniattn::ops
