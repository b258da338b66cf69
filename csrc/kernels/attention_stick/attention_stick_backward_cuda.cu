// Backward of attention whose weights break a stick (see semantics/stick_breaking.h), for any dtype
// and head size. Threads and owners of results are those of attention_backward_fma_cuda.cu, but a
// block walks its keys in order:
//
//   dq       a block per 64 queries of a head and chunk of columns, from the first key of a segment
//            to its last; it leaves the state of each row at each tile
//   dkdv     a block per 64 keys of a segment, a kv head and chunk of columns, from these states
//
// A segment bounds the memory for states, and the state of a row goes from one segment to the next.
#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/attention_gradient_tile_cuda.h"
#include "kernels/attention_stick/attention_stick_cuda.h"
#include "runtime/dispatch.h"

namespace omniattn {
namespace {

// State of a row before a tile: the cost of the keys from the tile on, and dL/d(-cost) and the sum
// of w dP over all keys before it.
template <class A>
struct StickState {
  ExactSum<A> left;
  A before;
};
// State of a row at a tile: the cost of the keys after the tile; `before` as above.
template <class A>
struct StickCheckpoint {
  A beyond, before;
};

// Calls f(at, gradient) for this thread's pairs. enter(i, cost of the tile) gives the checkpoint of
// row 4 ty + i, and leave(i, before) takes `before` of the next tile. Begins with a barrier.
template <class T, Sum kSum, class Enter, class Leave, class F>
__device__ __forceinline__ void stick_tile(const AttentionBackwardParams& params, const Tile& tile,
                                           GradientShared<compute_t<T>>& shared, const Enter& enter,
                                           const Leave& leave, const F& f) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.problem;
  products_of_pairs<T, kSum>(params, tile, shared);
#pragma unroll 1  // registers would spill
  for (int i = 0; i < 4; ++i) {
    const int r = 4 * thread_y() + i;
    A share[4], cost[4], after[4], slope[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int c = thread_x() + 16 * j;
      const bool sees = shared.bits.sees(tile, r, c);
      const Logit<A> logit = logit_of(p, tile, r, c, shared.tile[place<kSum>(r, c)], sees);
      slope[j] = logit.slope;
      const StickKey<A> key = stick_key(logit.value);
      share[j] = key.share;
      cost[j] = key.cost;
    }
    const StickCheckpoint<A> at_tile = enter(i, sum_costs(cost, after));
    A before = at_tile.before;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int c = thread_x() + 16 * j, at = place<kSum>(r, c);
      const bool sees = shared.bits.sees(tile, r, c);
      const A z = shared.bits.template factor<A>(p, r, c);
      // A hidden key may hold anything, and rows past the end have no checkpoint.
      const A weight = sees ? share[j] * exp(-(at_tile.beyond + after[j])) : A(0);
      const A g = sees ? weight * (z * shared.other[at]) : A(0);
      const A sum = row_scan<-1>(g);
      const A grad = sees ? g - share[j] * (before + sum) : A(0);
      before += from_thread(sum, 15);
      f(at, PairGradient<A>{weight * z, grad, grad * slope[j]});
    }
    leave(i, before);
  }
}

template <class A>
__device__ __forceinline__ StickCheckpoint<A>& checkpoint(const AttentionProblem& p,
                                                          const StickSegment& segment, int64_t key,
                                                          int64_t row) {
  const int64_t n = (key - segment.keys.begin) / kTile;
  return static_cast<StickCheckpoint<A>*>(segment.checkpoints)[n * stat_rows(p) + row];
}

template <class T>
OMNIATTN_FN int64_t dq_blocks(const AttentionProblem& p) {
  return p.batch * p.hq * ceil_div(p.tq, kTile) * chunks_of<compute_t<T>>(p.d);
}

