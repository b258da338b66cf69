// Products of a few rows with keys at any addresses, in registers: each key is read in place, once
// for a few rows, without packing.
#pragma once

#include "runtime/gemm_tile.h"
#include "runtime/lane_sums.h"
#include "runtime/vec_int8.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Number of rows in registers, next to kKeys keys (in q.k) or vectors of a key's row (in P V). Four
// rows would not fit into 16 registers.
constexpr int kRows = kTileAccumulators < 16 ? 2 : 4;
constexpr int kKeys = 4;
// Narrow keys are converted once for each tile of rows: with few registers, four rows next to two
// keys take fewer instructions than two next to four.
template <class T>
constexpr bool kFewKeys = kTileAccumulators < 16 && sizeof(T) < sizeof(compute_t<T>);
template <class T>
constexpr int kRowsOf = kFewKeys<T> ? 4 : kRows;
template <class T, int kCount>
constexpr int kKeysOf = kFewKeys<T> && kCount == 4 ? 2 : kKeys;

// With more rows, packing keys pays; its cost does not depend on the number of rows.
constexpr int64_t kRowsInPlace = 16;

// Keeps the compiler from reading x from memory again in each product. GCC did, which took 10 %
// more time on Zen 3.
template <class A>
OMNIATTN_INLINE void keep_in_register([[maybe_unused]] Vec<A>& x) {
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(OMNIATTN_WIDE_VECTORS)
  asm("" : "+x"(x.v));
#endif
}

// Stores the sums of the lanes of acc[r][n] as s[r][n].
template <int kCount, int kN, class A>
OMNIATTN_INLINE void store_tile_sums(A* s, int64_t lds, const Vec<A> (&acc)[kCount][kN]) {
  if constexpr (kN == 4) {
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) store_sums(s + r * lds, acc[r]);
  } else {
    static_assert(kN == 2 && kCount % 2 == 0);
#pragma GCC unroll 2
    for (int r = 0; r < kCount; r += 2) {
      A sums[4];
      store_sums(sums, {acc[r][0], acc[r][1], acc[r + 1][0], acc[r + 1][1]});
      __builtin_memcpy(s + r * lds, sums, 2 * sizeof(A));
      __builtin_memcpy(s + (r + 1) * lds, sums + 2, 2 * sizeof(A));
    }
  }
}

// s[r][n] = q_r . k_n for up to kN keys at offsets `at` from k; rows of q are padded with zeros.
template <class T, int kCount, int kN>
OMNIATTN_INLINE void dot_tile(const compute_t<T>* q, int64_t ldq, const T* k, const int64_t* at,
                              int64_t keys, int64_t d, compute_t<T>* s, int64_t lds) {
  using V = Vec<compute_t<T>>;
  V acc[kCount][kN];
#pragma GCC unroll 4
  for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < kN; ++n) acc[r][n] = zero<compute_t<T>>();
  }
  const T* key[kN];  // a missing key repeats the last one
  for (int n = 0; n < kN; ++n) key[n] = k + at[n < keys ? n : keys - 1];
  for (int64_t c = 0; c < d; c += V::kWidth) {
    V x[kN];
#pragma GCC unroll 4
    for (int n = 0; n < kN; ++n) {
      x[n] = c + V::kWidth <= d ? load(key[n] + c) : load_n(key[n] + c, d - c);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
      V row = load(q + r * ldq + c);
      keep_in_register(row);
#pragma GCC unroll 4
      for (int n = 0; n < kN; ++n) acc[r][n] = fma(row, x[n], acc[r][n]);
    }
  }
  store_tile_sums(s, lds, acc);
}

