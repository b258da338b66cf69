// Products of decoding on the CPU (see attention_decode_cpu.cpp): a few keys, at any addresses,
// times all query rows that share them, in registers or by register tiles.
#pragma once

#include "kernels/attention/attention_tile.h"
#include "kernels/attention/few_rows.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Some keys of one kv head, at most a panel, and buffers for their products with the rows.
template <class T>
struct KeyTile {
  using A = compute_t<T>;
  const T *k, *v;  // key n is at offset at_k[n], its value at at_v[n]
  const int64_t *at_k, *at_v;
  int64_t count;
  const A* q;            // (rows, d), padded, or Q^T in panels
  A* s;                  // (rows, kKeyPanel)
  A *transposed, *wide;  // for register tiles: S^T, and k or v as padded rows
  A* o;                  // (rows, dv) of the partials, with row stride ldo
  int64_t ldo;
};

// s = Q K^T; o += P V.
template <class T, class F>
void dot_rows(const AttentionProblem& p, int64_t rows, const KeyTile<T>& x, const F& fetch) {
  dot_rows_at(x.q, padded_row(p.d), rows, x.k, x.at_k, x.count, p.d, x.s, kKeyPanel, fetch);
}

template <class T>
void weigh_rows(const AttentionProblem& p, int64_t rows, const KeyTile<T>& x) {
  weigh_rows_at(x.s, kKeyPanel, rows, x.v, x.at_v, x.count, p.dv, x.o, x.ldo);
}

template <class A>
struct WideRows {
  const A* data;
  int64_t stride;
};

// Rows of the compute type with one stride: in place if possible, otherwise copied to `memory`.
template <class T>
WideRows<compute_t<T>> wide_rows(const T* from, const int64_t* at, int64_t count, int64_t cols,
                                 compute_t<T>* memory) {
  if constexpr (sizeof(T) == sizeof(compute_t<T>)) {
    const int64_t stride = count > 1 ? at[1] - at[0] : cols;
    bool fits = stride % 256 != 0;  // rows with such a stride share few sets of L1
    for (int64_t n = 1; fits && n < count; ++n) fits = at[n] - at[n - 1] == stride;
    if (fits) return {from + at[0], stride};
  }
  const int64_t stride = padded_row(cols);
  for (int64_t n = 0; n < count; ++n) {
    pack_rows<T>(from + at[n], 0, 1, cols, compute_t<T>(1), memory + n * stride);
  }
  return {memory, stride};
}

// to[c][r] = from[r][c].
template <class A>
void transpose_rows(const A* from, int64_t ld, int64_t rows, int64_t cols, A* to, int64_t ld_to) {
  constexpr int64_t kWidth = Vec<A>::kWidth;
  for (int64_t c = 0; c < cols; c += kWidth) {
    for (int64_t r = 0; r < rows; r += kWidth) {
      pack_transposed_block(from + r * ld + c, ld, rows - r, cols - c, cols - c, to + c * ld_to + r,
                            ld_to);
    }
  }
}

// True if the values are the first columns of the keys, as in MLA.
OMNIATTN_INLINE bool are_values_of_keys(const AttentionProblem& p) {
  return p.k.data == p.v.data && p.k.stride_b == p.v.stride_b && p.k.stride_t == p.v.stride_t &&
         p.k.stride_h == p.v.stride_h && p.dv <= p.d;
}

// dot_rows and weigh_rows by register tiles. dot_tiles returns the rows of k.
template <class T>
WideRows<compute_t<T>> dot_tiles(const AttentionProblem& p, int64_t rows, const KeyTile<T>& x) {
  using A = compute_t<T>;
  const int64_t ld = round_up(rows, kKeyPanel);
  const WideRows<A> k = wide_rows(x.k, x.at_k, x.count, p.d, x.wide);
  gemm_tile<A>(k.data, k.stride, packed_panels(x.q, p.d), x.transposed, ld, x.count, rows, p.d,
               false);
  transpose_rows(x.transposed, ld, x.count, rows, x.s, kKeyPanel);
  return k;
}
template <class T>
void weigh_tiles(const AttentionProblem& p, int64_t rows, const KeyTile<T>& x,
                 const WideRows<compute_t<T>>& k) {
  const WideRows<compute_t<T>> v =
      are_values_of_keys(p) ? k : wide_rows(x.v, x.at_v, x.count, p.dv, x.wide);
  gemm_tile<compute_t<T>>(x.s, kKeyPanel, row_panels(v.data, v.stride), x.o, x.ldo, rows, p.dv,
                          x.count, true);
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
