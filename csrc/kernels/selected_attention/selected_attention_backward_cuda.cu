// Backward over selected keys for any dtype and head size, see selected_attention.h. Every gradient
// has one owner, so that sums have a fixed order:
//
//   invert  counts the lists that contain a block, in parts of 64 lists, then writes them in order
//   dq      a block per 64 rows (query, head) of an item and chunk of columns, over its list
//   dkdv    a block per 64 keys of one block and chunk of columns, over the lists that contain it
//
// Both gradient kernels recompute P and dS. If blocks have less than 64 keys,
// tiles of dkdv are partly empty.
#include "kernels/selected_attention/selected_attention_tile_cuda.h"
#include "runtime/dispatch.h"

namespace omniattn {
namespace {

using namespace gpu;

constexpr int kListThreads = 256;

// Calls f(block, list) for the entries of the lists of a part: list by list; the entries of one
// list, which are different blocks, in parallel.
template <class F>
__device__ __forceinline__ void for_entries(const SelectedLists& s, const AttentionProblem& p,
                                            int64_t owner, int64_t part, const F& f) {
  const int64_t base = owner / s.heads * s.stride_b + owner % s.heads * s.stride_h;
  const Range lists = block(part, kListsOfPart, list_count(s, p));
  for (int64_t list = lists.begin; list < lists.end; ++list) {
    for (int64_t n = threadIdx.x; n < s.count; n += kListThreads) {
      const int64_t found = selected_block(s, p, base + list * s.stride_q, n);
      if (found >= 0) f(found, list);
    }
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kListThreads)
    count_lists_kernel(const __grid_constant__ SelectedLists s,
                       const __grid_constant__ AttentionProblem p,
                       const __grid_constant__ InvertedLists to) {
  const int64_t parts = inverted_parts(s, p), blocks = selected_blocks(s, p);
  for (int64_t n = blockIdx.x; n < p.batch * s.heads * parts; n += gridDim.x) {
    int32_t* const counts = to.offsets + n * blocks;
    for_entries(s, p, n / parts, n % parts,
                [&](int64_t found, int64_t) { atomicAdd(counts + found, 1); });
  }
}

// Turns the counts of parts into the places where each part writes.
__global__ void __launch_bounds__(kListThreads)
    place_lists_kernel(const __grid_constant__ SelectedLists s,
                       const __grid_constant__ AttentionProblem p,
                       const __grid_constant__ InvertedLists to) {
  const int64_t parts = inverted_parts(s, p), blocks = selected_blocks(s, p);
  for (int64_t owner = blockIdx.x; owner < p.batch * s.heads; owner += gridDim.x) {
    int32_t* const offsets = to.offsets + owner * parts * blocks;
    int32_t* const starts = to.starts + owner * (blocks + 1);
    for (int64_t n = threadIdx.x; n < blocks; n += kListThreads) {
      int32_t sum = 0;
      for (int64_t part = 0; part < parts; ++part) sum += offsets[part * blocks + n];
      starts[n + 1] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      starts[0] = 0;
      for (int64_t n = 0; n < blocks; ++n) starts[n + 1] += starts[n];
    }
    __syncthreads();
    for (int64_t n = threadIdx.x; n < blocks; n += kListThreads) {
      int32_t next = starts[n];
      for (int64_t part = 0; part < parts; ++part) {
        const int32_t count = offsets[part * blocks + n];
        offsets[part * blocks + n] = next;
        next += count;
      }
    }
  }
}

__global__ void __launch_bounds__(kListThreads)
    write_lists_kernel(const __grid_constant__ SelectedLists s,
                       const __grid_constant__ AttentionProblem p,
                       const __grid_constant__ InvertedLists to) {
  const int64_t parts = inverted_parts(s, p), blocks = selected_blocks(s, p);
  for (int64_t n = blockIdx.x; n < p.batch * s.heads * parts; n += gridDim.x) {
    int32_t* const offsets = to.offsets + n * blocks;
    int32_t* const lists = to.lists + n / parts * list_count(s, p) * s.count;
    for_entries(s, p, n / parts, n % parts, [&](int64_t found, int64_t list) {
      lists[atomicAdd(offsets + found, 1)] = static_cast<int32_t>(list);
    });
  }
}

// Calls f(at, gradient) for this thread's pairs (row r = 4 ty + i, key c = tx + 16 j). Begins with
// a barrier; q.k and dP are kept in shared.tile and shared.other, as in gradient_tile.
template <class T, Sum kSum, class F>
__device__ __forceinline__ void selected_gradient_tile(const SelectedBackwardParams& params,
                                                       int64_t b, SelectedShared<T>& shared,
                                                       const F& f) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.attention.problem;
  const Picked<T>& at = shared.at;
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
  multiply_rows(PickedRows<T>{at.q, kTile}, PickedRows<T>{at.k, kTile}, p.d, shared, acc);
  keep(acc, shared.tile);
  multiply_rows(PickedRows<T>{at.grad, kTile}, PickedRows<T>{at.v, kTile}, p.dv, shared, acc);
  keep(acc, shared.other);
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const int r = 4 * ty + i;
    const bool exists = at.query[r] >= 0;
    const RowStats<A> stats =
        stats_of<A>(params.attention, exists ? stat_of(p, b, at, r) : int64_t{0});
#pragma unroll 1
    for (int c = tx; c < kTile; c += 16) {
      const int place_of = place<kSum>(r, c);
      const bool visible = sees(params.lists, p, at, r, c);
      f(place_of, gradient_of(p, Tile{}, r, c, visible, visible ? kept(p, b, at, r, c) : A(0),
                              shared.tile[place_of], shared.other[place_of], stats));
    }
  }
}

template <class T>
OMNIATTN_FN int64_t dq_blocks(const SelectedBackwardParams& params) {
  const AttentionProblem& p = params.attention.problem;
  return selected_items(params.lists, p) * row_tiles(params.lists, p) *
         chunks_of<compute_t<T>>(p.d);
}

template <class T>
__global__ void __launch_bounds__(kFmaThreads, 1)
    selected_dq_fma_kernel(const __grid_constant__ SelectedBackwardParams params) {
  using A = compute_t<T>;
  auto& shared = *dynamic_shared<SelectedShared<T>>();
  const SelectedLists& s = params.lists;
  const AttentionProblem& p = params.attention.problem;
  const int64_t chunks = chunks_of<A>(p.d), tiles = row_tiles(s, p);
  for (int64_t n = blockIdx.x; n < dq_blocks<T>(params); n += gridDim.x) {
    const int64_t first = n % chunks * kChunk<A>;
    const SelectedItem item = item_of_call(s, p, n / chunks / tiles);
    if (is_empty(item.queries)) continue;
    __syncthreads();
    pick_rows(p, params.attention.grad_out, item, n / chunks % tiles, shared.at);
    A dq[4][kChunkColumns<A>];
    clear(dq);
    for (int64_t keys = 0; keys < key_tiles(s); ++keys) {
      pick_keys(s, p, item, keys, shared.at);
      selected_gradient_tile<T, Sum::keys>(
          params, item.b, shared,
          [&](int at, const PairGradient<A>& g) { shared.tile[at] = g.dot; });
      multiply_tile(shared.tile, kTile, PickedRows<T>{shared.at.k, kTile}, first, p.d, shared, dq);
    }
    __syncthreads();
    const A scale = gradient_scale<A>(p);
    store_picked<T>(dq, {scale, scale, scale, scale}, shared.at, first, p.d,
                    [&](int64_t query, int64_t head) {
                      return row_of<T>(params.attention.grad_q, item.b, query, head);
                    });
  }
}

template <class T>
OMNIATTN_FN int64_t dkdv_blocks(const SelectedBackwardParams& params) {
  const AttentionProblem& p = params.attention.problem;
  return p.batch * p.hkv * selected_blocks(params.lists, p) *
         ceil_div(smaller(params.lists.block_size, p.tk), kTile) *
         chunks_of<compute_t<T>>(max(p.d, p.dv));
}

template <class T>
__global__ void __launch_bounds__(kFmaThreads, 1)
    selected_dkdv_fma_kernel(const __grid_constant__ SelectedBackwardParams params,
                             const __grid_constant__ InvertedLists inverted) {
  using A = compute_t<T>;
  auto& shared = *dynamic_shared<SelectedShared<T>>();
  const SelectedLists& s = params.lists;
  const AttentionProblem& p = params.attention.problem;
  const int64_t chunks = chunks_of<A>(max(p.d, p.dv)), blocks = selected_blocks(s, p);
  const int64_t tiles = ceil_div(smaller(s.block_size, p.tk), kTile), heads = list_heads(s, p);
  const int64_t rows_of_list = smaller(s.query_block, p.tq) * heads;
  const int thread = static_cast<int>(threadIdx.x);
  for (int64_t n = blockIdx.x; n < dkdv_blocks<T>(params); n += gridDim.x) {
    const int64_t first = n % chunks * kChunk<A>, found = n / chunks / tiles % blocks;
    const int64_t head = n / chunks / tiles / blocks, b = head / p.hkv, kv = head % p.hkv;
    const Range all = block(found, s.block_size, p.tk);
    const Range keys = intersect(
        {all.begin + n / chunks % tiles * kTile, all.begin + (n / chunks % tiles + 1) * kTile},
        all);
    if (is_empty(keys)) continue;
    __syncthreads();
    if (thread < kTile) {
      pick_key(p, b, kv, keys.begin + thread, keys.begin + thread < keys.end, thread, shared.at);
    }
    A dk[4][kChunkColumns<A>], dv[4][kChunkColumns<A>];
    clear(dk);
    clear(dv);
    for (int64_t h = kv * group_size(p); h < (kv + 1) * group_size(p); h += heads) {
      const int64_t owner = b * s.heads + (s.heads == 1 ? 0 : h / (p.hq / s.heads));
      const int32_t* const starts = inverted.starts + owner * (blocks + 1) + found;
      const int32_t* const lists = inverted.lists + owner * list_count(s, p) * s.count + starts[0];
      const int64_t rows = (starts[1] - starts[0]) * rows_of_list;
      for (int64_t row = 0; row < rows; row += kTile) {
        if (thread < kTile) {
          const int64_t r = row + thread, rest = r % rows_of_list;
          const int64_t list = r < rows ? lists[r / rows_of_list] : 0;
          const int64_t query = list * s.query_block + rest / heads;
          pick_row(p, params.attention.grad_out, b, query, h + rest % heads,
                   r < rows && query < p.tq, thread, shared.at);
        }
        selected_gradient_tile<T, Sum::queries>(params, b, shared,
                                                [&](int at, const PairGradient<A>& g) {
                                                  shared.tile[at] = g.weight;
                                                  shared.other[at] = g.dot;
                                                });
        const int64_t count = keys.end - keys.begin;
        multiply_tile(shared.tile, count, PickedRows<T>{shared.at.grad, kTile}, first, p.dv, shared,
                      dv);
        multiply_tile(shared.other, count, PickedRows<T>{shared.at.q, kTile}, first, p.d, shared,
                      dk);
      }
    }
    const auto scale = gradient_scale<A>(p);
    const int64_t count = keys.end - keys.begin;
    store_rows(dk, {scale, scale, scale, scale},
               row_of<T>(params.attention.grad_k, b, keys.begin, kv),
               params.attention.grad_k.stride_t, count, first, p.d);
    store_rows(dv, {1, 1, 1, 1}, row_of<T>(params.attention.grad_v, b, keys.begin, kv),
               params.attention.grad_v.stride_t, count, first, p.dv);
  }
}

}  // namespace