// o[r][0 .. cols) += sum_n s[r][n] v_n, with v_n at offset at[n] from v, for kCount rows and kVecs
// vectors, the last of which may be partial.
template <class T, int kCount, int kVecs>
OMNIATTN_INLINE void weigh_tile(const compute_t<T>* s, int64_t lds, const T* v, const int64_t* at,
                                int64_t keys, int64_t cols, compute_t<T>* o, int64_t ldo) {
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
      const V p(s[r * lds + n]);
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

// Calls f(first row, Count<rows>) for tiles of kMost rows and a remainder.
template <int kCount>
struct Count {
  static constexpr int value = kCount;
};
template <int kMost, class F>
OMNIATTN_INLINE void for_row_tiles(int64_t rows, const F& f) {
  int64_t r = 0;
  for (; r + kMost <= rows; r += kMost) f(r, Count<kMost>{});
  if constexpr (kMost > 1) {
    if (r < rows) for_row_tiles<kMost / 2>(rows - r, [&](int64_t n, auto tile) { f(r + n, tile); });
  }
}

// s = q K^T for `rows` rows of q, padded with zeros, and `keys` keys at offsets `at` from k. All
// rows are multiplied by a few keys while these are in L1. fetch(n) prefetches later keys.
template <class T, class F>
void dot_rows_at(const compute_t<T>* q, int64_t ldq, int64_t rows, const T* k, const int64_t* at,
                 int64_t keys, int64_t d, compute_t<T>* s, int64_t lds, const F& fetch) {
  for (int64_t n = 0; n < keys; n += kKeys) {
    fetch(n);
    for_row_tiles<kRowsOf<T>>(rows, [&](int64_t r, auto tile) {
      constexpr int kCount = decltype(tile)::value, kN = kKeysOf<T, kCount>;
      for (int64_t i = n; i < n + kKeys && i < keys; i += kN) {
        dot_tile<T, kCount, kN>(q + r * ldq, ldq, k, at + i, keys - i, d, s + r * lds + i, lds);
      }
    });
  }
}

// o += s V, for a few columns of V at a time, which stay in L1.
template <class T>
void weigh_rows_at(const compute_t<T>* s, int64_t lds, int64_t rows, const T* v, const int64_t* at,
                   int64_t keys, int64_t cols, compute_t<T>* o, int64_t ldo) {
  constexpr int64_t kWidth = Vec<compute_t<T>>::kWidth;
  const auto weigh = [&](int64_t c, auto vectors) {
    for_row_tiles<kRowsOf<T>>(rows, [&](int64_t r, auto tile) {
      constexpr int kCount = decltype(tile)::value, kMost = kKeysOf<T, kCount>;
      constexpr int kVecs = decltype(vectors)::value < kMost ? decltype(vectors)::value : kMost;
      for (int64_t i = c; i < c + decltype(vectors)::value * kWidth; i += kVecs * kWidth) {
        weigh_tile<T, kCount, kVecs>(s + r * lds, lds, v + i, at, keys, cols - i, o + r * ldo + i,
                                     ldo);
      }
    });
  };
  int64_t c = 0;
  for (; c + 4 * kWidth <= cols; c += 4 * kWidth) weigh(c, Count<4>{});
  for (; c < cols; c += kWidth) weigh(c, Count<1>{});
}

// to[k] += sum over kCount rows r of s[r][k] y_r, for rows of `width` in whole vectors.
template <int kCount, int kTo, class A>
OMNIATTN_INLINE void add_tile(const A* s, int64_t lds, const A* y, int64_t ldy, int64_t width,
                              A* const (&to)[kTo]) {
  using V = Vec<A>;
  V factor[kCount][kTo];
#pragma GCC unroll 4
  for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 2
    for (int k = 0; k < kTo; ++k) factor[r][k] = V(s[r * lds + k]);
  }
  for (int64_t c = 0; c < width; c += V::kWidth) {
    V sum[kTo];
#pragma GCC unroll 2
    for (int k = 0; k < kTo; ++k) sum[k] = load(to[k] + c);
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
      const V row = load(y + r * ldy + c);
#pragma GCC unroll 2
      for (int k = 0; k < kTo; ++k) sum[k] = fma(factor[r][k], row, sum[k]);
    }
#pragma GCC unroll 2
    for (int k = 0; k < kTo; ++k) store(to[k] + c, sum[k]);
  }
}

// Adds s^T Y, where y has `rows` rows of Y, to the rows of `sum` at offsets `at`.
template <class A>
void add_rows_at(const A* s, int64_t lds, int64_t rows, const A* y, int64_t ldy, int64_t width,
                 const int64_t* at, int64_t keys, A* sum) {
  for (int64_t n = 0; n < keys;) {
    const bool two = n + 1 < keys && at[n] != at[n + 1];  // for two keys, a row of y is read once
    for_row_tiles<4>(rows, [&](int64_t r, auto tile) {
      constexpr int kCount = decltype(tile)::value;
      const A *const x = s + r * lds + n, *const row = y + r * ldy;
      if (two) {
        add_tile<kCount, 2>(x, lds, row, ldy, width, {sum + at[n], sum + at[n + 1]});
      } else {
        add_tile<kCount, 1>(x, lds, row, ldy, width, {sum + at[n]});
      }
    });
    n += two ? 2 : 1;
  }
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