// State of a row at the start of a segment.
template <class A>
__device__ __forceinline__ StickState<A> entered(const AttentionBackwardParams& params,
                                                 const StickSegment& segment, int64_t row) {
  if (segment.keys.begin > 0) return static_cast<const StickState<A>*>(segment.entered)[row];
  const auto* const grad = static_cast<const A*>(params.grad_lse);
  return {{-static_cast<const A*>(params.lse)[row], -static_cast<const A*>(params.lse_tail)[row]},
          grad != nullptr ? grad[row] : A(0)};
}

template <class T>
__global__ void __launch_bounds__(kFmaThreads, 1)
    attention_stick_dq_kernel(const __grid_constant__ AttentionBackwardParams params,
                              const __grid_constant__ StickSegment segment) {
  using A = compute_t<T>;
  constexpr int kColumns = kChunkColumns<A>;
  auto& shared = *dynamic_shared<GradientShared<A>>();
  const AttentionProblem& p = params.problem;
  const int tx = thread_x(), ty = thread_y();
  const int64_t chunks = chunks_of<A>(p.d), blocks = ceil_div(p.tq, kTile);
  const bool ends = segment.keys.end >= p.tk;
  for (int64_t item = blockIdx.x; item < dq_blocks<T>(p); item += gridDim.x) {
    const int64_t first = item % chunks * kChunk<A>, head = item / chunks / blocks;
    const Sequence s = sequence_of(p, head / p.hq);
    Tile tile{s, head / p.hq, head % p.hq, item / chunks % blocks * kTile, 0, false};
    if (tile.q >= s.tq) continue;
    const int64_t row = row_index(p, s, tile.h, tile.q), rows = s.tq - tile.q;
    A* const sums = static_cast<A*>(segment.sums) + row * p.d;
    StickState<A> state[4] = {};
    A dq[4][kColumns];
    clear(dq);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 4 * ty + i;
      if (r >= rows) continue;
      state[i] = entered<A>(params, segment, row + r);
      if (segment.keys.begin == 0) continue;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int64_t c = first + tx + 16 * j;
        if (c < p.d) dq[i][j] = sums[r * p.d + c];
      }
    }
    Tiles<Along::keys> tiles(p, tile);
    tiles.blocks.left = intersect(tiles.blocks.left, blocks_of(segment.keys, kTile));
    while (tiles.next(tile)) {
      stick_tile<T, Sum::keys>(
          params, tile, shared,
          [&](int i, A cost) {
            state[i].left.add(-cost);
            const StickCheckpoint<A> found{state[i].left.total(), state[i].before};
            if (first == 0 && tx == 0 && 4 * ty + i < rows) {
              checkpoint<A>(p, segment, tile.k, row + 4 * ty + i) = found;
            }
            return found;
          },
          [&](int i, A before) { state[i].before = before; },
          [&](int at, const PairGradient<A>& g) { shared.tile[at] = g.dot; });
      const int64_t kv = kv_head(tile.h, p.hq, p.hkv);
      multiply_tile(shared.tile, rows, keys_of<T>(p.k, s, kv, tile.k), first, p.d, shared, dq);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first == 0 && tx == 0 && 4 * ty + i < rows) {
        static_cast<StickState<A>*>(segment.left)[row + 4 * ty + i] = state[i];
      }
    }
    if (ends) {
      const A scale = gradient_scale<A>(p) * head_factor<A>(p, tile.h);
      store_rows(dq, {scale, scale, scale, scale},
                 row_of<T>(params.grad_q, s.entry, s.q + tile.q, tile.h), params.grad_q.stride_t,
                 rows, first, p.d);
    } else {
      store_rows<A>(dq, {1, 1, 1, 1}, sums, p.d, rows, first, p.d);
    }
  }
}

template <class T>
OMNIATTN_FN int64_t dkdv_blocks(const AttentionProblem& p, const StickSegment& segment) {
  return p.batch * p.hkv * ceil_div(segment.keys.end - segment.keys.begin, kTile) *
         chunks_of<compute_t<T>>(p.d > p.dv ? p.d : p.dv);
}

