// GLU family, see activation.h.
#include "kernels/activation/activation.h"

#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "runtime/row.h"
#include "runtime/vec.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Calls f(row, first column, columns) for each item of the range.
template <class F>
OMNIATTN_INLINE void for_blocks(int64_t cols, int64_t begin, int64_t end, const F& f) {
  const int64_t blocks = (cols + kGluBlock - 1) / kGluBlock;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / blocks, first = (item - row * blocks) * kGluBlock;
    f(row, first, cols - first < kGluBlock ? cols - first : kGluBlock);
  }
}

// Row that starts `offset` elements after p; null if p is null.
template <class T, class P>
OMNIATTN_INLINE T* row_at(P* p, int64_t offset) {
  return p != nullptr ? static_cast<T*>(p) + offset : nullptr;
}

template <class T, class Act>
void glu(const GluParams& p, int64_t begin, int64_t end) {
  for_blocks(p.cols, begin, end, [&](int64_t row, int64_t first, int64_t n) {
    const T* const gate = static_cast<const T*>(p.gate) + row * p.gate_row + first;
    const T* const up = row_at<const T>(p.up, row * p.up_row + first);
    T* const y = static_cast<T*>(p.y) + row * p.y_row + first;
    for_row<T, Order::any>(n, [&](int64_t i, auto part) {
      const auto act = lanewise([](auto x) { return Act::at(x).value; }, part.load(gate + i));
      part.store(y + i, up != nullptr ? act * part.load(up + i) : act);
    });
  });
}

template <class T, class Act>
void glu_backward(const GluBackwardParams& p, int64_t begin, int64_t end) {
  for_blocks(p.cols, begin, end, [&](int64_t row, int64_t first, int64_t n) {
    const T* const grad_y = static_cast<const T*>(p.grad_y) + row * p.grad_y_row + first;
    const T* const gate = static_cast<const T*>(p.gate) + row * p.gate_row + first;
    const T* const up = row_at<const T>(p.up, row * p.up_row + first);
    T* const dgate = static_cast<T*>(p.dgate) + row * p.dgate_row + first;
    T* const dup = row_at<T>(p.dup, row * p.dup_row + first);
    for_row<T, Order::any>(n, [&](int64_t i, auto part) {
      const auto g = part.load(grad_y + i), x = part.load(gate + i);
      const auto value = lanewise([](auto v) { return Act::at(v).value; }, x);
      const auto slope = lanewise([](auto v) { return Act::at(v).slope; }, x);
      part.store(dgate + i, (up != nullptr ? g * part.load(up + i) : g) * slope);
      if (dup != nullptr) part.store(dup + i, g * value);
    });
  });
}

template <class T>
void clamped(const GluParams& p, int64_t begin, int64_t end) {
  const ClampedProduct<compute_t<T>> product(p.clamp);
  for_blocks(p.cols, begin, end, [&](int64_t row, int64_t first, int64_t n) {
    const T* const gate = static_cast<const T*>(p.gate) + row * p.gate_row + first;
    const T* const up = static_cast<const T*>(p.up) + row * p.up_row + first;
    T* const y = static_cast<T*>(p.y) + row * p.y_row + first;
    for_row<T, Order::any>(n, [&](int64_t i, auto part) {
      const auto value = [&](auto g, auto u) { return product(g, u).value; };
      part.store(y + i, lanewise(value, part.load(gate + i), part.load(up + i)));
    });
  });
}

template <class T>
void clamped_backward(const GluBackwardParams& p, int64_t begin, int64_t end) {
  const ClampedProduct<compute_t<T>> product(p.clamp);
  for_blocks(p.cols, begin, end, [&](int64_t row, int64_t first, int64_t n) {
    const T* const grad_y = static_cast<const T*>(p.grad_y) + row * p.grad_y_row + first;
    const T* const gate = static_cast<const T*>(p.gate) + row * p.gate_row + first;
    const T* const up = static_cast<const T*>(p.up) + row * p.up_row + first;
    T* const dgate = static_cast<T*>(p.dgate) + row * p.dgate_row + first;
    T* const dup = static_cast<T*>(p.dup) + row * p.dup_row + first;
    for_row<T, Order::any>(n, [&](int64_t i, auto part) {
      const auto grad = part.load(grad_y + i), g = part.load(gate + i), u = part.load(up + i);
      const auto by_gate = [&](auto a, auto b) { return product(a, b).by_gate; };
      const auto by_up = [&](auto a, auto b) { return product(a, b).by_up; };
      part.store(dgate + i, grad * lanewise(by_gate, g, u));
      part.store(dup + i, grad * lanewise(by_up, g, u));
    });
  });
}

void glu_any(const GluParams& p, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT(0 <= begin && begin <= end && (p.up != nullptr || p.clamp.limit <= 0));
  OMNIATTN_ASSERT_HAS(p.gate, end - begin);
  dispatch(p.dtype, [&]<class T>(T) {
    if (p.clamp.limit > 0) return clamped<T>(p, begin, end);
    with_activation(p.act, [&]<class Act>(Act) { glu<T, Act>(p, begin, end); });
  });
}
void glu_backward_any(const GluBackwardParams& p, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT(0 <= begin && begin <= end && (p.up != nullptr || p.dup == nullptr));
  OMNIATTN_ASSERT_HAS(p.gate, end - begin);
  dispatch(p.dtype, [&]<class T>(T) {
    if (p.clamp.limit > 0) return clamped_backward<T>(p, begin, end);
    with_activation(p.act, [&]<class Act>(Act) { glu_backward<T, Act>(p, begin, end); });
  });
}

}  // namespace

extern const ActivationKernels activation_kernels_table;
const ActivationKernels activation_kernels_table{glu_any, glu_backward_any};

}  // namespace omniattn::OMNIATTN_ISA
