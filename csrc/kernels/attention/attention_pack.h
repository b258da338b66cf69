// Packs rows of q, k and v as operands of products, and stores results as rows.
#pragma once

#include "kernels/attention/attention_sizes_cpu.h"
#include "runtime/assert.h"
#include "runtime/gemm_tile.h"
#include "runtime/vec_int8.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

template <class T>
OMNIATTN_INLINE const T* row_of(const HeadView& x, int64_t b, int64_t t, int64_t h) {
  return static_cast<const T*>(x.data) + b * x.stride_b + t * x.stride_t + h * x.stride_h;
}
template <class T>
OMNIATTN_INLINE T* row_of(const MutableHeadView& x, int64_t b, int64_t t, int64_t h) {
  return static_cast<T*>(x.data) + b * x.stride_b + t * x.stride_t + h * x.stride_h;
}

// Hands out consecutive parts of a buffer; `left` elements are unused.
template <class A>
struct Arena {
  A* next;
  int64_t left;
  OMNIATTN_INLINE A* take(int64_t elements) {
    OMNIATTN_ASSERT(0 <= elements && elements <= left);
    A* const part = next;
    next += elements;
    left -= elements;
    return part;
  }
};

// Row stride, in elements, of operands that products read as A. Tiles load them in place: each row
// starts at a cache line, in memory for rows of the compute type.
template <class M>
OMNIATTN_INLINE int64_t operand_row(int64_t cols) {
  constexpr int64_t kRatio = sizeof(compute_t<M>) / sizeof(M);
  return padded_row(cols) * (kOnTiles ? kRatio : 1);
}

template <class A>
OMNIATTN_INLINE void fill_zero(A* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = A{};
}

// to[r][c] = factor * from[r][c] for c < cols, then 0 up to padded_row(cols); in operand_row(cols).
template <class T, class M>
void pack_rows(const T* from, int64_t stride, int64_t rows, int64_t cols, compute_t<T> factor,
               M* to) {
  using V = Vec<compute_t<T>>;
  const int64_t width = padded_row(cols), ld = operand_row<M>(cols);
  for (int64_t r = 0; r < rows; ++r, from += stride, to += ld) {
    if constexpr (std::is_same_v<T, M>) {
      if (factor == 1 && cols > 0) {  // rows of no columns may be null
        __builtin_memcpy(to, from, static_cast<size_t>(cols) * sizeof(T));
        fill_zero(to + cols, width - cols);
        continue;
      }
    }
    int64_t c = 0;
    for (; c + V::kWidth <= cols; c += V::kWidth) store(to + c, load(from + c) * V(factor));
    for (; c < width; c += V::kWidth) store(to + c, load_n(from + c, cols - c) * V(factor));
  }
}

// Rows that products read as B, with row stride padded_row(cols); 16-bit operands in pairs of rows.
template <class T, class M>
void pack_operand_rows(const T* from, int64_t stride, int64_t rows, int64_t cols, M* to) {
  if constexpr (Operand<M>::kStep == 1) {
    pack_rows<T>(from, stride, rows, cols, compute_t<T>(1), to);
  } else {
    pack_rows(from, stride, rows, cols, to, padded_row(cols), padded_row(cols));
  }
}

// True if T is multiplied in its storage format. Scaled queries would be rounded once more, so
// logits and dS are scaled instead.
template <class T>
constexpr bool kKeepsQueries = sizeof(operand_t<T>) < sizeof(compute_t<T>);

// Packs queries of a head as operands; returns the factor that their products still lack.
template <class T, class M>
compute_t<T> pack_queries(const AttentionProblem& p, int64_t b, int64_t h, Range queries, M* to) {
  using A = compute_t<T>;
  const A factor = query_factor<A>(p, h);
  pack_rows<T>(row_of<T>(p.q, b, queries.begin, h), p.q.stride_t, queries.end - queries.begin, p.d,
               kKeepsQueries<T> ? A(1) : factor, to);
  return kKeepsQueries<T> ? factor : A(1);
}

// Number of elements in one packed column.
template <class M>
OMNIATTN_INLINE int64_t packed_depth(int64_t d) {
  return k_steps<M>(d) * Operand<M>::kStep;
}

// Packs key rows (count, d) as column panels, with zeros up to column `capacity`.
template <class T, class M>
void pack_keys_as_columns(const T* from, int64_t stride, int64_t d, int64_t count, int64_t capacity,
                          M* to) {
  pack_bt(from, stride, d, count, to);
  const int64_t packed = round_up(count, kPanelCols<M>), depth = packed_depth<M>(d);
  fill_zero(to + packed * depth, (capacity - packed) * depth);
}

// to[c] = factor * from[c], narrowed to T.
template <class T>
OMNIATTN_INLINE void store_row(const compute_t<T>* from, compute_t<T> factor, int64_t cols, T* to) {
  using V = Vec<compute_t<T>>;
  int64_t c = 0;
  for (; c + V::kWidth <= cols; c += V::kWidth) store(to + c, load(from + c) * V(factor));
  if (c < cols) store_n(to + c, load(from + c) * V(factor), cols - c);
}

// K^T [key panel][d][64] and V [key][padded_row(dv)] of one kv head (see packed_head_elements);
// 16-bit operands have pairs of d, and of keys, innermost.
template <class T>
struct PackedHead {
  using A = compute_t<T>;
  using M = operand_t<T>;
  M *k, *v;
  PackedHead(const AttentionProblem& p, void* memory, int64_t head) {
    A* const first = static_cast<A*>(memory) + head * packed_head_elements(p);
    k = reinterpret_cast<M*>(first);
    v = reinterpret_cast<M*>(first + packed_keys(p) * p.d);
  }
};

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
