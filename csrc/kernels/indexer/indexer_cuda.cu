// The lightning indexer on CUDA, see indexer.h: a block processes one query after another and walks
// its keys, each thread one key at a time. Candidates are in global memory in walking order; the
// best are found by their scores as integers, digit by digit, and ranked by counting.
#include "kernels/indexer/indexer.h"

#include "runtime/dispatch.h"
#include "runtime/gpu.h"
#include "semantics/softmax.h"

namespace omniattn {
namespace {

constexpr int kThreads = static_cast<int>(kIndexerThreads);
constexpr int kWarps = kThreads / 32;
constexpr int kDigits = 256;

__device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }

// Number of earlier threads that are `chosen`; `total` becomes the number of all chosen threads.
// All threads of the block take part.
__device__ __forceinline__ int chosen_before(bool chosen, int& total) {
  GPU_SHARED(int, counts, kWarps);
  const int warp = thread() / 32, lane = thread() % 32;
  const uint32_t bits = __ballot_sync(0xffffffffu, chosen);
  if (lane == 0) counts[warp] = __popc(bits);
  __syncthreads();
  int before = __popc(bits & ((1u << lane) - 1));
  total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += counts[w];
    total += counts[w];
  }
  __syncthreads();  // the next call reuses the array
  return before;
}

// Candidates of the block's query. Every thread holds the same values.
template <class A>
struct BlockCandidates {
  using Order = order_t<A>;
  Order* orders;
  int32_t* keys;
  int64_t count;
  Order least;  // only orders from here on can still be chosen

  __device__ __forceinline__ void add(bool seen, A score, int64_t at) {
    const Order found = order_of_score(score);
    const bool chosen = seen && found >= least;
    int total;
    const int64_t place = count + chosen_before(chosen, total);
    if (chosen) {
      orders[place] = found;
      keys[place] = static_cast<int32_t>(at);
    }
    count += total;
    __syncthreads();
  }

  // The n-th largest order, and how many orders equal to it are among the n largest.
  __device__ Order nth_largest(int64_t n, int64_t& equal) const {
    GPU_SHARED(int, counts, kDigits);
    GPU_SHARED(int64_t, found, 2);  // the digit, and how many of its orders are among the n
    Order prefix = 0, known = 0;
    for (int shift = 8 * static_cast<int>(sizeof(Order)) - 8; shift >= 0; shift -= 8) {
      counts[thread()] = 0;
      __syncthreads();
      for (int64_t i = thread(); i < count; i += kThreads) {
        if ((orders[i] & known) == prefix) {
          atomicAdd(counts + static_cast<int>(orders[i] >> shift & (kDigits - 1)), 1);
        }
      }
      __syncthreads();
      if (thread() == 0) {
        int digit = kDigits - 1;
        int64_t left = n;
        for (; counts[digit] < left; --digit) left -= counts[digit];
        found[0] = digit;
        found[1] = left;
      }
      __syncthreads();
      prefix |= static_cast<Order>(found[0]) << shift;
      known |= static_cast<Order>(kDigits - 1) << shift;
      n = found[1];
      __syncthreads();
    }
    equal = n;
    return prefix;
  }

  // Keeps the best `kept`, in walking order.
  __device__ void drop(int64_t kept) {
    int64_t equal;
    const Order last = nth_largest(kept, equal);
    int64_t left = 0;
    for (int64_t first = 0; first < count; first += kThreads) {
      const int64_t i = first + thread();
      const bool there = i < count;
      const Order own = there ? orders[i] : Order(0);
      const int32_t own_key = there ? keys[i] : 0;
      int ties, total;
      const bool tie = there && own == last;
      const int64_t ties_before = chosen_before(tie, ties);
      const bool stays = there && (own > last || (tie && ties_before < equal));
      const int64_t place = left + chosen_before(stays, total);
      if (stays) {
        orders[place] = own;
        keys[place] = own_key;
      }
      __syncthreads();
      equal -= ties;
      left += total;
    }
    count = left;
    least = last + 1;
  }
};

// Score I of query t and key j.
template <class T>
__device__ compute_t<T> score(const IndexerParams& p, int64_t b, int64_t t, int64_t j) {
  using A = compute_t<T>;
  const T* const k = static_cast<const T*>(p.k.data) + b * p.k.stride_b + j * p.k.stride_t;
  const T* q = static_cast<const T*>(p.q.data) + b * p.q.stride_b + t * p.q.stride_t;
  const A* const w = static_cast<const A*>(p.w) + (b * p.tq + t) * p.heads;
  A sum = 0;
  for (int64_t h = 0; h < p.heads; ++h, q += p.q.stride_h) {
    A product = 0;
    for (int64_t c = 0; c < p.d; ++c) product += gpu::widen(q[c]) * gpu::widen(k[c]);
    if (p.relu && product < A(0)) product = 0;  // NaN stays NaN
    sum += p.w != nullptr ? w[h] * product : product;
  }
  return sum;
}

template <class A>
__device__ void store_list(const IndexerParams& p, int64_t row, const BlockCandidates<A>& list) {
  int32_t* const index = p.index + row * p.count;
  A* const scores = p.scores != nullptr ? static_cast<A*>(p.scores) + row * p.count : nullptr;
  for (int64_t i = thread(); i < list.count; i += kThreads) {
    const auto own = list.orders[i];
    int64_t rank = 0;
    for (int64_t n = 0; n < list.count; ++n) {
      rank += list.orders[n] > own || (list.orders[n] == own && n < i) ? 1 : 0;
    }
    index[rank] = list.keys[i];
    if (scores != nullptr) scores[rank] = score_of_order(own);
  }
  for (int64_t i = list.count + thread(); i < p.count; i += kThreads) {
    index[i] = -1;
    if (scores != nullptr) scores[i] = negative_infinity<A>();
  }
}

template <class T>
__global__ void __launch_bounds__(kIndexerThreads)
    dsa_indexer_kernel(const __grid_constant__ IndexerParams p) {
  using A = compute_t<T>;
  using Order = order_t<A>;
  const int64_t capacity = indexer_cuda_capacity(p), kept = indexer_kept(p);
  A* const memory = static_cast<A*>(p.workspace) + 2 * capacity * blockIdx.x;
  for (int64_t row = blockIdx.x; row < p.batch * p.tq; row += gridDim.x) {
    const int64_t b = row / p.tq, t = row % p.tq, end = indexer_end(p, t);
    BlockCandidates<A> list{reinterpret_cast<Order*>(memory),
                            reinterpret_cast<int32_t*>(memory + capacity), 0, 0};
    for (int64_t first = 0; first < end; first += kThreads) {
      const int64_t i = first + thread(), j = p.recent ? end - 1 - i : i;
      const bool seen = i < end && (p.real == nullptr || p.real[b * p.real_stride + j] != 0);
      list.add(seen, seen ? score<T>(p, b, t, j) : A(0), j);
      if (list.count + kThreads > capacity) list.drop(kept);
    }
    if (list.count > kept) list.drop(kept);
    store_list(p, row, list);
    __syncthreads();  // the next query reuses the memory
  }
}

}  // namespace

Status launch_dsa_indexer(const IndexerParams& p, Stream stream) {
  const auto blocks = static_cast<unsigned>(indexer_cuda_blocks(p));
  if (blocks == 0 || p.count == 0) return nullptr;
  dispatch(p.dtype, [&]<class T>(T) {
    GPU_LAUNCH((dsa_indexer_kernel<T>), blocks, kThreads, 0, stream, p);
  });
  return gpu::launch_status();
}

}  // namespace omniattn
