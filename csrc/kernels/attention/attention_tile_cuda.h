// Shared by all CUDA kernels of attention: places of rows, visible and kept keys of a tile, and the
// computation of logits from q.k and its derivative. A tile is 64 queries x 64 keys, so that the
// keys of a query fit in one word.
#pragma once

#include "kernels/attention/attention_params.h"
#include "runtime/gpu.h"
#include "semantics/block_schedule.h"
#include "semantics/packed_rows.h"
#include "semantics/softmax.h"

namespace omniattn::gpu {

inline constexpr int kTile = 64;

template <class T>
__device__ __forceinline__ const T* row_of(const HeadView& x, int64_t b, int64_t t, int64_t h) {
  return static_cast<const T*>(x.data) + b * x.stride_b + t * x.stride_t + h * x.stride_h;
}
template <class T>
__device__ __forceinline__ T* row_of(const MutableHeadView& x, int64_t b, int64_t t, int64_t h) {
  return static_cast<T*>(x.data) + b * x.stride_b + t * x.stride_t + h * x.stride_h;
}

// One problem of the call: a batch entry, or a sequence of a packed or cached batch.
struct Sequence {
  int64_t entry;         // batch entry of the tensors
  int64_t q, tq, k, tk;  // first rows and lengths
};
__device__ __forceinline__ Sequence sequence_of(const AttentionProblem& p, int64_t b) {
  const SequenceRows& rows = p.sequences;
  if (rows.k == nullptr) return {b, 0, p.tq, 0, p.tk};
  if (rows.q == nullptr) {
    GPU_REQUIRE(rows.k[b] >= 0 && rows.k[b] <= p.tk,
                "attention_cached: cache_seqlens must lie in [0, Tk], the rows of the cache");
    return {b, 0, p.tq, 0, rows.k[b]};
  }
  const int64_t q = rows.q[b], tq = rows.q[b + 1] - q, k = rows.k[b], tk = rows.k[b + 1] - k;
  GPU_REQUIRE(
      tq <= p.tq && fits_rows(b, p.batch, q, tq, rows.rows_q),
      "attention_varlen: cu_seqlens_q must grow by 0 to max_seqlen_q, from 0 to the rows of q");
  GPU_REQUIRE(
      tk <= p.tk && fits_rows(b, p.batch, k, tk, rows.rows_k),
      "attention_varlen: cu_seqlens_k must grow by 0 to max_seqlen_k, from 0 to the rows of k");
  return {0, q, tq, k, tk};
}

// Index of a query in lse and tensors like it.
__device__ __forceinline__ int64_t row_index(const AttentionProblem& p, const Sequence& s,
                                             int64_t h, int64_t q) {
  return (s.entry * p.hq + h) * p.lse_stride + s.q + q;
}

__device__ __forceinline__ MaskView mask_of(const AttentionProblem& p, const Sequence& s) {
  return {s.tq, s.tk, p.mask};
}

// Queries q, ..., q + 63 of one head against keys k, ..., k + 63.
struct Tile {
  Sequence sequence;
  int64_t b, h, q, k;
  bool masked;  // some pair is hidden or past the end
};

// The rules of the mask stay function calls, made for masked problems only: inlined, their many
// cases would cost every kernel registers and compile time.
GPU_NOINLINE TileClass tile_class(const AttentionProblem& p, const Sequence& s, int64_t b,
                                  int64_t h, Range q, Range k) {
  return classify(mask_of(p, s), b, h, q, k);
}
GPU_NOINLINE uint64_t row_bits(const AttentionProblem& p, const Sequence& s, int64_t b, int64_t h,
                               int64_t q, int64_t key) {
  return q < s.tq ? visible_bits(mask_of(p, s), b, h, q, key) : 0;
}

// Determines whether the tile is masked. Returns false if no pair is visible.
__device__ __forceinline__ bool plan(const AttentionProblem& p, Tile& tile) {
  const Sequence& s = tile.sequence;
  tile.masked = tile.k + kTile > s.tk || tile.q + kTile > s.tq;
  if (p.mask.count == 0) return true;
  const TileClass found = tile_class(p, s, tile.b, tile.h, block(tile.q / kTile, kTile, s.tq),
                                     {tile.k, tile.k + kTile});
  tile.masked = tile.masked || found != TileClass::full;
  return found != TileClass::skip;
}

// Out of line like tile_class.
template <Along kAlong>
GPU_NOINLINE Cursor<kAlong> cursor_of(const AttentionProblem& p, const Sequence& s, int64_t b,
                                      int64_t h, Range others, int64_t size) {
  return {mask_of(p, s), b, h, others, size};
}
template <Along kAlong>
GPU_NOINLINE int64_t next_block(Cursor<kAlong>& cursor) {
  return cursor.next();
}

// Moves a tile along the keys of its queries, or the queries of its keys, to
// each tile with a visible pair.
template <Along kAlong>
struct Tiles {
  const AttentionProblem& p;
  Cursor<kAlong> blocks;

