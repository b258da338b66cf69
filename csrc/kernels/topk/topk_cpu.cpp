#include "kernels/topk/topk.h"

#include "runtime/dispatch.h"
#include "runtime/row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class C>
OMNIATTN_INLINE bool below(C a, C b) {
  return a < b || (a != a && b == b);
}

// Puts element i into the list of `count` indices; the last of a full list falls out.
template <class S>
OMNIATTN_INLINE int64_t insert(const S* scores, int64_t i, int64_t* list, int64_t count,
                               int64_t k) {
  const auto score = widen(scores[i]);
  int64_t at = count;
  while (at > 0 && below(widen(scores[list[at - 1]]), score)) --at;
  if (at == k) return count;
  const int64_t last = count < k ? count : k - 1;
  for (int64_t j = last; j > at; --j) list[j] = list[j - 1];
  list[at] = i;
  return last + 1;
}

template <class S>
void top_k_row(const S* scores, const uint8_t* mask, int64_t n, int64_t k, int64_t* list) {
  using V = Vec<compute_t<S>>;
  int64_t count = 0;
  for (int64_t i = 0; i < n && k > 0;) {
    if (count == k && i + V::kWidth <= n &&
        all(load(scores + i) <= V(widen(scores[list[k - 1]])))) {
      i += V::kWidth;
      continue;
    }
    const int64_t end = i + V::kWidth < n ? i + V::kWidth : n;
    for (; i < end; ++i) {
      if (mask == nullptr || mask[i] != 0) count = insert(scores, i, list, count, k);
    }
  }
  for (int64_t j = count; j < k; ++j) list[j] = -1;
}

void top_k(const TopKParams& p, int64_t begin, int64_t end) {
  dispatch(p.dtype, [&]<class S>(S) {
    for (int64_t row = begin; row < end; ++row) {
      top_k_row(static_cast<const S*>(p.scores) + row * p.scores_stride,
                p.mask != nullptr ? p.mask + row * p.mask_stride : nullptr, p.n, p.k,
                p.index + row * p.k);
    }
  });
}

}  // namespace

extern const TopKKernels topk_kernels_table;
const TopKKernels topk_kernels_table{top_k};

}  // namespace omniattn::OMNIATTN_ISA
