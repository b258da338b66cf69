// RMSNorm and rotary embedding of heads, see norm_rope.h.
#include "kernels/rope/norm_rope.h"

#include "kernels/norm/rounded.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "runtime/row.h"
#include "semantics/rope.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// A token and its rows of the tables.
template <class C>
struct Token {
  int64_t entry, token;
  const C *cos, *sin;
};

template <class C>
OMNIATTN_INLINE Token<C> token_of(const RopeParams& p, int64_t item) {
  const int64_t b = item / p.tokens, t = item - b * p.tokens;
  const int64_t row =
      p.positions != nullptr ? p.positions[b * p.positions_batch + t * p.positions_token] : t;
  return {b, t, static_cast<const C*>(p.cos) + b * p.cos_batch + row * p.cos_row,
          static_cast<const C*>(p.sin) + b * p.sin_batch + row * p.sin_row};
}

// Calls take(i, part, v) for all elements of a head; v are the values of get(i, part) with the
// rotary dimensions rotated. `sign` is -1 for the negative angle.
template <class T, bool kInterleaved, class Get, class Take>
OMNIATTN_INLINE void turn_head(const RopeParams& p, const Token<compute_t<T>>& token,
                               Vec<compute_t<T>> sign, const Get& get, const Take& take) {
  using C = compute_t<T>;
  constexpr int kWidth = Vec<C>::kWidth;
  const int64_t start = p.start, half = p.half, after = start + 2 * half;
  for_row<T>(half, [&](int64_t i, auto part) {
    const auto c = part.load(token.cos + i), s = sign * part.load(token.sin + i);
    if constexpr (kInterleaved) {
      const auto first = part.first_of_pairs();
      const auto second = part.template second_of_pairs<C>();
      const int64_t at = start + 2 * i;
      const auto [x, y] = deinterleave(get(at, first), get(at + kWidth, second));
      const auto [low, high] = interleave(rope_x(x, y, c, s), rope_y(x, y, c, s));
      take(at, first, low);
      take(at + kWidth, second, high);
    } else {
      const auto x = get(start + i, part), y = get(start + half + i, part);
      take(start + i, part, rope_x(x, y, c, s));
      take(start + half + i, part, rope_y(x, y, c, s));
    }
  });
  for_row<T>(start, [&](int64_t i, auto part) { take(i, part, get(i, part)); });
  for_row<T>(p.dim - after,
             [&](int64_t i, auto part) { take(after + i, part, get(after + i, part)); });
}

// weight + offset, or 1 if there is no weight.
template <class T>
OMNIATTN_INLINE auto scale_at(const T* weight, compute_t<T> offset, int64_t i, auto part) {
  using V = decltype(part.load(weight));
  return weight != nullptr ? part.load(weight + i) + offset : V(compute_t<T>(1));
}

template <class T, bool kInterleaved>
void forward(const NormRopeParams& p, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  const RopeTensor& tensor = p.rope.tensors[0];
  const T* const weight = static_cast<const T*>(p.weight);
  const auto offset = static_cast<C>(p.offset), eps = static_cast<C>(p.eps);
  const auto inverse_n = C(1) / static_cast<C>(p.rope.dim);
  for (int64_t item = begin; item < end; ++item) {
    const Token<C> token = token_of<C>(p.rope, item);
    const T* x = static_cast<const T*>(tensor.in) + token.entry * tensor.in_batch +
                 token.token * tensor.in_token;
    T* y = static_cast<T*>(tensor.out) + token.entry * tensor.out_batch +
           token.token * tensor.out_token;
    for (int64_t h = 0; h < tensor.heads; ++h, x += tensor.in_head, y += tensor.out_head) {
      const C squares = row_sum<T>(p.rope.dim, [&](int64_t i, auto part) {
        const auto v = part.load(x + i);
        return v * v;
      });
      const C rstd = C(1) / sqrt(Vec<C>(squares * inverse_n + eps)).v[0];
      turn_head<T, kInterleaved>(
          p.rope, token, Vec<C>(C(1)),
          [&](int64_t i, auto part) {
            auto v = part.load(x + i) * rstd;
            if (p.cast_first) v = rounded_in(y, i, part, v);
            v = v * scale_at(weight, offset, i, part);
            return p.cast_first ? rounded_in(y, i, part, v) : v;
          },
          [&](int64_t i, auto part, auto v) { part.store(y + i, v); });
      if (p.rstd != nullptr) static_cast<C*>(p.rstd)[item * tensor.heads + h] = rstd;
    }
  }
}

template <class T, bool kInterleaved>
void backward(const NormRopeBackwardParams& p, void* dweight, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  const RopeTensor& tensor = p.rope.tensors[0];
  const T* const weight = static_cast<const T*>(p.weight);
  const auto offset = static_cast<C>(p.offset);
  const auto inverse_n = C(1) / static_cast<C>(p.rope.dim);
  C* const dw = static_cast<C*>(dweight);
  const Vec<C> back(C(-1));
  for (int64_t item = begin; item < end; ++item) {
    const Token<C> token = token_of<C>(p.rope, item);
    const T* gy = static_cast<const T*>(tensor.in) + token.entry * tensor.in_batch +
                  token.token * tensor.in_token;
    const T* x = static_cast<const T*>(p.x) + token.entry * p.x_batch + token.token * p.x_token;
    T* dx = static_cast<T*>(tensor.out) + token.entry * tensor.out_batch +
            token.token * tensor.out_token;
    for (int64_t h = 0; h < tensor.heads;
         ++h, gy += tensor.in_head, x += p.x_head, dx += tensor.out_head) {
      const C rstd = static_cast<const C*>(p.rstd)[item * tensor.heads + h];
      const auto grad = [&](int64_t i, auto part) { return part.load(gy + i); };
      Vec<C> m_x(C(0));
      turn_head<T, kInterleaved>(p.rope, token, back, grad, [&](int64_t i, auto part, auto g) {
        m_x += part.zero_beyond(g * scale_at(weight, offset, i, part) * part.load(x + i));
      });
      const C slope = reduce_add(m_x) * inverse_n * rstd * rstd;
      turn_head<T, kInterleaved>(p.rope, token, back, grad, [&](int64_t i, auto part, auto g) {
        const auto v = part.load(x + i);
        part.store(dx + i, (g * scale_at(weight, offset, i, part) - v * slope) * rstd);
        if (dw != nullptr) part.store_sums(dw + i, part.load_sums(dw + i) + g * (v * rstd));
      });
    }
  }
}

void check(const RopeParams& p, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT(0 <= begin && begin <= end && 0 <= p.start && p.start + 2 * p.half <= p.dim);
}

void forward_any(const NormRopeParams& p, int64_t begin, int64_t end) {
  check(p.rope, begin, end);
  dispatch(p.rope.dtype, [&]<class T>(T) {
    p.rope.interleaved ? forward<T, true>(p, begin, end) : forward<T, false>(p, begin, end);
  });
}
void backward_any(const NormRopeBackwardParams& p, void* dweight, int64_t begin, int64_t end) {
  check(p.rope, begin, end);
  dispatch(p.rope.dtype, [&]<class T>(T) {
    p.rope.interleaved ? backward<T, true>(p, dweight, begin, end)
                       : backward<T, false>(p, dweight, begin, end);
  });
}

}  // namespace

extern const NormRopeKernels norm_rope_kernels_table;
const NormRopeKernels norm_rope_kernels_table{forward_any, backward_any};

}  // namespace omniattn::OMNIATTN_ISA
