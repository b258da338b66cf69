// Kernels of the grouped products of the mixture of experts, see moe_cuda.h. A block
// of threads computes tiles (runtime/gpu_gemm.h) by tensor cores or by FMA, and
// finishes each in shared memory.
#pragma once

#include "kernels/moe/moe_cuda.h"
#include "kernels/moe/moe_hidden_cuda.h"
#include "runtime/gpu_gemm.h"
#include "runtime/gpu_row.h"

namespace omniattn::gpu {

static_assert(kMoeTileColumns == kGemmColumns);

// Operands of a tile (GemmOperand).

template <class T>
struct RowView {
  const T* data;
  const int64_t* tokens;
  int64_t stride;

  explicit __device__ __forceinline__ RowView(const MoeRows& x)
      : data(static_cast<const T*>(x.data)), tokens(x.tokens), stride(x.stride) {}
  __device__ __forceinline__ const T* row(int64_t r) const {
    return data + (tokens != nullptr ? tokens[r] : r) * stride;
  }
};

// Rows of a block, to be summed over their elements.
template <class T>
struct BlockRows : RowView<T> {
  int64_t first, rows, cols;

  static __device__ __forceinline__ bool along_k() { return true; }
  __device__ __forceinline__ bool has(int i, int64_t k) const { return i < rows && k < cols; }
  __device__ __forceinline__ const T* at(int i, int64_t k) const {
    return this->row(first + i) + k;
  }
};

// Columns of an expert's rows, to be summed over these rows.
template <class T>
struct RowColumns : RowView<T> {
  int64_t first_row, rows, first, cols;

  static __device__ __forceinline__ bool along_k() { return false; }
  __device__ __forceinline__ bool has(int i, int64_t k) const {
    return first + i < cols && k < rows;
  }
  __device__ __forceinline__ const T* at(int i, int64_t k) const {
    return this->row(first_row + k) + first + i;
  }
  __device__ __forceinline__ bool has_step() const { return this->tokens == nullptr; }
  __device__ __forceinline__ int64_t step() const { return this->stride; }
};

// Columns of a matrix in a tile: `run` (a power of 2) columns from `first` on and `run` columns
// from `second` on. The first `valid` columns of each run exist.
struct TileColumns {
  int64_t first, second;
  int run, valid;

  __device__ __forceinline__ bool has(int i) const { return (i & (run - 1)) < valid; }
  __device__ __forceinline__ int64_t operator[](int i) const {
    return i < run ? first + i : second + (i - run);
  }
};

template <class T>
struct MatrixColumns {
  const T* data;
  int64_t k_stride, n_stride, k;
  TileColumns columns;

