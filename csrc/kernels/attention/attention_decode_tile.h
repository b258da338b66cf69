// The products of decoding on the CPU (see attention_decode_cpu.cpp): a few keys, at any addresses,
// with all query rows that share them, in registers or by register tiles.
#pragma once

#include "kernels/attention/attention_tile.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

constexpr int kRows = 4;  // query rows in registers, with
constexpr int kKeys = 4;  // keys (in q.k) or vectors of a V row (in P V)

// Sums of adjacent lanes, first of a, then of b.
template <class A>
OMNIATTN_INLINE Vec<A> fold(Vec<A> a, Vec<A> b) {
  const VecPair<Vec<A>> lanes = deinterleave(a, b);
  return lanes.first + lanes.second;
}
// p[i] = the sum of the lanes of x[i]. Takes half the instructions of four reduce_add, which were a
// quarter of the time of dot_tile.
template <class A>
OMNIATTN_INLINE void store_sums(A* p, const Vec<A> (&x)[4]) {
  constexpr int kWidth = Vec<A>::kWidth;
  if constexpr (kWidth < 4) {
    for (int i = 0; i < 4; ++i) p[i] = reduce_add(x[i]);
  } else {
    Vec<A> sums = fold(fold(x[0], x[1]), fold(x[2], x[3]));
#pragma GCC unroll 4
    for (int lanes = kWidth / 4; lanes > 1; lanes /= 2) sums = fold(sums, sums);
    store_n(p, sums, 4);
  }
}

// s[r][n] = q_r . k_n for up to kKeys keys, at offsets `at` from k; q rows are padded with zeros.
template <class T, int kCount>
OMNIATTN_INLINE void dot_tile(const compute_t<T>* q, int64_t ldq, const T* k, const int64_t* at,
                              int64_t keys, int64_t d, compute_t<T>* s) {
  using V = Vec<compute_t<T>>;
  V acc[kCount][kKeys];
#pragma GCC unroll 4
  for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < kKeys; ++n) acc[r][n] = zero<compute_t<T>>();
  }
  const T* key[kKeys];  // a missing key repeats the last one
  for (int n = 0; n < kKeys; ++n) key[n] = k + at[n < keys ? n : keys - 1];
  for (int64_t c = 0; c < d; c += V::kWidth) {
    V x[kKeys];
#pragma GCC unroll 4
    for (int n = 0; n < kKeys; ++n) {
      x[n] = c + V::kWidth <= d ? load(key[n] + c) : load_n(key[n] + c, d - c);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
      const V row = load(q + r * ldq + c);
#pragma GCC unroll 4
      for (int n = 0; n < kKeys; ++n) acc[r][n] = fma(row, x[n], acc[r][n]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kCount; ++r) store_sums(s + r * kKeyPanel, acc[r]);
}

// o[r][0 .. cols) += sum_n s[r][n] v_n, with v_n at offset at[n] from v; kCount rows, kVecs
// vectors, the last of which may be partial.
template <class T, int kCount, int kVecs>
OMNIATTN_INLINE void weigh_tile(const compute_t<T>* s, const T* v, const int64_t* at, int64_t keys,
                                int64_t cols, compute_t<T>* o, int64_t ldo) {
  using V = Vec<compute_t<T>>;
  V acc[kCount][kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) acc[r][c] = load(o + r * ldo + c * V::kWidth);
  }
  const bool whole = cols >= kVecs * V::kWidth;
  for (int64_t n = 0; n < keys; ++n) {
    const T* const row = v + at[n];
    V x[kVecs];
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) {
      x[c] = whole ? load(row + c * V::kWidth) : load_n(row + c * V::kWidth, cols - c * V::kWidth);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
      const V p(s[r * kKeyPanel + n]);
#pragma GCC unroll 4
      for (int c = 0; c < kVecs; ++c) acc[r][c] = fma(p, x[c], acc[r][c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) store(o + r * ldo + c * V::kWidth, acc[r][c]);
  }
}

// Calls f(first row, Count<rows>) for tiles of kRows rows and a remainder.
template <int kCount>
struct Count {
  static constexpr int value = kCount;
};
template <class F>
OMNIATTN_INLINE void for_row_tiles(int64_t rows, const F& f) {
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) f(r, Count<kRows>{});
  switch (rows - r) {
    case 3:
      return f(r, Count<3>{});
    case 2:
      return f(r, Count<2>{});
    case 1:
      return f(r, Count<1>{});
    default:
      return;
  }
}

// Some keys of one kv head, at most a panel, and the buffers of their products with the rows.
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

// s = Q K^T. All rows are multiplied with a few keys while these are in L1. First fetch(n)
// prefetches later keys.
template <class T, class F>
void dot_rows(const AttentionProblem& p, int64_t rows, const KeyTile<T>& x, const F& fetch) {
  const int64_t ldq = padded_row(p.d);
  for (int64_t n = 0; n < x.count; n += kKeys) {
    fetch(n);
    for_row_tiles(rows, [&](int64_t r, auto tile) {
      dot_tile<T, decltype(tile)::value>(x.q + r * ldq, ldq, x.k, x.at_k + n, x.count - n, p.d,
                                         x.s + r * kKeyPanel + n);
    });
  }
}

// o += P V, a few columns of V at a time, so that these stay in L1.
template <class T>
void weigh_rows(const AttentionProblem& p, int64_t rows, const KeyTile<T>& x) {
  constexpr int64_t kWidth = Vec<compute_t<T>>::kWidth;
  const auto weigh = [&](int64_t c, auto vectors) {
    for_row_tiles(rows, [&](int64_t r, auto tile) {
      weigh_tile<T, decltype(tile)::value, decltype(vectors)::value>(
          x.s + r * kKeyPanel, x.v + c, x.at_v, x.count, p.dv - c, x.o + r * x.ldo + c, x.ldo);
    });
  };
  int64_t c = 0;
  for (; c + 4 * kWidth <= p.dv; c += 4 * kWidth) weigh(c, Count<4>{});
  for (; c < p.dv; c += kWidth) weigh(c, Count<1>{});
}

template <class A>
struct WideRows {
  const A* data;
  int64_t stride;
};

// Rows of the compute type with one stride: in place if they have it, else copied to `memory`.
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

// Whether the values are the first columns of the keys, as in MLA.
OMNIATTN_INLINE bool are_values_of_keys(const AttentionProblem& p) {
  return p.k.data == p.v.data && p.k.stride_b == p.v.stride_b && p.k.stride_t == p.v.stride_t &&
         p.k.stride_h == p.v.stride_h && p.dv <= p.d;
}

// The same products by register tiles. dot_tiles returns the rows of k.
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
