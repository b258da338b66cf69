// The grouped products of the mixture of experts, see moe_cuda.h: a block of threads computes tiles
// of Engine::kRows x 128 numbers, leaves each in shared memory and finishes it there, whichever
// way (Engine) the product was taken: by tensor cores or by FMA.
#pragma once

#include "kernels/activation/activate_cuda.h"
#include "kernels/moe/moe_cuda.h"
#include "runtime/gpu_row.h"
#include "semantics/seqlen.h"

namespace omniattn::gpu {

inline constexpr int kMoeThreads = 256;

// ---- operands of a tile
// -------------------------------------------------------------------------- at(i, k): the address
// of element k of row (left operand) or column (right operand) i of the tile; has(i, k): whether
// there is one, else it counts as 0. Elements are neighbours along k where along_k(), else along i.

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

// Rows of a block; sums are over their elements.
template <class T>
struct BlockRows : RowView<T> {
  int64_t first, rows, cols;

  static __device__ __forceinline__ bool along_k() { return true; }
  __device__ __forceinline__ bool has(int i, int64_t k) const { return i < rows && k < cols; }
  __device__ __forceinline__ const T* at(int i, int64_t k) const {
    return this->row(first + i) + k;
  }
};

// Columns of the rows of an expert; sums are over these rows.
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
};

// Which columns of a matrix a tile takes: `run` (a power of 2) from `first` on and as many from
// `second` on, the first `valid` of each run being there.
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
};

// ---- finished tiles
// ------------------------------------------------------------------------------

// Sums in shared memory; a row's stride is off the banks' period.
inline constexpr int kMoeTileStride = kMoeTileColumns + 4;

// A row of a tile belongs to 16 threads (8 where features come in pairs of columns), of which each
// takes W neighbours at a time.
template <int W, class F>
__device__ __forceinline__ void for_row_parts(int64_t rows, int64_t cols, int lanes, const F& f) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int r = thread / lanes; r < rows; r += kMoeThreads / lanes) {
    for (int c = thread % lanes * W; c < cols; c += lanes * W) f(r, c);
  }
}

template <class C, int W>
struct GateAndUp {
  Pack<C, W> gate, up;
};
// W neighbours of `from` at a feature; `jump`: from a gate to its up.
template <int W, class T>
__device__ __forceinline__ GateAndUp<compute_t<T>, W> load_features(MoeGate gate, const T* from,
                                                                    int64_t feature, int64_t jump) {
  GateAndUp<compute_t<T>, W> x{};
  if (gate == MoeGate::interleaved) {
    const auto low = load<W>(from + 2 * feature), high = load<W>(from + 2 * feature + W);
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const int even = 2 * j;
      x.gate.v[j] = even < W ? low[even % W] : high[even % W];
      x.up.v[j] = even + 1 < W ? low[(even + 1) % W] : high[(even + 1) % W];
    }
    return x;
  }
  const auto first = load<W>(from + feature);
#pragma unroll
  for (int j = 0; j < W; ++j) x.gate.v[j] = first[j];
  if (gate == MoeGate::none) return x;
  const auto second = load<W>(from + feature + jump);
#pragma unroll
  for (int j = 0; j < W; ++j) x.up.v[j] = second[j];
  return x;
}

template <int W, class T>
__device__ __forceinline__ void store_features(MoeGate gate, const GateAndUp<compute_t<T>, W>& x,
                                               T* to, int64_t feature, int64_t jump) {
  Pack<T, W> first, second;
#pragma unroll
  for (int j = 0; j < W; ++j) {
    if (gate == MoeGate::interleaved) {
      (2 * j < W ? first : second).v[2 * j % W] = gpu::narrow<T>(x.gate[j]);
      (2 * j + 1 < W ? first : second).v[(2 * j + 1) % W] = gpu::narrow<T>(x.up[j]);
    } else {
      first.v[j] = gpu::narrow<T>(x.gate[j]);
      second.v[j] = gpu::narrow<T>(x.up[j]);
    }
  }
  if (gate == MoeGate::interleaved) {
    store(to + 2 * feature, first);
    store(to + 2 * feature + W, second);
  } else {
    store(to + feature, first);
    if (gate == MoeGate::halves) store(to + feature + jump, second);
  }
}

