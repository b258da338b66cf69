// Row normalisation, see norm.h. A row is swept two or three times but comes from memory once: the
// later sweeps find it in L1 or L2.
#include "kernels/norm/norm.h"

#include "runtime/dispatch.h"
#include "runtime/row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// weight + offset, or 1 without a weight.
template <class T>
struct Scale {
  const T* weight;
  Vec<compute_t<T>> offset;

  template <class Part>
  OMNIATTN_INLINE Vec<compute_t<T>> load(int64_t i, Part part) const {
    return weight != nullptr ? part.load(weight + i) + offset : Vec<compute_t<T>>(1);
  }
};

template <class T>
void forward(const NormParams& p, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  using V = Vec<C>;
  const int64_t n = p.cols;
  const auto inverse_n = C(1) / static_cast<C>(n > 0 ? n : 1);
  const Scale<T> scale{static_cast<const T*>(p.weight), V(static_cast<C>(p.offset))};
  const T* const bias = static_cast<const T*>(p.bias);

  for (int64_t row = begin; row < end; ++row) {
    const T* h = static_cast<const T*>(p.x) + row * p.x_stride;
    T* const y = static_cast<T*>(p.y) + row * n;
    if (p.residual != nullptr) {
      const T* const x = h;
      const T* const residual = static_cast<const T*>(p.residual) + row * p.residual_stride;
      T* const sum = static_cast<T*>(p.h) + row * n;
      for_row<T>(n, [&](int64_t i, auto part) {
        part.store(sum + i, part.load(x + i) + part.load(residual + i));
      });
      h = sum;  // the rounded sum is what is normalised, so that fused equals unfused
    }
    C mean = 0;
    if (p.center) {
      mean = inverse_n * row_sum<T>(n, [&](int64_t i, auto part) { return part.load(h + i); });
    }
    const C variance = inverse_n * row_sum<T>(n, [&](int64_t i, auto part) {
                         const V d = part.load(h + i) - mean;
                         return d * d;
                       });
    const C rstd = C(1) / sqrt(V(variance + static_cast<C>(p.eps))).v[0];
    for_row<T>(n, [&](int64_t i, auto part) {
      V v = (part.load(h + i) - mean) * rstd * scale.load(i, part);
      if (bias != nullptr) v += part.load(bias + i);
      part.store(y + i, v);
    });
    C* const stats = static_cast<C*>(p.stats) + row * 2;
    stats[0] = mean;
    stats[1] = rstd;
  }
}

// With xh = (h - mean) rstd and m = grad_y (weight + offset):
//   dx = rstd (m - avg(m) [if centred] - xh avg(m xh)) + grad_h,  dweight += grad_y xh,  dbias +=
//   grad_y
template <class T>
void backward(const NormBackwardParams& p, void* dweight, void* dbias, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  using V = Vec<C>;
  const int64_t n = p.cols;
  const auto inverse_n = C(1) / static_cast<C>(n > 0 ? n : 1);
  const Scale<T> scale{static_cast<const T*>(p.weight), V(static_cast<C>(p.offset))};
  C* const dw = static_cast<C*>(dweight);
  C* const db = static_cast<C*>(dbias);

  for (int64_t row = begin; row < end; ++row) {
    const T* const gy = static_cast<const T*>(p.grad_y) + row * p.grad_y_stride;
    const T* const h = static_cast<const T*>(p.h) + row * p.h_stride;
    T* const dx = static_cast<T*>(p.dx) + row * n;
    const C mean = static_cast<const C*>(p.stats)[row * 2];
    const C rstd = static_cast<const C*>(p.stats)[row * 2 + 1];

    const C slope = inverse_n * row_sum<T>(n, [&](int64_t i, auto part) {
                      const V g = part.load(gy + i);
                      const V xh = (part.load(h + i) - mean) * rstd;
                      if (dw != nullptr) part.store(dw + i, fma(g, xh, part.load(dw + i)));
                      if (db != nullptr) part.store(db + i, g + part.load(db + i));
                      return g * scale.load(i, part) * xh;
                    });
    C shift = 0;
    if (p.center) {
      shift = inverse_n * row_sum<T>(n, [&](int64_t i, auto part) {
                return part.load(gy + i) * scale.load(i, part);
              });
    }
    const T* const gh =
        p.grad_h != nullptr ? static_cast<const T*>(p.grad_h) + row * p.grad_h_stride : nullptr;
    for_row<T>(n, [&](int64_t i, auto part) {
      const V xh = (part.load(h + i) - mean) * rstd;
      V v = (part.load(gy + i) * scale.load(i, part) - shift - xh * slope) * rstd;
      if (gh != nullptr) v += part.load(gh + i);
      part.store(dx + i, v);
    });
  }
}

template <class T>
void sum_shards(const void* partial, int64_t shards, int64_t stride, int64_t n, void* out) {
  using C = compute_t<T>;
  const C* const sums = static_cast<const C*>(partial);
  for_row<T>(n, [&](int64_t i, auto part) {
    Vec<C> total(0);
    for (int64_t s = 0; s < shards; ++s) total += part.load(sums + s * stride + i);
    part.store(static_cast<T*>(out) + i, total);
  });
}

void forward_any(const NormParams& p, int64_t begin, int64_t end) {
  dispatch(p.dtype, [&]<class T>(T) { forward<T>(p, begin, end); });
}
void backward_any(const NormBackwardParams& p, void* dweight, void* dbias, int64_t begin,
                  int64_t end) {
  dispatch(p.dtype, [&]<class T>(T) { backward<T>(p, dweight, dbias, begin, end); });
}
void sum_shards_any(DType dtype, const void* partial, int64_t shards, int64_t stride, int64_t n,
                    void* out) {
  dispatch(dtype, [&]<class T>(T) { sum_shards<T>(partial, shards, stride, n, out); });
}

}  // namespace

extern const NormKernels norm_kernels_table;
const NormKernels norm_kernels_table{forward_any, backward_any, sum_shards_any};

}  // namespace omniattn::OMNIATTN_ISA
