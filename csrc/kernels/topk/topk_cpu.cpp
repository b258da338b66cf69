// top_k as a tournament. The row is kept together with lane-wise maxima of groups of
// vectors, so that finding the largest element reads only the maxima and one group. NaN,
// masked and taken elements are stored as -inf; elements that are really NaN or -inf are
// looked up only when no number is left.
#include "kernels/topk/topk.h"

#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "runtime/vec.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Lane-wise maxima over whole vectors, in two chains that hide the latency of max.
template <class C>
OMNIATTN_INLINE Vec<C> lane_maxima(const C* begin, const C* end) {
  constexpr int kWidth = Vec<C>::kWidth;
  Vec<C> even = load(begin), odd = even;
  for (begin += kWidth; begin + kWidth < end; begin += 2 * kWidth) {
    even = max(even, load(begin));
    odd = max(odd, load(begin + kWidth));
  }
  if (begin < end) even = max(even, load(begin));
  return max(even, odd);
}

// The first vector that holds x; there must be one.
template <class C>
OMNIATTN_INLINE const C* find_vector(const C* begin, C x) {
  while (!any(load(begin) == Vec<C>(x))) begin += Vec<C>::kWidth;
  return begin;
}

template <class S>
class Tournament {
  using C = compute_t<S>;
  using V = Vec<C>;
  static constexpr int kWidth = V::kWidth;

 public:
  static constexpr C kNone = -__builtin_inf();

  OMNIATTN_INLINE Tournament(const S* scores, const uint8_t* mask, int64_t n, void* scratch)
      : maxima_(static_cast<C*>(scratch)),
        groups_(ceil_div(n, kTopKGroup)),
        row_(maxima_ + groups_ * kWidth) {
    C* end = row_;
    for (int64_t i = 0; i < n; i += kWidth, end += kWidth) {
      const V x = load_n(scores + i, n - i);
      auto keep = lanes_below<C>(n - i) & (x == x);
      if (mask != nullptr) keep = keep & load_mask_n<C>(mask + i, n - i);
      store(end, select(keep, x, V(kNone)));
    }
    end_ = end;
    for (int64_t g = 0; g < groups_; ++g) update(g);
  }

  OMNIATTN_INLINE C largest() const {
    return reduce_max(lane_maxima(maxima_, maxima_ + groups_ * kWidth));
  }
  // Removes the first element equal to x and returns its index.
  OMNIATTN_INLINE int64_t take(C x) {
    const int64_t g = (find_vector(maxima_, x) - maxima_) / kWidth;
    const int64_t at = find_vector<C>(row_ + g * kTopKGroup, x) - row_;
    const V v = load(row_ + at);
    const int lane = first(v == V(x));
    store(row_ + at, select(lane_index<C>() == V(C(lane)), V(kNone), v));
    update(g);
    return at + lane;
  }

 private:
  OMNIATTN_INLINE void update(int64_t g) {
    const C *const begin = row_ + g * kTopKGroup, *const end = begin + kTopKGroup;
    store(maxima_ + g * kWidth, lane_maxima(begin, end < end_ ? end : end_));
  }

  C* maxima_;  // one vector per group
  int64_t groups_;
  C *row_, *end_;
};

template <class S>
void top_k_row(const S* scores, const uint8_t* mask, int64_t n, int64_t k, void* scratch,
               int64_t* list) {
  using Row = Tournament<S>;
  if (k == 0) return;
  int64_t count = 0;
  Row row(scores, mask, n, scratch);
  for (; count < k; ++count) {
    const auto x = row.largest();
    if (x == Row::kNone) break;
    list[count] = row.take(x);
  }
  const auto append = [&](auto wanted) {
    for (int64_t i = 0; i < n && count < k; ++i) {
      if (wanted(widen(scores[i])) && (mask == nullptr || mask[i] != 0)) list[count++] = i;
    }
  };
  append([](auto x) { return x == Row::kNone; });
  append([](auto x) { return x != x; });
  while (count < k) list[count++] = -1;
}

void top_k(const TopKParams& p, void* scratch, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT(0 <= begin && begin <= end && 0 <= p.k && p.k <= p.n);
  OMNIATTN_ASSERT_HAS(scratch, p.k);
  dispatch(p.dtype, [&]<class S>(S) {
    for (int64_t row = begin; row < end; ++row) {
      top_k_row(static_cast<const S*>(p.scores) + row * p.scores_stride,
                p.mask != nullptr ? p.mask + row * p.mask_stride : nullptr, p.n, p.k, scratch,
                p.index + row * p.k);
    }
  });
}

}  // namespace

extern const TopKKernels topk_kernels_table;
const TopKKernels topk_kernels_table{top_k};

}  // namespace omniattn::OMNIATTN_ISA