  __device__ __forceinline__ Tiles(const AttentionProblem& problem, const Tile& tile)
      : p(problem),
        blocks(cursor_of<kAlong>(p, tile.sequence, tile.b, tile.h, others(tile), kTile)) {}
  __device__ __forceinline__ bool next(Tile& tile) {
    for (int64_t n; (n = next_block(blocks)) >= 0;) {
      (kAlong == Along::keys ? tile.k : tile.q) = n * kTile;
      if (plan(p, tile)) return true;
    }
    return false;
  }

 private:
  static __device__ __forceinline__ Range others(const Tile& tile) {
    return kAlong == Along::keys ? block(tile.q / kTile, kTile, tile.sequence.tq)
                                 : block(tile.k / kTile, kTile, tile.sequence.tk);
  }
};

// Reads a seed in GPU memory here, so that each replay of a captured graph can have another seed.
__device__ __forceinline__ Dropout dropout_of(const AttentionProblem& p) {
  Dropout dropout = p.dropout;
  if (p.seed != nullptr) {
    dropout.key = philox_key(p.seed[0]);
    dropout.offset = static_cast<uint32_t>(p.seed[1]);
  }
  return dropout;
}

// Visible keys, and keys kept by dropout, for each query of a tile.
struct TileBits {
  uint64_t visible[kTile];  // written if the tile is masked
  uint16_t keep[kTile][4];  // written if there is dropout

  // Called by all threads of the block; needs a barrier before the bits are read.
  __device__ __forceinline__ void load(const AttentionProblem& p, const Tile& tile) {
    const int threads = static_cast<int>(blockDim.x);
    if (tile.masked) {
      for (int r = static_cast<int>(threadIdx.x); r < kTile; r += threads) {
        visible[r] = row_bits(p, tile.sequence, tile.b, tile.h, tile.q + r, tile.k);
      }
    }
    if (p.dropout.threshold != 0) {
      for (int i = static_cast<int>(threadIdx.x); i < 4 * kTile; i += threads) {
        const int r = i / 4, part = i % 4;
        keep[r][part] = static_cast<uint16_t>(
            keep_groups<4>(dropout_of(p), tile.b * p.hq + tile.h, tile.q + r, tile.k + 16 * part));
      }
    }
  }

