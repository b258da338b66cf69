// Backward for any dtype and head size, see attention.h. Every gradient has one owner, so that sums
// have a fixed order without atomics, at the price of computing P and dS once per kernel:
//
//   delta   a warp per query row: rowsum(dO * O) - dlse
//   dq      a block per 64 queries of a head and chunk of columns, over the keys
//   dkdv    a block per 64 keys of a kv head and chunk of columns, over the heads and queries
//   dbias   a block per 64 keys of a row (of 64 queries) of the bias, over what it is broadcast to
#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/attention_fma_cuda.h"
#include "runtime/dispatch.h"
#include "runtime/gpu_row.h"

namespace omniattn {
namespace {

using namespace gpu;

constexpr int kDeltaRows = 8;  // per block, one warp each

template <class T>
__global__ void __launch_bounds__(32 * kDeltaRows)
    attention_delta_kernel(const __grid_constant__ AttentionBackwardParams params) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.problem;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  for (; row < query_rows(p); row += step) {
    const int64_t q = row % p.tq, h = row / p.tq % p.hq, b = row / p.tq / p.hq;
    const T* const out = row_of<T>(params.out, b, q, h);
    const T* const grad = row_of<T>(params.grad_out, b, q, h);
    A sum = 0;
    for (int64_t c = threadIdx.x; c < p.dv; c += 32)
      sum += gpu::widen(out[c]) * gpu::widen(grad[c]);
    sum = warp_reduce(sum, [](A x, A y) { return x + y; });
    if (params.grad_lse != nullptr) sum -= static_cast<const A*>(params.grad_lse)[row];
    if (threadIdx.x == 0) static_cast<A*>(params.workspace)[row] = sum;
  }
}

template <class A>
struct GradientShared : FmaShared<A> {
  A other[kTile * kLeading];
};

// Where a pair's values lie in a tile, for products over the queries, or over the keys.
enum class Sum { queries, keys };
template <Sum kSum>
__device__ __forceinline__ int place(int query, int key) {
  return kSum == Sum::queries ? query * kLeading + key : key * kLeading + query;
}

// f(at, gradient) for this thread's pairs (query 4 ty + i, key tx + 16 j), whose places in
// shared.tile and shared.other are `at`. Begins with a barrier. (The loop is not unrolled, which
// would take more registers than there are; q.k and dP wait at their places meanwhile.)
template <class T, Sum kSum, class F>
__device__ __forceinline__ void gradient_tile(const AttentionBackwardParams& params,
                                              const Tile& tile,
                                              GradientShared<compute_t<T>>& shared, const F& f) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.problem;
  const int64_t kv = kv_head(tile.h, p.hq, p.hkv);
  const int tx = thread_x(), ty = thread_y();
  const auto keep = [&](const A(&acc)[4][4], A* to) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) to[place<kSum>(4 * ty + i, tx + 16 * j)] = acc[i][j];
    }
  };
  A acc[4][4];
  __syncthreads();
  shared.bits.load(p, tile);
  multiply_rows(rows_of<T>(p.q, tile.b, tile.h, tile.q, p.tq),
                rows_of<T>(p.k, tile.b, kv, tile.k, p.tk), p.d, shared, acc);
  keep(acc, shared.tile);
  multiply_rows(rows_of<T>(params.grad_out, tile.b, tile.h, tile.q, p.tq),
                rows_of<T>(p.v, tile.b, kv, tile.k, p.tk), p.dv, shared, acc);
  keep(acc, shared.other);
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const int r = 4 * ty + i;
    const int64_t row = row_index(p, tile.b, tile.h, min(tile.q + r, p.tq - 1));
    const A shift = softmax_backward_shift(static_cast<const A*>(params.lse)[row]);
    const A delta = static_cast<const A*>(params.workspace)[row];
#pragma unroll 1
    for (int c = tx; c < kTile; c += 16) {
      const int at = place<kSum>(r, c);
      f(at, gradient_of(p, tile, r, c, shared.bits.sees(p, tile, r, c),
                        shared.bits.template factor<A>(p, r, c), shared.tile[at], shared.other[at],
                        shift, delta));
    }
  }
}

template <class T>
OMNIATTN_FN int64_t dq_blocks(const AttentionProblem& p) {
  return p.batch * p.hq * ceil_div(p.tq, kTile) * chunks_of<compute_t<T>>(p.d);
}

