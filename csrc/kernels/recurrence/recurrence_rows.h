// Converts rows of a call's tensors, and states, to matrices of the accumulator type and back.
#pragma once

#include "kernels/recurrence/recurrence.h"
#include "kernels/recurrence/recurrence_matrix.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// The dtype that corresponds to C.
template <class C>
constexpr DType kComputed = sizeof(C) == 8 ? DType::f64 : DType::f32;

// Calls f(T{}) with the storage type of a dtype that is computed in C. C itself is included even in
// objects that are built for one half type.
template <class C, class F>
OMNIATTN_INLINE void dispatch_storage(DType dtype, const F& f) {
  if (dtype == kComputed<C>) return f(C{});
  dispatch(dtype, [&]<class T>(T x) {
    if constexpr (std::is_same_v<compute_t<T>, C> && !std::is_same_v<T, C>) return f(x);
    OMNIATTN_FAIL("the dtype of rows has another compute type");
  });
}

// Converts rows of the call's dtype to rows of C and back. Only these functions and stream_rows
// depend on this dtype: everything else is compiled once for all dtypes computed in C.
template <class C>
[[gnu::noinline]] void load_rows(DType dtype, const char* x, int64_t stride, int64_t rows,
                                 int64_t width, Matrix<C> out, C factor = 1) {
  dispatch_storage<C>(dtype, [&]<class T>(T) {
    convert_rows(reinterpret_cast<const T*>(x), stride, rows, width, out.data, out.stride, factor);
  });
}
template <class C>
[[gnu::noinline]] void store_rows(DType dtype, Matrix<C> x, int64_t rows, int64_t width, char* out,
                                  int64_t stride, C factor = 1) {
  dispatch_storage<C>(dtype, [&]<class T>(T) {
    convert_rows(x.data, x.stride, rows, width, reinterpret_cast<T*>(out), stride, factor);
  });
}
// store_rows past the caches, if rows are whole vectors, for results too large for the caches and
// read much later: no line is read first. stream_fence() must be called before others read it.
template <class C>
[[gnu::noinline]] void stream_rows(DType dtype, Matrix<C> x, int64_t rows, int64_t width, char* out,
                                   int64_t stride, C factor = 1) {
  constexpr int kWidth = Vec<C>::kWidth;
  const int64_t element = size_of(dtype), vector = kWidth * element;
  if (width % kWidth != 0 || stride * element % vector != 0 ||
      reinterpret_cast<uintptr_t>(out) % vector != 0) {
    return store_rows(dtype, x, rows, width, out, stride, factor);
  }
  dispatch_storage<C>(dtype, [&]<class T>(T) {
    for (int64_t i = 0; i < rows; ++i) {
      T* const to = reinterpret_cast<T*>(out) + i * stride;
      for (int64_t j = 0; j < width; j += kWidth) stream(to + j, load(x.row(i) + j) * factor);
    }
  });
}

// Row of an input, of type C or of the call's dtype.
template <class C>
OMNIATTN_INLINE const C* row_of(const StepView& x, int64_t batch, int64_t t, int64_t head) {
  return static_cast<const C*>(x.data) + batch * x.batch + t * x.step + head * x.head;
}
OMNIATTN_INLINE const char* row_of(DType dtype, const StepView& x, int64_t batch, int64_t t,
                                   int64_t head) {
  return static_cast<const char*>(x.data) +
         (batch * x.batch + t * x.step + head * x.head) * size_of(dtype);
}
// Row of a result (B, T, H, D), of type C or of a given dtype; state of (N, Hv, K, W).
template <class C>
OMNIATTN_INLINE C* out_row(const Recurrence& p, void* x, int64_t batch, int64_t t, int64_t heads,
                           int64_t head, int64_t width) {
  return static_cast<C*>(x) + ((batch * p.steps + t) * heads + head) * width;
}
OMNIATTN_INLINE char* out_row(DType dtype, const Recurrence& p, void* x, int64_t batch, int64_t t,
                              int64_t heads, int64_t head, int64_t width) {
  return out_row<char>(p, x, batch, t, heads, head, width * size_of(dtype));
}
template <class C>
OMNIATTN_INLINE C* state_of(const Recurrence& p, const void* x, int64_t n, int64_t head) {
  return static_cast<C*>(const_cast<void*>(x)) +
         (n * p.value_heads + head) * p.key_width * p.state_width();
}
// Row of a bonus or skip (N, Hv, width); null if there is none.
template <class C>
OMNIATTN_INLINE C* head_row(const Recurrence& p, auto* x, int64_t n, int64_t head, int64_t width) {
  return x == nullptr ? nullptr : static_cast<C*>(x) + (n * p.value_heads + head) * width;
}
// Splits a state (K, W) into its columns of V and, if there is one, the column of sums; and back.
template <class C>
[[gnu::noinline]] void load_state(const Recurrence& p, const C* from, Matrix<C> state, C* z) {
  const int64_t width = p.state_width();
  copy_rows(from, width, p.key_width, p.value_width, state);
  for (int64_t d = 0; p.normalize && d < p.key_width; ++d) z[d] = from[d * width + p.value_width];
}
template <class C>
[[gnu::noinline]] void store_state(const Recurrence& p, Matrix<C> state, const C* z, C* to) {
  const int64_t width = p.state_width();
  copy_rows<C>(state.data, state.stride, p.key_width, p.value_width, {to, width});
  for (int64_t d = 0; p.normalize && d < p.key_width; ++d) to[d * width + p.value_width] = z[d];
}