  __device__ __forceinline__ MatrixColumns(const MoeProduct& p, int64_t expert,
                                           const TileColumns& tile)
      : data(static_cast<const T*>(p.b.data) + expert * p.b.expert),
        k_stride(p.b.k_stride),
        n_stride(p.b.n_stride),
        k(p.k),
        columns(tile) {}
  __device__ __forceinline__ bool along_k() const { return k_stride == 1; }
  __device__ __forceinline__ bool has(int i, int64_t depth) const {
    return columns.has(i) && depth < k;
  }
  __device__ __forceinline__ const T* at(int i, int64_t depth) const {
    return data + depth * k_stride + columns[i] * n_stride;
  }
  static __device__ __forceinline__ bool has_step() { return true; }
  __device__ __forceinline__ int64_t step() const { return k_stride; }
};

// Features of h per tile of pre.
__host__ __device__ inline int tile_features(MoeGate gate) {
  return gate == MoeGate::none ? kMoeTileColumns : kMoeTileColumns / 2;
}
// Columns of pre that determine `count` features from `first` on.
__device__ __forceinline__ TileColumns columns_of(const MoeHidden& p, int64_t first, int count) {
  switch (p.gate) {
    case MoeGate::none:
      return {first, 0, kMoeTileColumns, count};
    case MoeGate::halves:
      return {first, p.features + first, kMoeTileColumns / 2, count};
    case MoeGate::interleaved:
      return {2 * first, 0, kMoeTileColumns, 2 * count};
  }
  OMNIATTN_UNREACHABLE();
}

// Kernels.

// Calls f(block, first column, columns) for the tiles of a product, which are distributed over the
// grid; a tile has `width` columns. Tiles of one block are adjacent, and blocks without rows come
// last.
template <class F>
__device__ __forceinline__ void for_tiles(const MoeProduct& p, int64_t columns, int width,
                                          const F& f) {
  const int64_t groups = ceil_div(columns, width);
  for (int64_t i = blockIdx.x; i < p.block_count * groups; i += gridDim.x) {
    const MoeBlock block = p.blocks[i / groups];
    if (block.rows == 0) return;
    const int64_t first = i % groups * width;
    f(block, first, static_cast<int>(min(int64_t{width}, columns - first)));
    __syncthreads();
  }
}

template <class Gemm>
__device__ __forceinline__ void multiply_block(const MoeProduct& p, const MoeBlock& block,
                                               const TileColumns& columns,
                                               typename Gemm::Shared& shared) {
  using T = typename Gemm::Element;
  const BlockRows<T> a{RowView<T>(p.a), block.row, block.rows, p.k};
  Gemm::multiply(a, MatrixColumns<T>(p, block.expert, columns), p.k, static_cast<int>(block.rows),
                 shared);
}

template <class Gemm>
__global__ void __launch_bounds__(kGemmThreads, Gemm::kBlocksPerSM)
    moe_up_kernel(const __grid_constant__ MoeUpProduct p) {
  using T = typename Gemm::Element;
  using C = compute_t<T>;
  constexpr int W = Gemm::kWidth;
  auto& shared = *dynamic_shared<typename Gemm::Shared>();
  const MoeHidden& h = p.hidden_of;
  const int64_t columns = h.columns();
  for_tiles(
      p.product, h.features, tile_features(h.gate),
      [&](const MoeBlock& block, int64_t first, int count) {
        multiply_block<Gemm>(p.product, block, columns_of(h, first, count), shared);
        const T* const bias =
            p.bias != nullptr ? static_cast<const T*>(p.bias) + block.expert * columns : nullptr;
        for_row_parts<W>(block.rows, count, tile_features(h.gate) / 8, [&](int r, int f) {
          auto x = load_features<W>(h.gate, shared.sums + r * kGemmStride, f, kMoeTileColumns / 2);
          if (bias != nullptr) {
            const auto b = load_features<W>(h.gate, bias, first + f, h.features);
#pragma unroll
            for (int j = 0; j < W; ++j) {
              x.gate.v[j] += b.gate[j];
              x.up.v[j] += b.up[j];
            }
          }
          const int64_t row = block.row + r;
          if (p.pre != nullptr) {
            store_features<W>(h.gate, x, static_cast<T*>(p.pre) + row * columns, first + f,
                              h.features);
          }
          if (p.hidden == nullptr) return;
          Pack<T, W> y;
#pragma unroll
          for (int j = 0; j < W; ++j) {
            y.v[j] = gpu::narrow<T>(hidden_value<C>(h, x.gate[j], x.up[j]).value);
          }
          store(static_cast<T*>(p.hidden) + row * h.features + first + f, y);
        });
      });
}

// Calls f(row, sum of its first `count` elements) in one thread for each row of a tile.
template <class C, class F>
__device__ __forceinline__ void sum_rows(const C* tile, const MoeBlock& block, int count,
                                         const F& f) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int r = static_cast<int>(threadIdx.x) / 32; r < block.rows; r += kGemmThreads / 32) {
    C sum = 0;
    for (int c = lane; c < count; c += 32) sum += tile[r * kGemmStride + c];
    sum = warp_reduce(sum, [](C a, C b) { return a + b; });
    if (lane == 0) f(block.row + r, sum);
  }
}

