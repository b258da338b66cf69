// Products of tiles by tensor cores (mma.sync m16n8k16) for 16-bit dtypes and head sizes up to 256,
// padded with zeros to kD = 64, 128 or 256.
//
// A block has kWarps worker warps and a planner warp. A worker owns 16 rows of the results. Lane
// 4 g + t holds columns 2 t and 2 t + 1 of rows g and g + 8 of 16 x 8 elements, which is the layout
// of the left operand of the next product. The planner finds the tiles that the mask leaves, and
// the visible pairs of partial tiles, one tile ahead: the workers' registers are full of sums,
// while the planner's are free for any rule.
#pragma once

#include "kernels/attention/attention_tile_cuda.h"
#include "runtime/gpu_mma.h"
#include "runtime/gpu_row.h"

namespace omniattn::gpu {

template <int kWarps>
struct Team {
  static constexpr int kWorkers = 32 * kWarps, kThreads = kWorkers + 32;

  static __device__ __forceinline__ bool plans() { return warp_id() == kWarps; }
  static __device__ __forceinline__ void meet() { barrier_sync(1, kThreads); }
  static __device__ __forceinline__ void workers_meet() { barrier_sync(2, kWorkers); }
};

// Operands.

// A lane's offset for pieces 2 k and 2 k + 1 is its offset for pieces 0 and 1, xor 16 k.

// acc (16 x 8 N) = rows [first, first + 16) of x times the first 8 N rows of y.
template <int N, class T, int kD>
__device__ __forceinline__ void multiply_rows(float (&acc)[N][4], const SharedRows<T, kD>& x,
                                              int first, const SharedRows<T, kD>& y) {
  using Rows = SharedRows<T, kD>;
  const int lane = lane_id();
  const int x_at = opaque(Rows::offset(first + lane % 16, lane / 16));
  const int y_at = opaque(Rows::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2));
  clear(acc);
#pragma unroll
  for (int k = 0; k < kD / 16; ++k) {
    uint32_t a[4];
    ldmatrix_x4(a, x.data + (x_at ^ 16 * k));
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, y.data + 8 * n * kD + (y_at ^ 16 * k));
      mma<T>(acc[n], a, {b[0], b[1]});
      mma<T>(acc[n + 1], a, {b[2], b[3]});
    }
  }
}

// 16 x 8 N elements, as the left operand of a sum over their columns.
template <int N>
struct LeftOperand {
  uint32_t a[N / 2][4];
};
template <class T, int N>
__device__ __forceinline__ LeftOperand<N> as_left(const float (&x)[N][4]) {
  LeftOperand<N> left;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    left.a[n / 2][n % 2 * 2] = pack<T>(x[n][0], x[n][1]);
    left.a[n / 2][n % 2 * 2 + 1] = pack<T>(x[n][2], x[n][3]);
  }
  return left;
}

// acc (16 x 8 C) += x y, for the first 8 N rows of y and its columns from `first` on.
template <int C, int N, class T, int kD>
__device__ __forceinline__ void multiply_sum(float (&acc)[C][4], const LeftOperand<N>& x,
                                             const SharedRows<T, kD>& y, int first) {
  const int lane = lane_id();
  const int y_at = opaque(SharedRows<T, kD>::offset(lane % 16, lane / 16));
#pragma unroll
  for (int k = 0; k < N / 2; ++k) {
#pragma unroll
    for (int c = 0; c < C; c += 2) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, y.data + 16 * k * kD + (y_at ^ (first + 8 * c)));
      mma<T>(acc[c], x.a[k], {b[0], b[1]});
      mma<T>(acc[c + 1], x.a[k], {b[2], b[3]});
    }
  }
}

// row[8 c + ...] = factor * acc for this lane's row g + 8 half; width is a multiple of 8.
template <class T, int C>
__device__ __forceinline__ void store_row(const float (&acc)[C][4], int half, float factor, T* row,
                                          int64_t width) {
  const int t = lane_id() % 4;
#pragma unroll
  for (int c = 0; c < C; ++c) {
    if (8 * c < width) {
      *reinterpret_cast<uint32_t*>(row + 8 * c + 2 * t) =
          pack<T>(factor * acc[c][2 * half], factor * acc[c][2 * half + 1]);
    }
  }
}