Status launch_invert_lists(const SelectedLists& s, const AttentionProblem& p,
                           const InvertedLists& to, Stream stream) {
  const unsigned parts = item_grid(p.batch * s.heads * inverted_parts(s, p));
  GPU_LAUNCH(count_lists_kernel, parts, kListThreads, 0, stream, s, p, to);
  GPU_LAUNCH(place_lists_kernel, item_grid(p.batch * s.heads), kListThreads, 0, stream, s, p, to);
  GPU_LAUNCH(write_lists_kernel, parts, kListThreads, 0, stream, s, p, to);
  return launch_status();
}

Status launch_selected_gradients(const SelectedBackwardParams& params, const InvertedLists& lists,
                                 Stream stream) {
  dispatch(params.attention.problem.dtype, [&]<class T>(T) {
    constexpr size_t kBytes = sizeof(SelectedShared<T>);
    GPU_LAUNCH(selected_dq_fma_kernel<T>, item_grid(dq_blocks<T>(params)), kFmaThreads, kBytes,
               stream, params);
    if (params.attention.problem.tk == 0) return;
    GPU_LAUNCH(selected_dkdv_fma_kernel<T>, item_grid(dkdv_blocks<T>(params)), kFmaThreads, kBytes,
               stream, params, lists);
  });
  return launch_status();
}

}  // namespace omniattn
