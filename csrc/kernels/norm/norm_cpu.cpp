// Row normalisation, see norm.h. A row is swept two or three times but read from memory once: the
// later sweeps find it in L1 or L2, and the last one prefetches the next row.
#include "kernels/norm/norm.h"

#include "kernels/norm/rounded.h"
#include "kernels/norm/stream.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "runtime/row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// weight + offset, or 1 if there is no weight.
template <class T>
struct Scale {
  const T* weight;
  compute_t<T> offset;

  OMNIATTN_INLINE auto load(int64_t i, auto part) const {
    using V = decltype(part.load(weight));
    return weight != nullptr ? part.load(weight + i) + offset : V(compute_t<T>(1));
  }
};

template <class T, class H, bool kCenter>
void forward(const NormParams& p, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  constexpr Order kAny = Order::any;
  const int64_t n = p.cols;
  const auto inverse_n = C(1) / static_cast<C>(n > 0 ? n : 1);
  const Scale<T> scale{static_cast<const T*>(p.weight), static_cast<C>(p.offset)};
  const T* const bias = static_cast<const T*>(p.bias);

  for (int64_t row = begin; row < end; ++row) {
    const T* const x = static_cast<const T*>(p.x) + row * p.x_stride;
    const T* const next = row + 1 < end ? x + p.x_stride : x;
    T* const y = static_cast<T*>(p.y) + row * n;
    const H* h;
    if (p.residual != nullptr) {
      const H* const residual = static_cast<const H*>(p.residual) + row * p.residual_stride;
      H* const sum = static_cast<H*>(p.h) + row * n;
      for_row<T, kAny>(n, [&](int64_t i, auto part) {
        part.store(sum + i, part.load(x + i) + part.load(residual + i));
      });
      h = sum;  // the rounded sum is normalised, so that fused equals unfused
    } else {
      h = static_cast<const H*>(p.x) + row * p.x_stride;  // H is T
    }
    C mean = 0;
    if constexpr (kCenter) {
      mean =
          inverse_n * row_sum<T, kAny>(n, [&](int64_t i, auto part) { return part.load(h + i); });
    }
    const auto centred = [&](int64_t i, auto part) {
      if constexpr (kCenter) {
        return part.load(h + i) - mean;
      } else {
        return part.load(h + i);
      }
    };
    const C variance = inverse_n * row_sum<T, kAny>(n, [&](int64_t i, auto part) {
                         const auto d = centred(i, part);
                         return d * d;
                       });
    const C rstd = C(1) / sqrt(Vec<C>(variance + static_cast<C>(p.eps))).v[0];
    for_row<T, kAny>(n, [&](int64_t i, auto part) {
      prefetch(next + i);
      auto v = centred(i, part) * rstd;
      if (p.cast_first) v = rounded_in(y, i, part, v);
      v = v * scale.load(i, part);
      if (bias != nullptr) v += part.load(bias + i);
      part.store(y + i, v);
    });
    if (p.stats != nullptr) {
      C* const stats = static_cast<C*>(p.stats) + row * 2;
      stats[0] = mean;
      stats[1] = rstd;
    }
  }
}

// At 2048 x 1024, two rows took 0.8 (bf16) to 1 (fp32) of the time of one row, or of four.
constexpr int kRowsAtOnce = 2;

