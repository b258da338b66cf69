// Work on torch's thread pool. Results must not depend on which thread runs an item.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace omniattn::ops {

// Elements in a task of a light kernel, so that a task costs more than its dispatch.
inline constexpr int64_t kTaskElements = 16384;

// Number of items in a task of about `task` elements.
inline int64_t grain_of(int64_t elements_per_item, int64_t task = kTaskElements) {
  return std::max<int64_t>(1, task / std::max<int64_t>(1, elements_per_item));
}

// Calls f(begin, end) for contiguous ranges of at least `grain` items; a single one runs in place,
// since opening the pool takes 2 us. f must not throw: an exception in the pool loses its text.
template <class F>
void parallel_ranges(int64_t items, int64_t grain, const F& f) {
  if (items <= 0) return;
  if (items <= grain) {
    f(int64_t{0}, items);
  } else {
    torch::stable::parallel_for(0, items, grain, f);
  }
}

// Runs a kernel over the items of a problem, with few elements each.
template <class Params>
void run_items(const Params& p, int64_t items, int64_t elements_per_item,
               void (*kernel)(const Params&, int64_t begin, int64_t end)) {
  parallel_ranges(items, grain_of(elements_per_item),
                  [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
}

// Calls f(s, begin, end) for the shards `items * s / shards`. The split depends on the shape only,
// so that partial sums kept per shard give the same total for any number of threads.
template <class F>
void parallel_shards(int64_t items, int64_t shards, const F& f) {
  parallel_ranges(shards, 1, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      f(s, items * s / shards, items * (s + 1) / shards);
    }
  });
}

// Calls f(thread, item); items are handed out one by one in order: put the longest first. `thread`,
// in [0, threads), selects the caller's memory for a thread; results must not depend on it.
template <class F>
void parallel_queue(int64_t items, int64_t threads, const F& f) {
  if (threads <= 1) {
    for (int64_t i = 0; i < items; ++i) f(int64_t{0}, i);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    for (int64_t thread = first; thread < last; ++thread) {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) f(thread, i);
    }
  });
}

}  // namespace omniattn::ops