template <class Gemm>
__global__ void __launch_bounds__(kGemmThreads, Gemm::kBlocksPerSM)
    moe_up_backward_kernel(const __grid_constant__ MoeUpBackwardProduct p) {
  using T = typename Gemm::Element;
  using C = compute_t<T>;
  constexpr int W = Gemm::kWidth, kLanes = kMoeTileColumns / 8;
  auto& shared = *dynamic_shared<typename Gemm::Shared>();
  const MoeHidden& h = p.hidden_of;
  const int64_t columns = h.columns(), groups = ceil_div(h.features, kMoeTileColumns);
  for_tiles(p.product, h.features, kMoeTileColumns,
            [&](const MoeBlock& block, int64_t first, int count) {
              multiply_block<Gemm>(p.product, block, {first, 0, kMoeTileColumns, count}, shared);
              for_row_parts<W>(block.rows, count, kLanes, [&](int r, int f) {
                const int64_t row = block.row + r;
                const C weight = static_cast<const C*>(p.weights)[p.slot_of_row[row]];
                C* const sums = shared.sums + r * kGemmStride + f;
                const auto grad = load<W>(sums);
                const T* const pre = static_cast<const T*>(p.pre) + row * columns;
                const auto x = load_features<W>(h.gate, pre, first + f, h.features);
                GateAndUp<C, W> grad_pre;
                Pack<T, W> weighted;
#pragma unroll
                for (int j = 0; j < W; ++j) {
                  const Gated<C> v = hidden_value<C>(h, x.gate[j], x.up[j]);
                  const C scaled = weight * grad[j];
                  grad_pre.gate.v[j] = scaled * v.by_gate;
                  grad_pre.up.v[j] = scaled * v.by_up;
                  weighted.v[j] = gpu::narrow<T>(weight * v.value);
                  sums[j] = grad[j] * v.value;
                }
                store_features<W>(h.gate, grad_pre, static_cast<T*>(p.grad_pre) + row * columns,
                                  first + f, h.features);
                store(static_cast<T*>(p.weighted_hidden) + row * h.features + first + f, weighted);
              });
              __syncthreads();
              sum_rows<C>(shared.sums, block, count, [&](int64_t row, C dot) {
                static_cast<C*>(p.grad_weight)[row * groups + first / kMoeTileColumns] = dot;
              });
            });
}

template <class Gemm>
__global__ void __launch_bounds__(kGemmThreads, Gemm::kBlocksPerSM)
    moe_project_kernel(const __grid_constant__ MoeProjectProduct p) {
  using T = typename Gemm::Element;
  using C = compute_t<T>;
  constexpr int W = Gemm::kWidth, kLanes = kMoeTileColumns / 8;
  auto& shared = *dynamic_shared<typename Gemm::Shared>();
  const int64_t n = p.product.n;
  for_tiles(p.product, n, kMoeTileColumns, [&](const MoeBlock& block, int64_t first, int count) {
    multiply_block<Gemm>(p.product, block, {first, 0, kMoeTileColumns, count}, shared);
    const T* const bias =
        p.bias != nullptr ? static_cast<const T*>(p.bias) + block.expert * n + first : nullptr;
    for_row_parts<W>(block.rows, count, kLanes, [&](int r, int c) {
      auto x = load<W>(shared.sums + r * kGemmStride + c);
      if (bias != nullptr) {
        const auto b = load<W>(bias + c);
#pragma unroll
        for (int j = 0; j < W; ++j) x.v[j] += b[j];
      }
      store(static_cast<C*>(p.out) + (block.row + r) * n + first + c, x);
    });
  });
}