template <class T>
__global__ void __launch_bounds__(kFmaThreads, 1)
    attention_dq_fma_kernel(const __grid_constant__ AttentionBackwardParams params) {
  using A = compute_t<T>;
  auto& shared = *dynamic_shared<GradientShared<A>>();
  const AttentionProblem& p = params.problem;
  const int64_t chunks = chunks_of<A>(p.d), blocks = ceil_div(p.tq, kTile);
  for (int64_t item = blockIdx.x; item < dq_blocks<T>(p); item += gridDim.x) {
    const int64_t first = item % chunks * kChunk<A>, head = item / chunks / blocks;
    Tile tile{head / p.hq, head % p.hq, item / chunks % blocks * kTile, 0, false};
    A dq[4][kChunkColumns<A>];
    clear(dq);
    const Range keys = key_blocks(p.mask, tile.b, block(tile.q / kTile, kTile, p.tq), kTile);
    for (int64_t n = keys.begin; n < keys.end; ++n) {
      tile.k = n * kTile;
      if (!plan(p, tile)) continue;
      gradient_tile<T, Sum::keys>(
          params, tile, shared, [&](int at, const PairGradient<A>& g) { shared.tile[at] = g.dot; });
      const int64_t kv = kv_head(tile.h, p.hq, p.hkv);
      multiply_tile(shared.tile, p.tq - tile.q, rows_of<T>(p.k, tile.b, kv, tile.k, p.tk), first,
                    p.d, shared, dq);
    }
    const auto scale = static_cast<A>(p.score.pre * p.score.chain);
    store_rows(dq, {scale, scale, scale, scale}, row_of<T>(params.grad_q, tile.b, tile.q, tile.h),
               params.grad_q.stride_t, p.tq - tile.q, first, p.d);
  }
}

template <class T>
OMNIATTN_FN int64_t dkdv_blocks(const AttentionProblem& p) {
  return p.batch * p.hkv * ceil_div(p.tk, kTile) * chunks_of<compute_t<T>>(p.d > p.dv ? p.d : p.dv);
}

template <class T>
__global__ void __launch_bounds__(kFmaThreads, 1)
    attention_dkdv_fma_kernel(const __grid_constant__ AttentionBackwardParams params) {
  using A = compute_t<T>;
  auto& shared = *dynamic_shared<GradientShared<A>>();
  const AttentionProblem& p = params.problem;
  const int64_t chunks = chunks_of<A>(max(p.d, p.dv)), blocks = ceil_div(p.tk, kTile);
  for (int64_t item = blockIdx.x; item < dkdv_blocks<T>(p); item += gridDim.x) {
    const int64_t first = item % chunks * kChunk<A>, head = item / chunks / blocks;
    const int64_t b = head / p.hkv, kv = head % p.hkv, key = item / chunks % blocks * kTile;
    A dk[4][kChunkColumns<A>], dv[4][kChunkColumns<A>];
    clear(dk);
    clear(dv);
    const Range queries = query_blocks(p.mask, b, block(key / kTile, kTile, p.tk), kTile);
    for (int64_t h = kv * group_size(p); h < (kv + 1) * group_size(p); ++h) {
      for (int64_t n = queries.begin; n < queries.end; ++n) {
        Tile tile{b, h, n * kTile, key, false};
        if (!plan(p, tile)) continue;
        gradient_tile<T, Sum::queries>(params, tile, shared, [&](int at, const PairGradient<A>& g) {
          shared.tile[at] = g.weight;
          shared.other[at] = g.dot;
        });
        multiply_tile(shared.tile, p.tk - key, rows_of<T>(params.grad_out, b, h, tile.q, p.tq),
                      first, p.dv, shared, dv);
        multiply_tile(shared.other, p.tk - key, rows_of<T>(p.q, b, h, tile.q, p.tq), first, p.d,
                      shared, dk);
      }
    }
    const auto scale = static_cast<A>(p.score.pre * p.score.chain);
    store_rows(dk, {scale, scale, scale, scale}, row_of<T>(params.grad_k, b, key, kv),
               params.grad_k.stride_t, p.tk - key, first, p.d);
    store_rows(dv, {1, 1, 1, 1}, row_of<T>(params.grad_v, b, key, kv), params.grad_v.stride_t,
               p.tk - key, first, p.dv);
  }
}

// Positions along the dimensions of the bias: 1 where it is broadcast.
struct BiasShape {
  int64_t batch, heads, query_blocks, key_blocks;
};
OMNIATTN_FN BiasShape bias_shape(const AttentionBackwardParams& params) {
  const AttentionProblem& p = params.problem;
  return {params.grad_bias_stride_b != 0 ? p.batch : 1, params.grad_bias_stride_h != 0 ? p.hq : 1,
          params.grad_bias_stride_q != 0 ? ceil_div(p.tq, kTile) : 1, ceil_div(p.tk, kTile)};
}
OMNIATTN_FN int64_t dbias_blocks(const AttentionBackwardParams& params) {
  const BiasShape s = bias_shape(params);
  return s.batch * s.heads * s.query_blocks * s.key_blocks;
}