// Computes rows [row, row + kRows) below `last`. With xh = (h - mean) rstd and m = grad_y
// (weight + offset):
//   dx = rstd (m - avg(m) [if centred] - xh avg(m xh)) + grad_h, and dh the same, rounded to H
//   dweight += grad_y xh, dbias += grad_y
// The second sweep processes the rows together, so that dweight and dbias are read and written once
// for all of them.
template <class T, class H, bool kCenter, int kRows>
OMNIATTN_INLINE void backward_rows(const NormBackwardParams& p, compute_t<T>* dw, compute_t<T>* db,
                                   int64_t row, int64_t last) {
  using C = compute_t<T>;
  constexpr Order kAny = Order::any;
  constexpr bool kMixed = !std::is_same_v<T, H>;
  const int64_t n = p.cols;
  const auto inverse_n = C(1) / static_cast<C>(n > 0 ? n : 1);
  const Scale<T> scale{static_cast<const T*>(p.weight), static_cast<C>(p.offset)};
  // copies of members of p, which would be read again after each store
  const int64_t gy_stride = p.grad_y_stride, h_stride = p.h_stride, gh_stride = p.grad_h_stride;
  const T* const gy = static_cast<const T*>(p.grad_y) + row * gy_stride;
  const H* const h = static_cast<const H*>(p.h) + row * h_stride;
  const H* const gh =
      p.grad_h != nullptr ? static_cast<const H*>(p.grad_h) + row * gh_stride : nullptr;
  const int64_t ahead = row + kRows <= last - kRows ? kRows : 0;
  T* const dx = static_cast<T*>(p.dx) + row * n;
  H* const dh = kMixed ? static_cast<H*>(p.dh) + row * n : nullptr;
  const C* const stats = static_cast<const C*>(p.stats) + row * 2;

  // dx = rstd (m - shift - (h - mean) slope) + grad_h
  C mean[kRows], rstd[kRows], slope[kRows], shift[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    mean[r] = kCenter ? stats[2 * r] : C(0);
    rstd[r] = stats[2 * r + 1];
    RowSum<C> m_xh, m_sum;
    for_row_by_four<T, kAny>(n, [&](int64_t i, auto part, int k) {
      const auto m = part.load(gy + r * gy_stride + i) * scale.load(i, part);
      const auto d = part.load(h + r * h_stride + i) - mean[r];
      m_xh.add(k, part.zero_beyond(m * d));
      if constexpr (kCenter) m_sum.add(k, part.zero_beyond(m));
    });
    slope[r] = m_xh.total() * inverse_n * rstd[r] * rstd[r];
    shift[r] = kCenter ? m_sum.total() * inverse_n : C(0);
  }
  for_row<T, kAny>(n, [&](int64_t i, auto part) {
    using V = decltype(part.load(gy));
    const V w = scale.load(i, part);
    V dw_sum(C(0)), db_sum(C(0));
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      prefetch(gy + (r + ahead) * gy_stride + i);
      prefetch(h + (r + ahead) * h_stride + i);
      const V g = part.load(gy + r * gy_stride + i);
      V d = part.load(h + r * h_stride + i);
      if constexpr (kCenter) d = d - mean[r];
      V v = g * w - d * slope[r];
      if constexpr (kCenter) v = v - shift[r];
      v = v * rstd[r];
      if (gh != nullptr) v += part.load(gh + r * gh_stride + i);
      part.store(dx + r * n + i, v);
      if constexpr (kMixed) part.store(dh + r * n + i, v);
      dw_sum += g * (d * rstd[r]);
      db_sum += g;
    }
    if (dw != nullptr) part.store_sums(dw + i, part.load_sums(dw + i) + dw_sum);
    if (db != nullptr) part.store_sums(db + i, part.load_sums(db + i) + db_sum);
  });
}

template <class T, class H, bool kCenter>
void backward(const NormBackwardParams& p, void* dweight, void* dbias, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  C* const dw = static_cast<C*>(dweight);
  C* const db = static_cast<C*>(dbias);
  int64_t row = begin;
  for (; row + kRowsAtOnce <= end; row += kRowsAtOnce) {
    backward_rows<T, H, kCenter, kRowsAtOnce>(p, dw, db, row, end);
  }
  for (; row < end; ++row) backward_rows<T, H, kCenter, 1>(p, dw, db, row, end);
}

void forward_any(const NormParams& p, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, p.rows);
  OMNIATTN_ASSERT_ROWS(p.x, p.x_stride, p.rows, p.cols);
  OMNIATTN_ASSERT(p.residual == nullptr || p.h != nullptr || p.rows * p.cols == 0);
  dispatch(p.dtype, [&]<class T>(T) {
    dispatch_stream<T>(p.h_dtype, [&]<class H>(H) {
      p.center ? forward<T, H, true>(p, begin, end) : forward<T, H, false>(p, begin, end);
    });
  });
}
void backward_any(const NormBackwardParams& p, void* dweight, void* dbias, int64_t begin,
                  int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, p.rows);
  OMNIATTN_ASSERT_ROWS(p.grad_y, p.grad_y_stride, p.rows, p.cols);
  OMNIATTN_ASSERT_ROWS(p.h, p.h_stride, p.rows, p.cols);
  OMNIATTN_ASSERT_HAS(p.stats, p.rows);
  dispatch(p.dtype, [&]<class T>(T) {
    dispatch_stream<T>(p.h_dtype, [&]<class H>(H) {
      p.center ? backward<T, H, true>(p, dweight, dbias, begin, end)
               : backward<T, H, false>(p, dweight, dbias, begin, end);
    });
  });
}

}  // namespace

extern const NormKernels norm_kernels_table;
const NormKernels norm_kernels_table{forward_any, backward_any};

}  // namespace omniattn::OMNIATTN_ISA
