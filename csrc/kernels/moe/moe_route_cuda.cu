// Kernels before and after the grouped products of moe_cuda.h: a stable counting
// sort of the (token, slot) pairs, the weighted sum of each token, and the gradients
// of routing weights and biases.
#include "kernels/moe/moe_cuda.h"
#include "runtime/gpu_row.h"
#include "semantics/seqlen.h"

namespace omniattn {
namespace {

using gpu::Pack;
using gpu::Width;

constexpr int kThreads = 256;
static_assert(kMoeRouteChunk == kThreads);

__device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }

inline unsigned grid_of(int64_t items) {
  return static_cast<unsigned>(min(items, int64_t{0x7fffffff}));
}

// Sort.

// The experts of a chunk's pairs, -1 past the last pair.
__device__ __forceinline__ void load_chunk(const MoeRouting& r, int64_t chunk, int64_t* experts) {
  const int64_t pair = chunk * kMoeRouteChunk + thread();
  __syncthreads();
  experts[thread()] = pair < r.pairs() ? r.index[pair] : -1;
  __syncthreads();
}

// counts[chunk][e]: pairs of expert e in the chunk.
__global__ void __launch_bounds__(kThreads) moe_count_kernel(const __grid_constant__ MoeRouting r) {
  GPU_SHARED(int64_t, experts, kMoeRouteChunk);
  for (int64_t chunk = blockIdx.x; chunk < r.chunks(); chunk += gridDim.x) {
    load_chunk(r, chunk, experts);
    GPU_REQUIRE(experts[thread()] >= -1 && experts[thread()] < r.experts,
                "moe_experts: index must be in [0, E) or -1 for none");
    for (int64_t e = thread(); e < r.experts; e += kThreads) {
      int64_t count = 0;
      for (int i = 0; i < kMoeRouteChunk; ++i) count += experts[i] == e;
      r.counts[chunk * r.experts + e] = count;
    }
  }
}

__device__ __forceinline__ int64_t warp_scan(int64_t x) {
  const int lane = thread() % 32;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int64_t below = __shfl_up_sync(0xffffffffu, x, by);
    if (lane >= by) x += below;
  }
  return x;
}

// Run by one block: replaces each count by the sum over earlier chunks, and lists offsets and
// blocks.
__global__ void __launch_bounds__(kThreads)
    moe_schedule_kernel(const __grid_constant__ MoeRouting r) {
  constexpr int kAhead = 8;  // loads in flight
  for (int64_t e = thread(); e < r.experts; e += kThreads) {
    int64_t before = 0;
    for (int64_t first = 0; first < r.chunks(); first += kAhead) {
      int64_t counts[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        counts[i] = first + i < r.chunks() ? r.counts[(first + i) * r.experts + e] : 0;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i < r.chunks()) r.counts[(first + i) * r.experts + e] = before;
        before += counts[i];
      }
    }
    r.offsets[e + 1] = before;
  }
  __syncthreads();

  if (thread() < 32) {
    int64_t rows = 0, blocks = 0;
    if (thread() == 0) r.offsets[0] = r.block_starts[0] = 0;
    for (int64_t first = 0; first < r.experts; first += 32) {
      const int64_t e = first + thread();
      const int64_t count = e < r.experts ? r.offsets[e + 1] : 0;
      const int64_t row_end = rows + warp_scan(count);
      const int64_t block_end = blocks + warp_scan(ceil_div(count, r.block_rows));
      if (e < r.experts) {
        r.offsets[e + 1] = row_end;
        r.block_starts[e + 1] = block_end;
      }
      rows = __shfl_sync(0xffffffffu, row_end, 31);
      blocks = __shfl_sync(0xffffffffu, block_end, 31);
    }
  }
  __syncthreads();

  for (int64_t b = thread(); b < r.block_count; b += kThreads) {
    MoeBlock block{0, 0, 0};
    if (b < r.block_starts[r.experts]) {
      int64_t low = 0, high = r.experts;  // block_starts[low] <= b < block_starts[high]
      while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (r.block_starts[middle] <= b ? low : high) = middle;
      }
      const int64_t row = r.offsets[low] + (b - r.block_starts[low]) * r.block_rows;
      block = {low, row, min(r.block_rows, r.offsets[low + 1] - row)};
    }
    r.blocks[b] = block;
  }
}