// Position n of a dimension of `count`, or all of a dimension of 1.
OMNIATTN_FN Range positions(int64_t n, int64_t count, int64_t all) {
  return count == 1 ? Range{0, all} : Range{n, n + 1};
}

template <class T>
__global__ void __launch_bounds__(kFmaThreads, 1)
    attention_dbias_fma_kernel(const __grid_constant__ AttentionBackwardParams params) {
  using A = compute_t<T>;
  const int tx = thread_x(), ty = thread_y();
  auto& shared = *dynamic_shared<GradientShared<A>>();
  const AttentionProblem& p = params.problem;
  const BiasShape shape = bias_shape(params);
  for (int64_t item = blockIdx.x; item < dbias_blocks(params); item += gridDim.x) {
    const int64_t key = item % shape.key_blocks * kTile, rest = item / shape.key_blocks;
    const int64_t block_n = rest % shape.query_blocks, rest_heads = rest / shape.query_blocks;
    const int64_t head = rest_heads % shape.heads, batch = rest_heads / shape.heads;
    const Range batches = positions(batch, shape.batch, p.batch);
    const Range heads = positions(head, shape.heads, p.hq);
    const Range query_tiles = positions(block_n, shape.query_blocks, ceil_div(p.tq, kTile));
    A sum[4][4];
    clear(sum);
    for (int64_t b = batches.begin; b < batches.end; ++b) {
      for (int64_t h = heads.begin; h < heads.end; ++h) {
        for (int64_t n = query_tiles.begin; n < query_tiles.end; ++n) {
          Tile tile{b, h, n * kTile, key, false};
          if (!plan(p, tile)) continue;
          gradient_tile<T, Sum::queries>(
              params, tile, shared,
              [&](int at, const PairGradient<A>& g) { shared.tile[at] = g.logit; });
#pragma unroll
          for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              sum[i][j] += shared.tile[place<Sum::queries>(4 * ty + i, tx + 16 * j)];
            }
          }
        }
      }
    }
    A* const to = static_cast<A*>(params.grad_bias) + batch * params.grad_bias_stride_b +
                  head * params.grad_bias_stride_h + key;
    if (params.grad_bias_stride_q != 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t q = block_n * kTile + 4 * ty + i;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int c = tx + 16 * j;
          if (q < p.tq && key + c < p.tk) to[q * params.grad_bias_stride_q + c] = sum[i][j];
        }
      }
    } else {  // the columns' sums, over the 16 rows of threads in order
      __syncthreads();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        shared.tile[ty * kLeading + tx + 16 * j] =
            (sum[0][j] + sum[1][j]) + (sum[2][j] + sum[3][j]);
      }
      __syncthreads();
      const int c = static_cast<int>(threadIdx.x);
      if (c < kTile && key + c < p.tk) {
        A total = 0;
        for (int y = 0; y < 16; ++y) total += shared.tile[y * kLeading + c];
        to[c] = total;
      }
    }
  }
}

}  // namespace

Status launch_attention_delta(const AttentionBackwardParams& params, Stream stream) {
  dispatch(params.problem.dtype, [&]<class T>(T) {
    GPU_LAUNCH(attention_delta_kernel<T>,
               item_grid(ceil_div(query_rows(params.problem), kDeltaRows)), dim3(32, kDeltaRows), 0,
               stream, params);
  });
  return launch_status();
}

Status launch_attention_gradients(const AttentionBackwardParams& params, Stream stream) {
  const AttentionProblem& p = params.problem;
  dispatch(p.dtype, [&]<class T>(T) {
    constexpr size_t kBytes = sizeof(GradientShared<compute_t<T>>);
    GPU_LAUNCH(attention_dq_fma_kernel<T>, item_grid(dq_blocks<T>(p)), kFmaThreads, kBytes, stream,
               params);
    GPU_LAUNCH(attention_dkdv_fma_kernel<T>, item_grid(dkdv_blocks<T>(p)), kFmaThreads, kBytes,
               stream, params);
  });
  return launch_status();
}

Status launch_attention_bias_gradient(const AttentionBackwardParams& params, Stream stream) {
  dispatch(params.problem.dtype, [&]<class T>(T) {
    GPU_LAUNCH(attention_dbias_fma_kernel<T>, item_grid(dbias_blocks(params)), kFmaThreads,
               sizeof(GradientShared<compute_t<T>>), stream, params);
  });
  return launch_status();
}

}  // namespace omniattn
