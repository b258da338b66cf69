// Small matrices of a chunk in the memory of an item, and their products.
#pragma once

#include <type_traits>

#include "runtime/gemm_tile.h"
#include "runtime/row.h"
#include "semantics/arith.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class C>
struct Matrix {
  C* data;
  int64_t stride;

  OMNIATTN_INLINE C* row(int64_t i) const { return data + i * stride; }
  OMNIATTN_INLINE Matrix at(int64_t i, int64_t j = 0) const { return {row(i) + j, stride}; }
  OMNIATTN_INLINE operator Matrix<const C>() const { return {data, stride}; }
};
// Read-only matrix argument; C is deduced from the matrix that the function writes.
template <class C>
using Input = std::type_identity_t<Matrix<const C>>;

// Hands out the memory of an item; without memory it only counts bytes.
template <class C>
class Room {
 public:
  explicit Room(void* memory) : memory_(static_cast<char*>(memory)) {}

  C* take(int64_t count) {
    C* const result = memory_ == nullptr ? nullptr : reinterpret_cast<C*>(memory_ + bytes_);
    bytes_ += round_up(count * static_cast<int64_t>(sizeof(C)), kLine);
    return result;
  }
  // Rows lie an odd number of cache lines apart, so that a column uses all sets of L1.
  [[gnu::noinline]] Matrix<C> rows(int64_t count, int64_t width) {
    const int64_t lines = ceil_div(width * static_cast<int64_t>(sizeof(C)), kLine) | 1;
    const int64_t stride = lines * kLine / static_cast<int64_t>(sizeof(C));
    return {take(count * stride), stride};
  }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kLine = 64;
  char* memory_;
  int64_t bytes_ = 0;
};

// C (m, n) = A (m, k) B, or C += A B.
enum class Into { set, add };
template <ALayout kLayout = ALayout::kRows, class C>
OMNIATTN_INLINE void multiply(Input<C> a, Panels<C> b, Matrix<C> c, int64_t m, int64_t n, int64_t k,
                              Into into) {
  gemm_tile<C, kLayout>(a.data, a.stride, b, c.data, c.stride, m, n, k, into == Into::add);
}
template <ALayout kLayout = ALayout::kRows, class C>
OMNIATTN_INLINE void multiply(Input<C> a, Input<C> b, Matrix<C> c, int64_t m, int64_t n, int64_t k,
                              Into into) {
  multiply<kLayout>(a, row_panels<C>(b.data, b.stride), c, m, n, k, into);
}

// Number of rows of a triangular product that are computed as one rectangle.
constexpr int64_t kBlock = 16;
// Number of rows of a product, one tile, between which other work is done.
constexpr int64_t kStrip = 6;
template <class F>
OMNIATTN_INLINE void for_blocks(int64_t rows, const F& f) {
  for (int64_t i = 0; i < rows; i += kBlock) f(i, smaller(kBlock, rows - i));
}
// c += A b and c += A^T b for a lower triangular A whose diagonal blocks are zero above the
// diagonal, and with `before` columns in front of the triangle. Out of line, like all work done
// once per chunk for every decay and update: inlined copies were a twentieth of the library.
template <class C>
[[gnu::noinline]] void multiply_lower(Input<C> a, Input<C> b, Matrix<C> c, int64_t rows, int64_t n,
                                      int64_t before = 0) {
  for_blocks(rows, [&](int64_t i, int64_t m) {
    multiply(a.at(i), b, c.at(i), m, n, before + i + m, Into::add);
  });
}
template <class C>
[[gnu::noinline]] void multiply_lower_transposed(Input<C> a, Input<C> b, Matrix<C> c, int64_t rows,
                                                 int64_t n, Into into, int64_t before = 0) {
  for_blocks(before + rows, [&](int64_t i, int64_t m) {
    const int64_t first = larger(i - before, int64_t{0});
    multiply<ALayout::kTransposed>(a.at(first, i), b.at(first), c.at(i), m, n, rows - first, into);
  });
}
// Packs B^T for products, from rows of `width`.
template <class C>
[[gnu::noinline]] void pack_columns(Input<C> rows, int64_t count, int64_t width, C* packed) {
  pack_bt(rows.data, rows.stride, width, count, packed, round_up(count, Vec<C>::kWidth));
}
// Computes the block of c = A B^T on and below the diagonal that starts at row i; B^T is packed
// from rows of `width`, and c has `before` columns in front of the triangle.
template <class C>
[[gnu::noinline]] void multiply_to_lower(Input<C> a, const C* packed, Matrix<C> c, int64_t i,
                                         int64_t m, int64_t width, int64_t before = 0) {
  multiply(a.at(i), packed_panels(packed, width), c.at(i), m, before + i + m, width, Into::set);
}

// Rows of x times factor, converted from one storage type to another.
template <class T, class S>
OMNIATTN_INLINE void convert_rows(const T* x, int64_t stride, int64_t rows, int64_t width, S* out,
                                  int64_t out_stride, compute_t<T> factor) {
  for (int64_t i = 0; i < rows; ++i) {
    for_row<compute_t<T>>(width, [&](int64_t j, auto part) {
      part.store(out + i * out_stride + j, part.load(x + i * stride + j) * factor);
    });
  }
}
// Copies rows. Out of line, like all functions that move rows: they have many calls, one per chunk.
template <class C>
[[gnu::noinline]] void copy_rows(const C* x, int64_t stride, int64_t rows, int64_t width,
                                 Matrix<C> out) {
  for (int64_t i = 0; i < rows; ++i) {
    for_row<C>(width, [&](int64_t j, auto part) {
      part.store(out.row(i) + j, part.load(x + i * stride + j));
    });
  }
}
template <class C>
[[gnu::noinline]] void zero_rows(Matrix<C> x, int64_t rows, int64_t width) {
  for (int64_t i = 0; i < rows; ++i) {
    for_row<C>(width, [&](int64_t j, auto part) { part.store(x.row(i) + j, zero<C>()); });
  }
}
template <class C>
OMNIATTN_INLINE C dot(const C* a, const C* b, int64_t n) {
  return row_sum<C>(n, [&](int64_t i, auto part) { return part.load(a + i) * part.load(b + i); });
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