// Places each pair in its row: after the expert's pairs of earlier chunks and its
// earlier pairs in the same chunk.
__global__ void __launch_bounds__(kThreads) moe_place_kernel(const __grid_constant__ MoeRouting r) {
  GPU_SHARED(int64_t, experts, kMoeRouteChunk);
  for (int64_t chunk = blockIdx.x; chunk < r.chunks(); chunk += gridDim.x) {
    load_chunk(r, chunk, experts);
    const int64_t pair = chunk * kMoeRouteChunk + thread(), expert = experts[thread()];
    if (pair >= r.pairs()) continue;
    if (expert < 0) {
      r.row_of_slot[pair] = -1;
      continue;
    }
    int before = 0;
    for (int i = 0; i < thread(); ++i) before += experts[i] == expert;
    const int64_t row = r.offsets[expert] + r.counts[chunk * r.experts + expert] + before;
    r.row_of_slot[pair] = row;
    r.slot_of_row[row] = pair;
    r.token_of_row[row] = pair / r.slots;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    moe_clear_kernel(const __grid_constant__ MoeRouting r, int64_t columns, T* pre) {
  for (int64_t row = r.offsets[r.experts] + blockIdx.x; row < r.pairs(); row += gridDim.x) {
    for (int64_t c = thread(); c < columns; c += kThreads) {
      pre[row * columns + c] = gpu::narrow<T>(compute_t<T>(0));
    }
  }
}

// Sums.

template <class T, int W>
__global__ void __launch_bounds__(kThreads)
    moe_combine_kernel(const __grid_constant__ MoeCombineParams p, int64_t tokens) {
  using C = compute_t<T>;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  for (; token < tokens; token += step) {
    const int64_t* const rows = p.row_of_slot + token * p.slots;
    for (int64_t c = static_cast<int64_t>(threadIdx.x) * W; c < p.cols;
         c += static_cast<int64_t>(blockDim.x) * W) {
      C sum[W] = {};
      for (int64_t s = 0; s < p.slots; ++s) {
        if (rows[s] < 0) continue;
        const C weight =
            p.weight != nullptr ? static_cast<const C*>(p.weight)[token * p.slots + s] : C(1);
        const auto x = gpu::load_constant<W>(static_cast<const C*>(p.rows) + rows[s] * p.cols + c);
#pragma unroll
        for (int j = 0; j < W; ++j) sum[j] += weight * x[j];
      }
      Pack<T, W> y;
#pragma unroll
      for (int j = 0; j < W; ++j) y.v[j] = gpu::narrow<T>(sum[j]);
      gpu::store(static_cast<T*>(p.y) + token * p.cols + c, y);
    }
  }
}

// A warp per pair sums the parts of grad_y W_down . h and adds grad_y . b_down.
template <class T>
__global__ void __launch_bounds__(kThreads)
    moe_slot_grad_kernel(const __grid_constant__ MoeSlotGradParams p) {
  using C = compute_t<T>;
  const int lane = thread() % 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  int64_t pair = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + thread() / 32;
  for (; pair < p.pairs; pair += step) {
    const int64_t expert = p.index[pair];
    C sum = 0;
    if (expert >= 0) {
      const C* const parts = static_cast<const C*>(p.grad_weight) + p.row_of_slot[pair] * p.parts;
      for (int64_t i = lane; i < p.parts; i += 32) sum += parts[i];
      if (p.down_bias != nullptr) {
        const T* const grad =
            static_cast<const T*>(p.grad_y.data) + pair / p.slots * p.grad_y.stride;
        const T* const bias = static_cast<const T*>(p.down_bias) + expert * p.cols;
        for (int64_t c = lane; c < p.cols; c += 32)
          sum += gpu::widen(grad[c]) * gpu::widen(bias[c]);
      }
    }
    sum = gpu::warp_reduce(sum, [](C a, C b) { return a + b; });
    if (lane == 0) static_cast<C*>(p.out)[pair] = sum;
  }
}

// 32 columns of an expert: each warp sums every 8th row, then the warps' sums are added in order.
template <class T>
__global__ void __launch_bounds__(kThreads)
    moe_column_sums_kernel(const __grid_constant__ MoeColumnSums p) {
  using C = compute_t<T>;
  constexpr int kWarps = kThreads / 32;
  GPU_SHARED(C, parts, kThreads);
  const int lane = thread() % 32, warp = thread() / 32;
  const int64_t groups = ceil_div(p.cols, 32);
  for (int64_t i = blockIdx.x; i < p.experts * groups; i += gridDim.x) {
    const int64_t expert = i / groups, c = i % groups * 32 + lane;
    C sum = 0;
    for (int64_t r = p.offsets[expert] + warp; r < p.offsets[expert + 1]; r += kWarps) {
      if (c >= p.cols) break;
      const int64_t row = p.x.tokens != nullptr ? p.x.tokens[r] : r;
      const C weight =
          p.weights != nullptr ? static_cast<const C*>(p.weights)[p.slot_of_row[r]] : C(1);
      sum += weight * gpu::widen(static_cast<const T*>(p.x.data)[row * p.x.stride + c]);
    }
    parts[thread()] = sum;
    __syncthreads();
    if (warp == 0 && c < p.cols) {
      C total = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += parts[32 * w + lane];
      static_cast<T*>(p.out)[expert * p.cols + c] = gpu::narrow<T>(total);
    }
    __syncthreads();
  }
}

}  // namespace

Status launch_moe_route(const MoeRouting& r, Stream stream) {
  if (r.chunks() > 0) GPU_LAUNCH(moe_count_kernel, grid_of(r.chunks()), kThreads, 0, stream, r);
  GPU_LAUNCH(moe_schedule_kernel, 1, kThreads, 0, stream, r);
  if (r.chunks() > 0) GPU_LAUNCH(moe_place_kernel, grid_of(r.chunks()), kThreads, 0, stream, r);
  return gpu::launch_status();
}

Status launch_moe_clear(DType dtype, const MoeRouting& r, int64_t columns, void* pre,
                        Stream stream) {
  constexpr int64_t kBlocks = 256;  // most of these blocks have no work
  if (r.pairs() * columns == 0) return nullptr;
  dispatch(dtype, [&]<class T>(T) {
    GPU_LAUNCH((moe_clear_kernel<T>), grid_of(min(r.pairs(), kBlocks)), kThreads, 0, stream, r,
               columns, static_cast<T*>(pre));
  });
  return gpu::launch_status();
}

Status launch_moe_combine(const MoeCombineParams& p, int64_t tokens, Stream stream) {
  if (tokens * p.cols == 0) return nullptr;
  const auto vectorised = [&]<class T, int W>(T, Width<W>) {
    return p.cols % W == 0 && gpu::aligned_16(p.rows) && gpu::aligned_16(p.y);
  };
  gpu::dispatch_width(p.dtype, vectorised, [&]<class T, int W>(T, Width<W>) {
    const dim3 block = gpu::row_block(p.cols / W, 1, kThreads);
    GPU_LAUNCH((moe_combine_kernel<T, W>), gpu::row_grid(tokens, block), block, 0, stream, p,
               tokens);
  });
  return gpu::launch_status();
}

Status launch_moe_slot_grad(const MoeSlotGradParams& p, Stream stream) {
  if (p.pairs == 0) return nullptr;
  dispatch(p.dtype, [&]<class T>(T) {
    GPU_LAUNCH((moe_slot_grad_kernel<T>), grid_of(ceil_div(p.pairs, kThreads / 32)), kThreads, 0,
               stream, p);
  });
  return gpu::launch_status();
}

Status launch_moe_column_sums(const MoeColumnSums& p, Stream stream) {
  if (p.experts * p.cols == 0) return nullptr;
  dispatch(p.dtype, [&]<class T>(T) {
    GPU_LAUNCH((moe_column_sums_kernel<T>), grid_of(p.experts * ceil_div(p.cols, 32)), kThreads, 0,
               stream, p);
  });
  return gpu::launch_status();
}

}  // namespace omniattn