// This lane's share of the sum of row[8 c + ...] * acc in its row g + 8 half.
template <class T, int C>
__device__ __forceinline__ float row_dot(const float (&acc)[C][4], int half, const T* row,
                                         int64_t width) {
  const int t = lane_id() % 4;
  float sum = 0;
#pragma unroll
  for (int c = 0; c < C; ++c) {
    if (8 * c < width) {
      sum += gpu::widen(row[8 * c + 2 * t]) * acc[c][2 * half] +
             gpu::widen(row[8 * c + 2 * t + 1]) * acc[c][2 * half + 1];
    }
  }
  return sum;
}

// Reduces over the 4 lanes that share a row.
template <class F>
__device__ __forceinline__ float reduce_row(float x, const F& f) {
  x = f(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return f(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// The score of a call whose weights are 2^(unit (pre q.k - shift)), none dropped. Kernels have it
// as a parameter: constants take no registers.
struct PlainScore {
  bool plain;  // false: other weights; the numbers are not used
  float pre, unit;
};
inline PlainScore plain_score(const AttentionProblem& p) {
  const bool plain = is_plain(p.terms) && is_softmax(p.score) && p.dropout.threshold == 0;
  return {plain, static_cast<float>(p.score.pre), exponent_factor<float>(p.score)};
}

__device__ __forceinline__ bool bit(uint64_t word, int n) { return (word >> n & 1) != 0; }

// Plans.

// Plans form a ring of three: the planner writes one while the workers use the previous two.
__device__ __forceinline__ int next_plan(int slot) { return slot == 2 ? 0 : slot + 1; }

// Used by the planner: finds the blocks of a cursor that hold a visible pair, 32 at a time.
struct BlockSearch {
  int64_t first;        // block number of bit 0
  uint32_t seen, full;  // of 32 blocks: those still to be returned, and those without a hidden pair

  // Next block, or -1 if there is none; `masked` becomes true if one of its pairs is hidden.
  // `classify` returns the class of a block.
  template <class Cursor, class F>
  __device__ __forceinline__ int64_t next(Cursor& cursor, bool& masked, const F& classify) {
    while (seen == 0) {
      first = next_block(cursor);
      if (first < 0) return -1;
      const int64_t n = first + lane_id();
      const TileClass found = n < cursor.left.end ? classify(n) : TileClass::skip;
      seen = __ballot_sync(0xffffffffu, found != TileClass::skip);
      full = __ballot_sync(0xffffffffu, found == TileClass::full);
      cursor.left.begin = first + 32;
    }
    const int bit = __ffs(static_cast<int>(seen)) - 1;
    seen &= seen - 1;
    masked = (full >> bit & 1) == 0;
    return first + bit;
  }
};

// A tile of kQueries x kKeys and its offsets. Workers read them from shared memory
// rather than hold them in registers.
template <int kQueries, int kKeys>
struct KeyPlan {
  int64_t block;               // number of the block of keys; -1: no further tile
  Tile tile;                   // its sequence, head and queries are valid at the end, too
  int64_t k, v, keys;          // offsets of the first rows of K and V, and the number of rows left
  uint64_t visible[kQueries];  // keys of each query, if masked

  // Called by the planner for block n of the keys of `row`; n = -1 marks the end.
  __device__ __forceinline__ void make(const AttentionProblem& p, const Tile& row, int64_t n,
                                       bool masked) {
    const int lane = lane_id();
    const Sequence& s = row.sequence;
    const int64_t key = n * kKeys;
    if (lane == 0) {
      const int64_t kv = kv_head(row.h, p.hq, p.hkv);
      block = n;
      tile = {s, row.b, row.h, row.q, key, masked};
      k = s.entry * p.k.stride_b + (s.k + key) * p.k.stride_t + kv * p.k.stride_h;
      v = s.entry * p.v.stride_b + (s.k + key) * p.v.stride_t + kv * p.v.stride_h;
      keys = s.tk - key;
    }
    if (n < 0 || !masked) return;
    for (int r = lane; r < kQueries; r += 32) {
      visible[r] = row_bits(p, s, row.b, row.h, row.q + r, key);
    }
  }
};

// Queries of a head that a block computes together: a tile with any key, and their range.
struct QueryItem {
  Tile row;
  Range queries;  // empty past the end of a sequence
};

// Used by the planner: plans all tiles of an item and calls Workers::meet() after each.
template <class Workers, int kQueries, int kKeys>
__device__ __forceinline__ void plan_keys(const AttentionProblem& p, const QueryItem& item,
                                          KeyPlan<kQueries, kKeys> (&plans)[3], int& slot) {
  const Tile& row = item.row;
  auto cursor = cursor_of<Along::keys>(p, row.sequence, row.b, row.h, item.queries, kKeys);
  BlockSearch search{};
  int64_t n = 0;
  do {
    bool masked = false;
    n = search.next(cursor, masked, [&](int64_t at) {
      return tile_class(p, row.sequence, row.b, row.h, item.queries,
                        {at * kKeys, (at + 1) * kKeys});
    });
    plans[slot].make(p, row, n, masked || item.queries.end - item.queries.begin < kQueries);
    __syncwarp();
    slot = next_plan(slot);
    Workers::meet();
  } while (n >= 0);
}

// The shuffle tells the compiler that all lanes of the warp have the same result.
template <class Plan>
__device__ __forceinline__ int64_t block_of(const Plan& plan) {
  return __shfl_sync(0xffffffffu, plan.block, 0);
}

// Elements.

// x[i] = f(i, x[i]) in a loop that is not unrolled; `slots` has kCount numbers per thread.
template <int kThreads, int kCount, class F>
__device__ __forceinline__ void apply_in_loop(float* slots, float (&x)[kCount], const F& f) {
  slots += threadIdx.x;
#pragma unroll
  for (int i = 0; i < kCount; ++i) slots[i * kThreads] = x[i];
#pragma unroll 1
  for (int i = 0; i < kCount; ++i) slots[i * kThreads] = f(i, slots[i * kThreads]);
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = slots[i * kThreads];
}

// The dropout bits of keys key, ..., key + kKeys - 1 of one query.
template <int kKeys>
__device__ __forceinline__ uint32_t kept_keys(const AttentionProblem& p, const Tile& tile, int row,
                                              int64_t key) {
  uint32_t bits = 0;
#pragma unroll 1  // for registers
  for (int n = 0; n < kKeys; n += 4) {
    bits |= static_cast<uint32_t>(
                keep_groups<1>(dropout_of(p), tile.b * p.hq + tile.h, tile.q + row, key + n))
            << n;
  }
  return bits;
}

// True if every row of a view of 16-bit elements starts at a multiple of 16 bytes, as cp.async
// requires. Packed sequences are rows of one batch entry.
inline bool has_aligned_rows(const HeadView& x, int64_t batch, int64_t rows, int64_t heads) {
  const auto fits = [](int64_t size, int64_t stride) { return size <= 1 || stride % 8 == 0; };
  return aligned_16(x.data) && fits(batch, x.stride_b) && fits(rows, x.stride_t) &&
         fits(heads, x.stride_h);
}
inline bool has_aligned_queries(const AttentionProblem& p, const HeadView& x) {
  const bool packed = p.sequences.q != nullptr;
  return has_aligned_rows(x, packed ? 1 : p.batch, packed ? p.sequences.rows_q : p.tq, p.hq);
}
inline bool has_aligned_keys(const AttentionProblem& p, const HeadView& x) {
  const bool packed = p.sequences.q != nullptr;
  return has_aligned_rows(x, packed ? 1 : p.batch, packed ? p.sequences.rows_k : p.tk, p.hkv);
}

// Calls f(T{}, Head<kD>{}) with a 16-bit dtype and the smallest kD that holds the head sizes.
template <int kD>
struct Head {};
template <class F>
void dispatch_mma(const AttentionProblem& p, const F& f) {
  const auto with_dtype = [&]<class T>(T) {
    const int64_t d = max(p.d, p.dv);
    if (d <= 64) {
      f(T{}, Head<64>{});
    } else if (d <= 128) {
      f(T{}, Head<128>{});
    } else {
      f(T{}, Head<256>{});
    }
  };
  p.dtype == DType::bf16 ? with_dtype(bf16{}) : with_dtype(f16{});
}

}  // namespace omniattn::gpu
