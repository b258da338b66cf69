// Gradients of rows of distances, see attention_params.h. A block per head, 64 distances and
// chunk of columns walks the tiles that contain these distances, and recomputes P and dS;
// then a thread per element of a gradient sums over the distances that read its row. Every
// sum has one owner and a fixed order.
#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/attention_gradient_tile_cuda.h"
#include "runtime/dispatch.h"

namespace omniattn {
namespace {

using namespace gpu;

constexpr int kThreads = 256;

OMNIATTN_FN int64_t distance_count(const AttentionProblem& p) { return p.tq + p.tk - 1; }
template <class T>
OMNIATTN_FN int64_t distance_blocks(const AttentionProblem& p) {
  return p.hq * ceil_div(distance_count(p), kTile) * chunks_of<compute_t<T>>(p.d);
}

template <class T, bool kOfQuery>
__global__ void __launch_bounds__(kFmaThreads, 1)
    attention_distance_fma_kernel(const __grid_constant__ AttentionBackwardParams params) {
  using A = compute_t<T>;
  auto& shared = *dynamic_shared<GradientShared<A>>();
  const AttentionProblem& p = params.problem;
  const int64_t chunks = chunks_of<A>(p.d), blocks = ceil_div(distance_count(p), kTile);
  for (int64_t item = blockIdx.x; item < distance_blocks<T>(p); item += gridDim.x) {
    const int64_t first = item % chunks * kChunk<A>, h = item / chunks / blocks;
    const int64_t element = item / chunks % blocks * kTile;
    A sum[4][kChunkColumns<A>];
    clear(sum);
    for (int64_t b = 0; b < p.batch; ++b) {
      const Sequence s = sequence_of(p, b);
      for (int64_t query = 0; query < s.tq; query += kTile) {
        // Key at the first distance and query; others are up to 126 later.
        const int64_t key = element - (p.tk - 1) + query + (s.tk - s.tq);
        const int64_t from = key < 0 ? 0 : key / kTile * kTile;
        for (int64_t k = from; k < key + 2 * kTile - 1 && k < s.tk; k += kTile) {
          Tile tile{s, b, h, query, k, false};
          if (!plan(p, tile)) continue;
          gradient_tile<T, Sum::queries>(
              params, tile, shared,
              [&](int at, const PairGradient<A>& g) { shared.tile[at] = g.dot; });
          const int shift = static_cast<int>(key - k);  // key - query - row of pairs
          const auto value = [&](int n, int row) {
            const int r = kOfQuery ? n : n - row - shift, c = kOfQuery ? n + row + shift : n;
            const bool inside = r >= 0 && r < kTile && c >= 0 && c < kTile;
            return inside ? shared.tile[place<Sum::queries>(r, c)] : A(0);
          };
          const auto own = [&](int n, int64_t c) {
            const auto rows = kOfQuery ? queries_of<T>(p.q, s, h, query)
                                       : keys_of<T>(p.k, s, kv_head(h, p.hq, p.hkv), k);
            return rows.has(n) && c < p.d ? gpu::widen(rows.at(n, c)) : A(0);
          };
          multiply_values(kTile, value, own, first, shared, sum);
        }
      }
    }
    const A scale = gradient_scale<A>(p) * head_factor<A>(p, h);
    A* const to =
        static_cast<A*>(kOfQuery ? params.part_relative_keys : params.part_relative_queries);
    store_rows<A>(sum, {scale, scale, scale, scale}, to + (h * distance_count(p) + element) * p.d,
                  p.d, distance_count(p) - element, first, p.d);
  }
}

// grad (rows, Hq, D) = sums of parts (Hq, distances, D).
template <class A>
__global__ void __launch_bounds__(kThreads)
    attention_gather_distances_kernel(const __grid_constant__ AttentionProblem p,
                                      const __grid_constant__ DistanceRows rows, const A* parts,
                                      A* grad) {
  const int64_t count = rows.rows * p.hq * p.d, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t n = blockIdx.x * int64_t{kThreads} + threadIdx.x; n < count; n += step) {
    const int64_t c = n % p.d, h = n / p.d % p.hq, row = n / p.d / p.hq;
    const int64_t last = distance_count(p) - 1;
    // Element that reads this row; the first and last row are also read by all elements beyond.
    const int64_t at = row - rows.zero - p.relative_shift + p.tk - 1;
    const int64_t begin = row == 0 ? 0 : max(at, int64_t{0});
    const int64_t end = row == rows.rows - 1 ? last : min(at, last);
    double sum = 0;
    for (int64_t e = begin; e <= end; ++e) sum += parts[(h * distance_count(p) + e) * p.d + c];
    grad[n] = static_cast<A>(sum);
  }
}

template <bool kOfQuery>
void launch(const AttentionBackwardParams& params, const DistanceRows& rows, const void* parts,
            void* grad, Stream stream) {
  const AttentionProblem& p = params.problem;
  dispatch(p.dtype, [&]<class T>(T) {
    using A = compute_t<T>;
    GPU_LAUNCH((attention_distance_fma_kernel<T, kOfQuery>), item_grid(distance_blocks<T>(p)),
               kFmaThreads, sizeof(GradientShared<A>), stream, params);
    GPU_LAUNCH(attention_gather_distances_kernel<A>,
               item_grid(ceil_div(rows.rows * p.hq * p.d, kThreads)), kThreads, 0, stream, p, rows,
               static_cast<const A*>(parts), static_cast<A*>(grad));
  });
}

}  // namespace

int64_t attention_distance_parts(const AttentionProblem& p) {
  return p.hq * distance_count(p) * p.d;
}

Status launch_attention_distance_gradients(const AttentionBackwardParams& b, Stream stream) {
  const AttentionProblem& p = b.problem;
  if (b.grad_relative_keys != nullptr) {
    launch<true>(b, p.relative_keys, b.part_relative_keys, b.grad_relative_keys, stream);
  }
  if (b.grad_relative_queries != nullptr) {
    launch<false>(b, p.relative_queries, b.part_relative_queries, b.grad_relative_queries, stream);
  }
  return launch_status();
}

}  // namespace omniattn
