// Terms of a score other than q.k, see attention_params.h: the table term of all pairs, and the
// gradients of bias, table, sinks and head scales. Every sum has one owner and a fixed order.
//
//   expand  a thread per element of the table term
//   dbias   a block per 64 keys of a row (of 64 queries) of the bias, over its broadcast dimensions
//   dtable  a block per head and part of the blocks of 64 queries adds dS to its own plane of the
//           term; then a block per element of the table sums its elements of all planes
//   sums    a block per head sums per-query values of earlier kernels: sinks, head scales
//
// dbias and dtable recompute P and dS, by FMA for every dtype.
#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/attention_gradient_tile_cuda.h"
#include "runtime/dispatch.h"
#include "runtime/gpu_row.h"
#include "semantics/block_schedule.h"

namespace omniattn {
namespace {

using namespace gpu;

constexpr int kThreads = 256;

// The table term.

// Size of a plane: one element per distance for relative terms, otherwise one per pair.
OMNIATTN_FN int64_t plane_elements(const AttentionProblem& p) {
  return is_relative(p.table.kind) ? p.tq + p.tk : p.tq * p.tk;
}
OMNIATTN_FN int64_t table_batches(const AttentionProblem& p) {
  return p.table.stride_b == 0 ? 1 : p.batch;
}

// A pair that reads an element: key k and query i = q + Tk - Tq.
struct Place {
  int64_t i, k;
};
OMNIATTN_FN Place place_of(const AttentionProblem& p, int64_t element) {
  if (is_relative(p.table.kind)) return {-p.relative_shift, element - (p.tk - 1)};
  return {element / p.tk, element % p.tk};
}

template <class A>
__global__ void __launch_bounds__(kThreads)
    attention_expand_table_kernel(const __grid_constant__ AttentionProblem p, A* out) {
  const int64_t plane = plane_elements(p), count = table_batches(p) * p.hq * plane;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t n = blockIdx.x * int64_t{kThreads} + threadIdx.x; n < count; n += step) {
    const Place at = place_of(p, n % plane);
    const int64_t h = n / plane % p.hq, b = n / plane / p.hq;
    const int64_t row = table_row(p.table, at.i, at.k);
    const A value = static_cast<const A*>(p.table.data)[b * p.table.stride_b + row * p.hq + h];
    out[n] = value * static_cast<A>(table_factor(p.table, at.i, at.k));
  }
}

// Blocks that share the queries of a head, each with its own plane: enough for any GPU.
constexpr int64_t kTableBlocks = 512;
OMNIATTN_FN int64_t table_tiles(const AttentionProblem& p) {
  return p.batch / table_batches(p) * ceil_div(p.tq, kTile);
}
OMNIATTN_FN int64_t table_shares(const AttentionProblem& p) {
  const int64_t wanted = ceil_div(kTableBlocks, table_batches(p) * p.hq), tiles = table_tiles(p);
  return wanted < tiles ? wanted : tiles;
}
OMNIATTN_FN int64_t dtable_blocks(const AttentionProblem& p) {
  return table_batches(p) * table_shares(p) * p.hq;
}

// Adds dS of a tile, tile[place(query, key)], to a plane.
template <class A>
__device__ __forceinline__ void add_tile(const AttentionProblem& p, const Tile& tile, const A* ds,
                                         A* plane) {
  const int thread = static_cast<int>(threadIdx.x);
  if (is_relative(p.table.kind)) {  // one thread per diagonal key - query = thread - 63
    const int64_t element =
        relative_origin(p, tile.sequence) + tile.k - tile.q + thread - (kTile - 1);
    if (thread >= 2 * kTile - 1 || element < 0 || element >= p.tq + p.tk - 1) return;
    A sum = 0;
    for (int r = max(0, kTile - 1 - thread); r < min(kTile, 2 * kTile - 1 - thread); ++r) {
      sum += ds[place<Sum::queries>(r, r + thread - (kTile - 1))];
    }
    plane[element] += sum;
  } else {
    for (int n = thread; n < kTile * kTile; n += kFmaThreads) {
      const int64_t q = tile.q + n / kTile, k = tile.k + n % kTile;
      if (q < p.tq && k < p.tk) {
        plane[q * p.relative.stride_q + k] += ds[place<Sum::queries>(n / kTile, n % kTile)];
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kFmaThreads, 1)
    attention_dtable_fma_kernel(const __grid_constant__ AttentionBackwardParams params) {
  using A = compute_t<T>;
  auto& shared = *dynamic_shared<GradientShared<A>>();
  const AttentionProblem& p = params.problem;
  const int64_t shares = table_shares(p), blocks = ceil_div(p.tq, kTile);
  for (int64_t item = blockIdx.x; item < dtable_blocks(p); item += gridDim.x) {
    const int64_t h = item % p.hq, share = item / p.hq % shares, batch = item / p.hq / shares;
    A* const plane = static_cast<A*>(params.part_relative) + item * plane_elements(p);
    for (int64_t i = threadIdx.x; i < plane_elements(p); i += kFmaThreads) plane[i] = 0;
    for (int64_t n = share; n < table_tiles(p); n += shares) {
      const int64_t b = batch + n / blocks;
      const Sequence s = sequence_of(p, b);
      Tile tile{s, b, h, n % blocks * kTile, 0, false};
      if (tile.q >= s.tq) continue;
      for (Tiles<Along::keys> tiles(p, tile); tiles.next(tile);) {
        gradient_tile<T, Sum::queries>(params, tile, shared, [&](int at, const PairGradient<A>& g) {
          shared.tile[at] = g.logit;
        });
        __syncthreads();
        add_tile(p, tile, shared.tile, plane);
      }
    }
  }
}

template <class A>
__global__ void __launch_bounds__(kThreads, 1)
    attention_gather_table_kernel(const __grid_constant__ AttentionBackwardParams params) {
  const AttentionProblem& p = params.problem;
  const int64_t plane = plane_elements(p), shares = table_shares(p);
  const int64_t elements = is_relative(p.table.kind) ? p.tq + p.tk - 1 : plane;
  const int64_t items = table_batches(p) * p.table.rows * p.hq;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t h = item % p.hq, row = item / p.hq % p.table.rows,
                  batch = item / p.hq / p.table.rows;
    double sum = 0;
    for (int64_t n = threadIdx.x; n < elements; n += kThreads) {
      const Place at = place_of(p, n);
      if (table_row(p.table, at.i, at.k) != row) continue;
      const double factor = table_factor(p.table, at.i, at.k);
      for (int64_t share = 0; share < shares; ++share) {
        const int64_t from = ((batch * shares + share) * p.hq + h) * plane + n;
        sum += factor * static_cast<const A*>(params.part_relative)[from];
      }
    }
    sum = row_sum(sum);
    if (threadIdx.x == 0) static_cast<A*>(params.grad_table)[item] = static_cast<A>(sum);
  }
}

// Bias.

// Number of positions along the dimensions of the bias: 1 if it is broadcast.
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

// Position n of a dimension of size `count`, or all positions if it is broadcast (size 1).
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
      const Sequence s = sequence_of(p, b);
      if (key >= s.tk) continue;
      for (int64_t h = heads.begin; h < heads.end; ++h) {
        for (int64_t n = query_tiles.begin; n < query_tiles.end; ++n) {
          Tile tile{s, b, h, n * kTile, key, false};
          if (tile.q >= s.tq || !plan(p, tile)) continue;
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
    } else {
      A column[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) column[j] = (sum[0][j] + sum[1][j]) + (sum[2][j] + sum[3][j]);
      store_column_sums(column, shared, p.tk - key, to);
    }
  }
}

// Sums per head.

// out[h] = sum of the parts (count, B, Hq, Tq) of head h, with the layout of lse.
template <class A>
__global__ void __launch_bounds__(kThreads)
    attention_sum_rows_kernel(const __grid_constant__ AttentionProblem p, const A* parts,
                              int64_t count, A* out) {
  const int64_t h = blockIdx.x;
  double sum = 0;
  for (int64_t n = threadIdx.x; n < count * p.batch * p.tq; n += kThreads) {
    const int64_t q = n % p.tq, b = n / p.tq % p.batch, part = n / p.tq / p.batch;
    const Sequence s = sequence_of(p, b);
    if (q < s.tq) sum += parts[part * stat_rows(p) + row_index(p, s, h, q)];
  }
  sum = row_sum(sum);
  if (threadIdx.x == 0) out[h] = static_cast<A>(sum);
}

}  // namespace

RelativeView attention_relative_view(const AttentionProblem& p, const void* memory) {
  const int64_t plane = plane_elements(p);
  const bool relative = is_relative(p.table.kind);
  return {memory, relative ? p.tq - 1 : 0, table_batches(p) == 1 ? 0 : p.hq * plane, plane,
          relative ? -1 : p.tk};
}

int64_t attention_table_elements(const AttentionProblem& p) {
  return table_batches(p) * p.hq * plane_elements(p);
}

Status launch_attention_expand_table(const AttentionProblem& p, void* memory, Stream stream) {
  dispatch_compute(p.dtype, [&]<class A>(A) {
    GPU_LAUNCH(attention_expand_table_kernel<A>,
               item_grid(ceil_div(attention_table_elements(p), kThreads)), kThreads, 0, stream, p,
               static_cast<A*>(memory));
  });
  return launch_status();
}

int64_t attention_table_parts(const AttentionProblem& p) {
  return dtable_blocks(p) * plane_elements(p);
}

Status launch_attention_table_gradient(const AttentionBackwardParams& params, Stream stream) {
  const AttentionProblem& p = params.problem;
  dispatch(p.dtype, [&]<class T>(T) {
    GPU_LAUNCH(attention_dtable_fma_kernel<T>, item_grid(dtable_blocks(p)), kFmaThreads,
               sizeof(GradientShared<compute_t<T>>), stream, params);
  });
  dispatch_compute(p.dtype, [&]<class A>(A) {
    GPU_LAUNCH(attention_gather_table_kernel<A>, item_grid(table_batches(p) * p.table.rows * p.hq),
               kThreads, 0, stream, params);
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

int64_t attention_head_scale_parts(const AttentionProblem& p) {
  return p.dtype == DType::f64 ? chunks_of<double>(p.d) : chunks_of<float>(p.d);
}

Status launch_attention_sum_rows(const AttentionProblem& p, const void* parts, int64_t count,
                                 void* out, Stream stream) {
  dispatch_compute(p.dtype, [&]<class A>(A) {
    GPU_LAUNCH(attention_sum_rows_kernel<A>, static_cast<unsigned>(p.hq), kThreads, 0, stream, p,
               static_cast<const A*>(parts), count, static_cast<A*>(out));
  });
  return launch_status();
}

}  // namespace omniattn