template <class Gemm>
__global__ void __launch_bounds__(kGemmThreads, Gemm::kBlocksPerSM)
    moe_weight_grad_kernel(const __grid_constant__ MoeWeightGrad p) {
  using T = typename Gemm::Element;
  constexpr int W = Gemm::kWidth, kLanes = kMoeTileColumns / 8;
  auto& shared = *dynamic_shared<typename Gemm::Shared>();
  const int64_t tiles_m = ceil_div(p.m, Gemm::kRows), tiles_n = ceil_div(p.n, kMoeTileColumns);
  for (int64_t i = blockIdx.x; i < p.experts * tiles_m * tiles_n; i += gridDim.x) {
    const int64_t expert = i / (tiles_m * tiles_n);
    const int64_t m = i / tiles_n % tiles_m * Gemm::kRows, n = i % tiles_n * kMoeTileColumns;
    const int64_t first = p.offsets[expert], rows = p.offsets[expert + 1] - first;
    const int64_t count_m = min(int64_t{Gemm::kRows}, p.m - m);
    const int64_t count_n = min(int64_t{kMoeTileColumns}, p.n - n);
    Gemm::multiply(RowColumns<T>{RowView<T>(p.a), first, rows, m, p.m},
                   RowColumns<T>{RowView<T>(p.b), first, rows, n, p.n}, rows,
                   static_cast<int>(count_m), shared);
    T* const out = static_cast<T*>(p.out) + (expert * p.m + m) * p.n + n;
    for_row_parts<W>(count_m, count_n, kLanes, [&](int r, int c) {
      const auto x = load<W>(shared.sums + r * kGemmStride + c);
      Pack<T, W> y;
#pragma unroll
      for (int j = 0; j < W; ++j) y.v[j] = gpu::narrow<T>(x[j]);
      store(out + r * p.n + c, y);
    });
    __syncthreads();
  }
}

// Launches.

inline unsigned tile_grid(int64_t tiles) {
  return static_cast<unsigned>(min(tiles, int64_t{0x7fffffff}));
}
inline unsigned tile_grid(const MoeProduct& p, int64_t columns, int width) {
  return tile_grid(p.block_count * ceil_div(columns, width));
}

template <class Gemm>
void enqueue(const MoeUpProduct& p, Stream stream) {
  const MoeHidden& h = p.hidden_of;
  GPU_LAUNCH(moe_up_kernel<Gemm>, tile_grid(p.product, h.features, tile_features(h.gate)),
             kGemmThreads, sizeof(typename Gemm::Shared), stream, p);
}
template <class Gemm>
void enqueue(const MoeUpBackwardProduct& p, Stream stream) {
  GPU_LAUNCH(moe_up_backward_kernel<Gemm>,
             tile_grid(p.product, p.hidden_of.features, kMoeTileColumns), kGemmThreads,
             sizeof(typename Gemm::Shared), stream, p);
}
template <class Gemm>
void enqueue(const MoeProjectProduct& p, Stream stream) {
  GPU_LAUNCH(moe_project_kernel<Gemm>, tile_grid(p.product, p.product.n, kMoeTileColumns),
             kGemmThreads, sizeof(typename Gemm::Shared), stream, p);
}
template <class Gemm>
void enqueue(const MoeWeightGrad& p, Stream stream) {
  const int64_t tiles = ceil_div(p.m, Gemm::kRows) * ceil_div(p.n, kMoeTileColumns);
  GPU_LAUNCH(moe_weight_grad_kernel<Gemm>, tile_grid(p.experts * tiles), kGemmThreads,
             sizeof(typename Gemm::Shared), stream, p);
}

// True if there is no tile to compute.
inline bool is_empty(const MoeUpProduct& p) {
  return p.product.block_count * p.hidden_of.features == 0;
}
inline bool is_empty(const MoeUpBackwardProduct& p) {
  return p.product.block_count * p.hidden_of.features == 0;
}
inline bool is_empty(const MoeProjectProduct& p) {
  return p.product.block_count * p.product.n == 0;
}
inline bool is_empty(const MoeWeightGrad& p) { return p.experts * p.m * p.n == 0; }

}  // namespace omniattn::gpu