// Replaces x by its features.
template <class C>
[[gnu::noinline]] void to_features(FeatureMap map, Matrix<C> x, int64_t rows, int64_t width) {
  const auto each = [&](auto f) {
    for (int64_t i = 0; i < rows; ++i) {
      C* const row = x.row(i);
      for_row<C>(width, [=](int64_t j, auto part) { part.store(row + j, f(part.load(row + j))); });
    }
  };
  const Vec<C> none = zero<C>();
  switch (map) {
    case FeatureMap::identity:
      return;
    case FeatureMap::elu1:
      return each([=](Vec<C> y) { return select(y > none, y + C{1}, exp(y)); });
    case FeatureMap::relu:
      return each([=](Vec<C> y) { return max(none, y); });
    case FeatureMap::squared_relu:
      return each([=](Vec<C> y) { return max(none, y) * max(none, y); });
    case FeatureMap::exp:
      return each([](Vec<C> y) { return exp(y); });
  }
  OMNIATTN_FAIL("a feature map is unknown to the kernels");
}
// Turns d, the gradient of features x, into the gradient of the features' inputs.
template <class C>
[[gnu::noinline]] void of_features(FeatureMap map, Input<C> x, Matrix<C> d, int64_t rows,
                                   int64_t width) {
  const auto each = [&](auto slope) {
    for (int64_t i = 0; i < rows; ++i) {
      const C* const value = x.row(i);
      C* const row = d.row(i);
      for_row<C>(width, [=](int64_t j, auto part) {
        part.store(row + j, part.load(row + j) * slope(part.load(value + j)));
      });
    }
  };
  const Vec<C> none = zero<C>(), one(C{1});
  switch (map) {
    case FeatureMap::identity:
      return;
    case FeatureMap::elu1:
      return each([=](Vec<C> y) { return min(one, y); });
    case FeatureMap::relu:
      return each([=](Vec<C> y) { return select(y > none, one, none); });
    case FeatureMap::squared_relu:
      return each([=](Vec<C> y) { return C{2} * sqrt(y); });
    case FeatureMap::exp:
      return each([](Vec<C> y) { return y; });
  }
  OMNIATTN_FAIL("a feature map is unknown to the kernels");
}

// Divides a row by a number: multiplies by the inverse, unless the number is so large
// that its inverse is flushed to 0.
template <class C>
OMNIATTN_INLINE void divide_row(C* x, C divisor, int64_t width) {
  const C inverse = 1 / divisor;
  if (inverse != 0) return convert_rows(x, 0, 1, width, x, 0, inverse);
  for_row<C>(width,
             [=](int64_t j, auto part) { part.store(x + j, part.load(x + j) / Vec<C>(divisor)); });
}

// o += skip v.
template <class C>
[[gnu::noinline]] void add_skip(const C* skip, Input<C> v, Matrix<C> o, int64_t rows,
                                int64_t width) {
  for (int64_t i = 0; i < rows; ++i) {
    for_row<C>(width, [&](int64_t j, auto part) {
      part.store(o.row(i) + j,
                 fma(part.load(skip + j), part.load(v.row(i) + j), part.load(o.row(i) + j)));
    });
  }
}

// Prefetches the row of a token into L2, for reading or writing.
template <bool kWrite = false>
OMNIATTN_INLINE void prefetch_row(const void* row, int64_t bytes) {
  constexpr int64_t kLine = 64;
  for (int64_t j = 0; j < bytes; j += kLine) {
    __builtin_prefetch(static_cast<const char*>(row) + j, kWrite, 2);
  }
  asm volatile("");  // otherwise GCC drops calls that seem to have no effect
}
// Prefetches all inputs of a token of a value head.
template <class C>
[[gnu::noinline]] void prefetch_token(const Recurrence& p, int64_t batch, int64_t t, int64_t head) {
  const int64_t key_head = p.key_head_of(head), element = size_of(p.dtype);
  const auto ask = [&](const StepView& x, int64_t h, int64_t width) {
    prefetch_row(row_of(p.dtype, x, batch, t, h), width * element);
  };
  ask(p.q, key_head, p.key_width);
  ask(p.k, key_head, p.key_width);
  if (p.a.data != nullptr) ask(p.a, key_head, p.key_width), ask(p.b, key_head, p.key_width);
  ask(p.v, head, p.value_width);
  if (p.channel_decay) prefetch_row(row_of<C>(p.g, batch, t, head), p.key_width * sizeof(C));
  if (p.gv.data != nullptr) {
    prefetch_row(row_of<C>(p.gv, batch, t, head), p.value_width * sizeof(C));
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
