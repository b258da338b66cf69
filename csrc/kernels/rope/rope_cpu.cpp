// Rotary position embedding, see rope.h.
#include "kernels/rope/rope.h"

#include <cstddef>

#include "runtime/dispatch.h"
#include "runtime/row.h"
#include "semantics/rope.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Turns the pairs of one head. `sign` is -1 for the negative angle.
template <class T, bool kInterleaved>
OMNIATTN_INLINE void rotate_head(const T* in, T* out, const compute_t<T>* cos,
                                 const compute_t<T>* sin, int64_t half, Vec<compute_t<T>> sign) {
  constexpr int kWidth = Vec<compute_t<T>>::kWidth;
  for_row<T>(half, [&](int64_t i, auto part) {
    const auto c = part.load(cos + i), s = sign * part.load(sin + i);
    if constexpr (kInterleaved) {
      const auto first = part.first_of_pairs();
      const auto second = part.template second_of_pairs<compute_t<T>>();
      const auto [x, y] = deinterleave(first.load(in + 2 * i), second.load(in + 2 * i + kWidth));
      const auto [low, high] = interleave(rope_x(x, y, c, s), rope_y(x, y, c, s));
      first.store(out + 2 * i, low);
      second.store(out + 2 * i + kWidth, high);
    } else {
      const auto x = part.load(in + i), y = part.load(in + half + i);
      part.store(out + i, rope_x(x, y, c, s));
      part.store(out + half + i, rope_y(x, y, c, s));
    }
  });
}

template <class T, bool kInterleaved>
void rotate(const RopeParams& p, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  const Vec<C> sign(p.inverse ? C(-1) : C(1));
  const int64_t after = p.start + 2 * p.half;
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
        rotate_head<T, kInterleaved>(in + p.start, out + p.start, cos, sin, p.half, sign);
        if (out != in) {
          __builtin_memcpy(out, in, static_cast<std::size_t>(p.start) * sizeof(T));
          __builtin_memcpy(out + after, in + after,
                           static_cast<std::size_t>(p.dim - after) * sizeof(T));
        }
      }
    }
  }
}

void rotate_any(const RopeParams& p, int64_t begin, int64_t end) {
  dispatch(p.dtype, [&]<class T>(T) {
    p.interleaved ? rotate<T, true>(p, begin, end) : rotate<T, false>(p, begin, end);
  });
}

}  // namespace

extern const RopeKernels rope_kernels_table;
const RopeKernels rope_kernels_table{rotate_any};

}  // namespace omniattn::OMNIATTN_ISA