// Gradients of v if of_values, else of k: registers for both would spill.
template <class T>
__global__ void __launch_bounds__(kFmaThreads, 1)
    attention_stick_dkdv_kernel(const __grid_constant__ AttentionBackwardParams params,
                                const __grid_constant__ StickSegment segment, bool of_values) {
  using A = compute_t<T>;
  auto& shared = *dynamic_shared<GradientShared<A>>();
  const AttentionProblem& p = params.problem;
  for (int64_t item = blockIdx.x; item < dkdv_blocks<T>(p, segment); item += gridDim.x) {
    const int64_t chunks = chunks_of<A>(max(p.d, p.dv)),
                  blocks = ceil_div(segment.keys.end - segment.keys.begin, kTile);
    const int64_t first = item % chunks * kChunk<A>, head = item / chunks / blocks;
    const int64_t b = head / p.hkv, kv = head % p.hkv;
    const int64_t key = segment.keys.begin + item / chunks % blocks * kTile;
    const Sequence s = sequence_of(p, b);
    if (key >= s.tk) continue;
    A sums[4][kChunkColumns<A>];
    clear(sums);
    for (int64_t h = kv * group_size(p); h < (kv + 1) * group_size(p); ++h) {
      const A factor = head_factor<A>(p, h);
      Tile tile{s, b, h, 0, key, false};
      for (Tiles<Along::queries> tiles(p, tile); tiles.next(tile);) {
        stick_tile<T, Sum::queries>(
            params, tile, shared,
            [&](int i, A) {
              const int64_t query = min(tile.q + 4 * thread_y() + i, s.tq - 1);
              return checkpoint<A>(p, segment, key, row_index(p, s, h, query));
            },
            [](int, A) {},
            [&](int at, const PairGradient<A>& g) {
              shared.tile[at] = of_values ? g.weight : factor * g.dot;
            });
        multiply_tile(shared.tile, s.tk - key,
                      queries_of<T>(of_values ? params.grad_out : p.q, s, h, tile.q), first,
                      of_values ? p.dv : p.d, shared, sums);
      }
    }
    const A scale = of_values ? A(1) : gradient_scale<A>(p);
    const auto& grad = of_values ? params.grad_v : params.grad_k;
    store_rows(sums, {scale, scale, scale, scale}, row_of<T>(grad, s.entry, s.k + key, kv),
               grad.stride_t, s.tk - key, first, of_values ? p.dv : p.d);
  }
}

}  // namespace

int64_t attention_stick_states(const AttentionProblem& p) { return 3 * stat_rows(p); }
int64_t attention_stick_checkpoints(const AttentionProblem& p) {
  return 2 * stat_rows(p) * ceil_div(p.tk < kStickKeys ? p.tk : kStickKeys, kTile);
}
int64_t attention_stick_sums(const AttentionProblem& p) {
  return p.tk > kStickKeys ? stat_rows(p) * p.d : 0;
}

Status launch_attention_stick_gradients(const AttentionBackwardParams& params,
                                        const StickSegment& segment, Stream stream) {
  const AttentionProblem& p = params.problem;
  dispatch(p.dtype, [&]<class T>(T) {
    constexpr size_t kBytes = sizeof(GradientShared<compute_t<T>>);
    GPU_LAUNCH(attention_stick_dq_kernel<T>, item_grid(dq_blocks<T>(p)), kFmaThreads, kBytes,
               stream, params, segment);
    if (p.tk == 0) return;
    for (const bool of_values : {false, true}) {
      GPU_LAUNCH(attention_stick_dkdv_kernel<T>, item_grid(dkdv_blocks<T>(p, segment)), kFmaThreads,
                 kBytes, stream, params, segment, of_values);
    }
  });
  return launch_status();
}

}  // namespace omniattn