// ---- the activation between the products
// ---------------------------------------------------------

// h and its derivatives.
template <class C>
struct HiddenValue {
  C h, by_gate, by_up;
};

// The clamped form of gpt-oss; see moe.h.
template <class C>
__device__ __forceinline__ HiddenValue<C> clamped_value(const MoeHidden& p, C gate, C up) {
  const C alpha = static_cast<C>(p.alpha), limit = static_cast<C>(p.limit);
  const auto swish = activate(Activation::silu, alpha * (gate > limit ? limit : gate));
  const C value = swish.value / alpha;
  const C shifted = 1 + (up > limit ? limit : up < -limit ? -limit : up);
  return {value * shifted, gate <= limit ? swish.slope * shifted : C(0),
          fabs(up) <= limit ? value : C(0)};
}

// Experts without a gate act on it and have no up.
template <class C>
__device__ __forceinline__ HiddenValue<C> hidden_value(const MoeHidden& p, C gate, C up) {
  if (p.limit > 0) return clamped_value(p, gate, up);
  const auto act = activate(p.act, gate);
  if (p.gate == MoeGate::none) return {act.value, act.slope, C(0)};
  return {act.value * up, act.slope * up, act.value};
}

// Features of h per tile of pre.
__host__ __device__ inline int tile_features(MoeGate gate) {
  return gate == MoeGate::none ? kMoeTileColumns : kMoeTileColumns / 2;
}
// The columns of pre from which `count` features from `first` on are computed.
__device__ __forceinline__ TileColumns columns_of(const MoeHidden& p, int64_t first, int count) {
  switch (p.gate) {
    case MoeGate::none:
      return {first, 0, kMoeTileColumns, count};
    case MoeGate::halves:
      return {first, p.features + first, kMoeTileColumns / 2, count};
    case MoeGate::interleaved:
      return {2 * first, 0, kMoeTileColumns, 2 * count};
  }
  return {};
}

// ---- kernels
// -------------------------------------------------------------------------------------

// Tiles of a product, grid strided: f(block, first column, columns) with `width` columns per tile.
// Tiles of one block are neighbours, and blocks without rows are the last ones.
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

template <class Engine>
__device__ __forceinline__ void multiply_block(const MoeProduct& p, const MoeBlock& block,
                                               const TileColumns& columns,
                                               typename Engine::Shared& shared) {
  using T = typename Engine::Element;
  const BlockRows<T> a{RowView<T>(p.a), block.row, block.rows, p.k};
  Engine::multiply(a, MatrixColumns<T>(p, block.expert, columns), p.k, static_cast<int>(block.rows),
                   shared);
}

template <class Engine>
__global__ void __launch_bounds__(kMoeThreads, Engine::kBlocksPerSM)
    moe_up_kernel(const __grid_constant__ MoeUpProduct p) {
  using T = typename Engine::Element;
  using C = compute_t<T>;
  constexpr int W = Engine::kWidth;
  auto& shared = *dynamic_shared<typename Engine::Shared>();
  const MoeHidden& h = p.hidden_of;
  const int64_t columns = h.columns();
  for_tiles(p.product, h.features, tile_features(h.gate),
            [&](const MoeBlock& block, int64_t first, int count) {
              multiply_block<Engine>(p.product, block, columns_of(h, first, count), shared);
              const T* const bias = p.bias != nullptr
                                        ? static_cast<const T*>(p.bias) + block.expert * columns
                                        : nullptr;
              for_row_parts<W>(block.rows, count, tile_features(h.gate) / 8, [&](int r, int f) {
                auto x = load_features<W>(h.gate, shared.sums + r * kMoeTileStride, f,
                                          kMoeTileColumns / 2);
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
                  y.v[j] = gpu::narrow<T>(hidden_value<C>(h, x.gate[j], x.up[j]).h);
                }
                store(static_cast<T*>(p.hidden) + row * h.features + first + f, y);
              });
            });
}

