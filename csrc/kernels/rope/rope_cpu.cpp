// Rotary position embedding, see rope.h.
#include "kernels/rope/rope.h"

#include <cstddef>
#include <type_traits>

#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "runtime/row.h"
#include "semantics/rope.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Stores rotated and copied elements; aligned whole vectors may bypass the caches.
template <class T>
struct Store {
  bool past_caches;

  explicit Store(const RopeParams& p) : past_caches(p.past_caches) {
    constexpr int64_t kWidth = Vec<compute_t<T>>::kWidth;
    past_caches &= (p.start | p.half | p.dim) % kWidth == 0;
    for (int32_t k = 0; k < p.tensor_count; ++k) {
      const auto address = reinterpret_cast<uintptr_t>(p.tensors[k].out);
      past_caches &= address % (kWidth * sizeof(T)) == 0;
    }
  }
  OMNIATTN_INLINE void operator()(auto part, T* to, Vec<compute_t<T>> x) const {
    if constexpr (std::is_same_v<decltype(part), Whole>) {
      if (past_caches) return stream(to, x);
    }
    part.store(to, x);
  }
  OMNIATTN_INLINE void copy(const T* from, T* to, int64_t n) const {
    if (!past_caches) {
      __builtin_memcpy(to, from, static_cast<std::size_t>(n) * sizeof(T));
    } else {
      for_row<T>(n, [&](int64_t i, auto part) { (*this)(part, to + i, part.load(from + i)); });
    }
  }
};

// Rotates the pairs of one head. `sign` is -1 for the negative angle.
template <class T, bool kInterleaved>
OMNIATTN_INLINE void rotate_head(const T* in, T* out, const compute_t<T>* cos,
                                 const compute_t<T>* sin, int64_t half, Vec<compute_t<T>> sign,
                                 const Store<T>& store) {
  constexpr int kWidth = Vec<compute_t<T>>::kWidth;
  for_row<T>(half, [&](int64_t i, auto part) {
    const auto c = part.load(cos + i), s = sign * part.load(sin + i);
    if constexpr (kInterleaved) {
      const auto first = part.first_of_pairs();
      const auto second = part.template second_of_pairs<compute_t<T>>();
      const auto [x, y] = deinterleave(first.load(in + 2 * i), second.load(in + 2 * i + kWidth));
      const auto [low, high] = interleave(rope_x(x, y, c, s), rope_y(x, y, c, s));
      store(first, out + 2 * i, low);
      store(second, out + 2 * i + kWidth, high);
    } else {
      const auto x = part.load(in + i), y = part.load(in + half + i);
      store(part, out + i, rope_x(x, y, c, s));
      store(part, out + half + i, rope_y(x, y, c, s));
    }
  });
}

template <class T, bool kInterleaved>
void rotate(const RopeParams& p, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  const Vec<C> sign(p.inverse ? C(-1) : C(1));
  const int64_t after = p.start + 2 * p.half;
  const Store<T> store(p);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t b = item / p.tokens, t = item - b * p.tokens;
    const int64_t row =
        p.positions != nullptr ? p.positions[b * p.positions_batch + t * p.positions_token] : t;
    const C* const cos = static_cast<const C*>(p.cos) + b * p.cos_batch + row * p.cos_row;
    const C* const sin = static_cast<const C*>(p.sin) + b * p.sin_batch + row * p.sin_row;
    for (int32_t k = 0; k < p.tensor_count; ++k) {
      const RopeTensor& x = p.tensors[k];
      const T* in = static_cast<const T*>(x.in) + b * x.in_batch + t * x.in_token;
      T* out = static_cast<T*>(x.out) + b * x.out_batch + t * x.out_token;
      for (int64_t h = 0; h < x.heads; ++h, in += x.in_head, out += x.out_head) {
        rotate_head<T, kInterleaved>(in + p.start, out + p.start, cos, sin, p.half, sign, store);
        if (out != in) {
          store.copy(in, out, p.start);
          store.copy(in + after, out + after, p.dim - after);
        }
      }
    }
  }
  if (store.past_caches) stream_fence();
}

void rotate_any(const RopeParams& p, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT(0 <= begin && begin <= end && 0 <= p.start && p.start + 2 * p.half <= p.dim);
  dispatch(p.dtype, [&]<class T>(T) {
    p.interleaved ? rotate<T, true>(p, begin, end) : rotate<T, false>(p, begin, end);
  });
}

}  // namespace

extern const RopeKernels rope_kernels_table;
const RopeKernels rope_kernels_table{rotate_any};

}  // namespace omniattn::OMNIATTN_ISA