  __device__ __forceinline__ bool sees(const Tile& tile, int r, int n) const {
    return !tile.masked || (visible[r] >> n & 1) != 0;
  }
  // Dropout factor: 0 or 1 / (1 - p).
  template <class A>
  __device__ __forceinline__ A factor(const AttentionProblem& p, int r, int n) const {
    if (p.dropout.threshold == 0) return A(1);
    return (keep[r][n / 16] >> n % 16 & 1) != 0 ? static_cast<A>(p.dropout.scale) : A(0);
  }
};

// Element of the table term for (0, 0) of a sequence. All sequences are aligned at their ends.
__device__ __forceinline__ int64_t relative_origin(const AttentionProblem& p, const Sequence& s) {
  const int64_t shorter = is_relative(p.table.kind) ? (p.tk - s.tk) - (p.tq - s.tq) : 0;
  return p.relative.origin + shorter;
}

template <class A>
__device__ __forceinline__ A score_at(const ScoreView& x, int64_t offset) {
  if constexpr (sizeof(A) == 8) {
    return x.dtype == DType::f64 ? static_cast<const double*>(x.data)[offset]
                                 : static_cast<const float*>(x.data)[offset];
  } else {
    if (x.dtype == DType::bf16) return gpu::widen(static_cast<const bf16*>(x.data)[offset]);
    if (x.dtype == DType::f16) return gpu::widen(static_cast<const f16*>(x.data)[offset]);
    return static_cast<const float*>(x.data)[offset];
  }
}

// A logit, -inf if hidden, and its derivative with respect to pre * q.k.
template <class A>
struct Logit {
  A value, slope;
};

// Computes a pair's logit from q.k. The factor of a head is part of query_factor.
template <class A>
__device__ __forceinline__ Logit<A> logit_of(const AttentionProblem& p, const Tile& tile, int r,
                                             int n, A dot, bool sees) {
  if (!sees) return {negative_infinity<A>(), A(0)};
  A x = query_factor<A>(p, tile.h) * dot, slope = 1;
  if (p.score.transform != ScoreKind::none) {
    const auto g = transform_at(p.score, x);
    x = static_cast<A>(p.score.post) * g.value;
    slope = g.slope;
  }
  if (p.bias.data != nullptr) {
    const int64_t offset = tile.b * p.bias.stride_b + tile.h * p.bias.stride_h +
                           (tile.q + r) * p.bias.stride_q + tile.k + n;
    x += score_at<A>(p.bias, offset);
  }
  if (p.relative.data != nullptr) {
    const RelativeView& t = p.relative;
    x +=
        static_cast<const A*>(t.data)[relative_origin(p, tile.sequence) + tile.b * t.stride_b +
                                      tile.h * t.stride_h + (tile.q + r) * t.stride_q + tile.k + n];
  }
  return {x, slope};
}

// P of a row is factor * e^(logit - shift), see BackwardShift.
template <class A>
struct RowStats {
  A shift, factor, delta;
};
// Statistics at index `row` of lse.
template <class A>
__device__ __forceinline__ RowStats<A> stats_of(const AttentionBackwardParams& params,
                                                int64_t row) {
  const Lse<A> lse{static_cast<const A*>(params.lse)[row],
                   static_cast<const A*>(params.lse_tail)[row]};
  const auto [shift, exponent] = softmax_backward_shift(params.problem.score, lse);
  return {shift, exp2(exponent), static_cast<const A*>(params.workspace)[row]};
}

// Gradients of one pair.
template <class A>
struct PairGradient {
  A weight;  // Z P, which multiplies v
  A logit;   // dS, for bias and table
  A dot;     // with respect to query_factor * q.k, in natural units
};

// Computes the gradients from q.k and dP = dO.v; z is the dropout factor.
template <class A>
__device__ __forceinline__ PairGradient<A> gradient_of(const AttentionProblem& p, const Tile& tile,
                                                       int r, int n, bool sees, A z, A dot, A dp,
                                                       const RowStats<A>& stats) {
  if (!sees) return {0, 0, 0};  // a hidden key may hold anything
  const Logit<A> logit = logit_of(p, tile, r, n, dot, true);
  if (!is_softmax(p.score)) {
    const auto weight = weight_at(p.score, logit.value);
    const A grad = weight.slope * z * dp;
    return {weight.value * z, grad, grad * logit.slope};
  }
  const A e = stats.factor * exp2(exponent_factor<A>(p.score) * (logit.value - stats.shift));
  const A grad = e * (z * dp - stats.delta);
  return {e * z, grad, grad * logit.slope};
}

// Scale, pre * chain, of sums of PairGradient::dot; the factor of a head multiplies them, too.
template <class A>
__device__ __forceinline__ A gradient_scale(const AttentionProblem& p) {
  return static_cast<A>(p.score.pre * p.score.chain);
}

// Number of blocks for a number of work items; kernels loop over the grid.
inline unsigned item_grid(int64_t items) {
  return static_cast<unsigned>(min(items, int64_t{0x7fffffff}));
}

}  // namespace omniattn::gpu