template <class Engine>
__global__ void __launch_bounds__(kMoeThreads, Engine::kBlocksPerSM)
    moe_up_backward_kernel(const __grid_constant__ MoeUpBackwardProduct p) {
  using T = typename Engine::Element;
  using C = compute_t<T>;
  constexpr int W = Engine::kWidth, kLanes = kMoeTileColumns / 8;
  auto& shared = *dynamic_shared<typename Engine::Shared>();
  const MoeHidden& h = p.hidden_of;
  const int64_t columns = h.columns(), groups = ceil_div(h.features, kMoeTileColumns);
  for_tiles(
      p.product, h.features, kMoeTileColumns, [&](const MoeBlock& block, int64_t first, int count) {
        multiply_block<Engine>(p.product, block, {first, 0, kMoeTileColumns, count}, shared);
        for_row_parts<W>(block.rows, count, kLanes, [&](int r, int f) {
          const int64_t row = block.row + r;
          const C weight = static_cast<const C*>(p.weights)[p.slot_of_row[row]];
          C* const sums = shared.sums + r * kMoeTileStride + f;
          const auto grad = load<W>(sums);
          const T* const pre = static_cast<const T*>(p.pre) + row * columns;
          const auto x = load_features<W>(h.gate, pre, first + f, h.features);
          GateAndUp<C, W> grad_pre;
          Pack<T, W> weighted;
#pragma unroll
          for (int j = 0; j < W; ++j) {
            const HiddenValue<C> v = hidden_value<C>(h, x.gate[j], x.up[j]);
            const C scaled = weight * grad[j];
            grad_pre.gate.v[j] = scaled * v.by_gate;
            grad_pre.up.v[j] = scaled * v.by_up;
            weighted.v[j] = gpu::narrow<T>(weight * v.h);
            sums[j] = grad[j] * v.h;
          }
          store_features<W>(h.gate, grad_pre, static_cast<T*>(p.grad_pre) + row * columns,
                            first + f, h.features);
          store(static_cast<T*>(p.weighted_hidden) + row * h.features + first + f, weighted);
        });
        __syncthreads();
        // A warp per row.
        const int lane = static_cast<int>(threadIdx.x) % 32;
        for (int r = static_cast<int>(threadIdx.x) / 32; r < block.rows; r += kMoeThreads / 32) {
          C dot = 0;
          for (int c = lane; c < count; c += 32) dot += shared.sums[r * kMoeTileStride + c];
          dot = warp_reduce(dot, [](C a, C b) { return a + b; });
          if (lane == 0) {
            static_cast<C*>(p.grad_weight)[(block.row + r) * groups + first / kMoeTileColumns] =
                dot;
          }
        }
      });
}

template <class Engine>
__global__ void __launch_bounds__(kMoeThreads, Engine::kBlocksPerSM)
    moe_project_kernel(const __grid_constant__ MoeProjectProduct p) {
  using T = typename Engine::Element;
  using C = compute_t<T>;
  constexpr int W = Engine::kWidth, kLanes = kMoeTileColumns / 8;
  auto& shared = *dynamic_shared<typename Engine::Shared>();
  const int64_t n = p.product.n;
  for_tiles(p.product, n, kMoeTileColumns, [&](const MoeBlock& block, int64_t first, int count) {
    multiply_block<Engine>(p.product, block, {first, 0, kMoeTileColumns, count}, shared);
    const T* const bias =
        p.bias != nullptr ? static_cast<const T*>(p.bias) + block.expert * n + first : nullptr;
    for_row_parts<W>(block.rows, count, kLanes, [&](int r, int c) {
      auto x = load<W>(shared.sums + r * kMoeTileStride + c);
      if (bias != nullptr) {
        const auto b = load<W>(bias + c);
#pragma unroll
        for (int j = 0; j < W; ++j) x.v[j] += b[j];
      }
      store(static_cast<C*>(p.out) + (block.row + r) * n + first + c, x);
    });
  });
}

template <class Engine>
__global__ void __launch_bounds__(kMoeThreads, Engine::kBlocksPerSM)
    moe_weight_grad_kernel(const __grid_constant__ MoeWeightGrad p) {
  using T = typename Engine::Element;
  constexpr int W = Engine::kWidth, kLanes = kMoeTileColumns / 8;
  auto& shared = *dynamic_shared<typename Engine::Shared>();
  const int64_t tiles_m = ceil_div(p.m, Engine::kRows), tiles_n = ceil_div(p.n, kMoeTileColumns);
  for (int64_t i = blockIdx.x; i < p.experts * tiles_m * tiles_n; i += gridDim.x) {
    const int64_t expert = i / (tiles_m * tiles_n);
    const int64_t m = i / tiles_n % tiles_m * Engine::kRows, n = i % tiles_n * kMoeTileColumns;
    const int64_t first = p.offsets[expert], rows = p.offsets[expert + 1] - first;
    const int64_t count_m = min(int64_t{Engine::kRows}, p.m - m);
    const int64_t count_n = min(int64_t{kMoeTileColumns}, p.n - n);
    Engine::multiply(RowColumns<T>{RowView<T>(p.a), first, rows, m, p.m},
                     RowColumns<T>{RowView<T>(p.b), first, rows, n, p.n}, rows,
                     static_cast<int>(count_m), shared);
    T* const out = static_cast<T*>(p.out) + (expert * p.m + m) * p.n + n;
    for_row_parts<W>(count_m, count_n, kLanes, [&](int r, int c) {
      const auto x = load<W>(shared.sums + r * kMoeTileStride + c);
      Pack<T, W> y;
#pragma unroll
      for (int j = 0; j < W; ++j) y.v[j] = gpu::narrow<T>(x[j]);
      store(out + r * p.n + c, y);
    });
    __syncthreads();
  }
}

// ---- launches
// ------------------------------------------------------------------------------------

inline unsigned tile_grid(int64_t tiles) {
  return static_cast<unsigned>(min(tiles, int64_t{0x7fffffff}));
}
inline unsigned tile_grid(const MoeProduct& p, int64_t columns, int width) {
  return tile_grid(p.block_count * ceil_div(columns, width));
}

template <class Engine>
void enqueue(const MoeUpProduct& p, Stream stream) {
  const MoeHidden& h = p.hidden_of;
  GPU_LAUNCH(moe_up_kernel<Engine>, tile_grid(p.product, h.features, tile_features(h.gate)),
             kMoeThreads, sizeof(typename Engine::Shared), stream, p);
}
template <class Engine>
void enqueue(const MoeUpBackwardProduct& p, Stream stream) {
  GPU_LAUNCH(moe_up_backward_kernel<Engine>,
             tile_grid(p.product, p.hidden_of.features, kMoeTileColumns), kMoeThreads,
             sizeof(typename Engine::Shared), stream, p);
}
template <class Engine>
void enqueue(const MoeProjectProduct& p, Stream stream) {
  GPU_LAUNCH(moe_project_kernel<Engine>, tile_grid(p.product, p.product.n, kMoeTileColumns),
             kMoeThreads, sizeof(typename Engine::Shared), stream, p);
}
template <class Engine>
void enqueue(const MoeWeightGrad& p, Stream stream) {
  const int64_t tiles = ceil_div(p.m, Engine::kRows) * ceil_div(p.n, kMoeTileColumns);
  GPU_LAUNCH(moe_weight_grad_kernel<Engine>, tile_grid(p.experts * tiles), kMoeThreads,
             sizeof(typename Engine::Shared), stream, p);
}

// Whether there is a tile to compute.
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
