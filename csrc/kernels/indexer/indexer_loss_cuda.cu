// Loss of the lightning indexer on CUDA, see indexer_loss.h: a block processes one query after
// another, each thread one key at a time.
#include "kernels/indexer/indexer_loss.h"

#include "runtime/gpu_row.h"
#include "semantics/softmax.h"

namespace omniattn {
namespace {

constexpr int64_t kThreads = 128;
constexpr int64_t kMostBlocks = 65535;

// The key at column s of query t, or -1 if the query does not see it.
__device__ __forceinline__ int64_t seen_key(const IndexerLossParams& p, int64_t b, int64_t t,
                                            int64_t s) {
  const int64_t key = p.indices != nullptr ? p.indices[(b * p.tq + t) * p.count + s] : s;
  const bool seen = key >= 0 && key < loss_end(p, t) &&
                    (p.real == nullptr || p.real[b * p.real_stride + key] != 0);
  return seen ? key : -1;
}

// A row of a pass; A is the compute type.
template <class A>
struct LossRow {
  const IndexerLossRows& p;
  int64_t b, i, t, row;
  const A* w;  // (H), or null

  __device__ __forceinline__ LossRow(const IndexerLossRows& p_, int64_t b_, int64_t i_)
      : p(p_), b(b_), i(i_), t(p_.first + i_), row(b_ * p_.queries + i_) {
    w = static_cast<const A*>(p.problem.w);
    if (w != nullptr) w += query() * p.problem.heads;
  }

  // Index of the query among all of the call.
  __device__ __forceinline__ int64_t query() const { return b * p.problem.tq + t; }
  __device__ __forceinline__ bool sees(int64_t s) const {
    return seen_key(p.problem, b, t, s) >= 0;
  }
  __device__ __forceinline__ A* of(void* matrix) const {
    return static_cast<A*>(matrix) + row * p.columns;
  }
  __device__ __forceinline__ A* kept() const {
    return static_cast<A*>(p.kept) + query() * loss_kept(p.problem);
  }
  __device__ __forceinline__ A* products(int64_t h) const {
    return static_cast<A*>(p.products) + (row * p.problem.heads + h) * p.columns;
  }
  __device__ __forceinline__ A weight(int64_t h) const { return w != nullptr ? w[h] : A(1); }

  // I of a key that is seen.
  __device__ __forceinline__ A score(int64_t s) const {
    A sum = 0;
    for (int64_t h = 0; h < p.problem.heads; ++h) {
      const A x = products(h)[s];
      sum += weight(h) * (p.problem.relu && x < A(0) ? A(0) : x);  // NaN stays NaN
    }
    return sum;
  }
  // u of a key that is seen.
  __device__ __forceinline__ A attention(int64_t s) const {
    const IndexerLossParams& in = p.problem;
    const A* lse = static_cast<const A*>(in.lse) + b * in.hq * in.tq + t;
    const A* logit =
        static_cast<const A*>(p.logits) + (b * in.hkv * p.queries + i) * p.group * p.columns + s;
    const A scale = static_cast<A>(in.scale);
    A sum = 0;
    for (int64_t h = 0; h < in.hkv; ++h, logit += (p.queries - 1) * p.group * p.columns) {
      for (int64_t g = 0; g < p.group; ++g, logit += p.columns, lse += in.tq) {
        sum += exp(scale * *logit - (*lse == negative_infinity<A>() ? A(0) : *lse));
      }
    }
    return sum;
  }
};

// Calls f(row) for the rows of a block. Divisions of 64 bits would be calls, which spill registers.
template <class A, class F>
__device__ __forceinline__ void for_rows(const IndexerLossRows& p, const F& f) {
  const auto queries = static_cast<uint32_t>(p.queries);
  const uint32_t rows = static_cast<uint32_t>(p.problem.batch) * queries;
  for (uint32_t row = blockIdx.x; row < rows; row += gridDim.x) {
    f(LossRow<A>(p, row / queries, row % queries));
  }
}

template <class A>
__global__ void __launch_bounds__(kThreads)
    indexer_loss_kernel(const __grid_constant__ IndexerLossRows p) {
  for_rows<A>(p, [&](const LossRow<A>& row) {
    A* const scores = row.of(p.scores);
    A* const weights = row.of(p.weights);
    A total = 0, most = negative_infinity<A>();
    for (int64_t s = threadIdx.x; s < p.columns; s += kThreads) {
      const bool seen = row.sees(s);
      scores[s] = seen ? row.score(s) : negative_infinity<A>();
      weights[s] = seen ? row.attention(s) : A(0);
      most = fmax(most, scores[s]);
      total += weights[s];
    }
    total = gpu::row_sum(total);
    const A scale = total == A(0) ? A(1) : 1 / total;
    most = gpu::row_max(most);
    const A shift = most == negative_infinity<A>() ? A(0) : most;
    A sum = 0;
    for (int64_t s = threadIdx.x; s < p.columns; s += kThreads) sum += exp(scores[s] - shift);
    const A log_sum = log(gpu::row_sum(sum));
    A loss = 0;
    for (int64_t s = threadIdx.x; s < p.columns; s += kThreads) {
      const A target = scale * weights[s];
      if (row.sees(s)) {
        loss += (target == A(0) ? A(0) : target * log(target)) -
                target * ((scores[s] - shift) - log_sum);
      }
      if (p.kept != nullptr && p.problem.indices != nullptr) row.kept()[kLossKept + s] = target;
    }
    loss = gpu::row_sum(loss);
    if (threadIdx.x == 0) {
      static_cast<A*>(p.loss)[row.query()] = loss;
      if (p.kept != nullptr) {
        row.kept()[0] = total == A(0) ? -negative_infinity<A>() : shift + log_sum;
        row.kept()[1] = 1;
      }
    }
  });
}

template <class A>
__global__ void __launch_bounds__(kThreads)
    indexer_loss_backward_kernel(const __grid_constant__ IndexerLossRowsBackward x) {
  const IndexerLossRows& p = x.rows;
  const int64_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for_rows<A>(p, [&](const LossRow<A>& row) {
    A* const grads = row.of(p.scores);  // of I
    const A* targets = row.kept() + kLossKept;
    A total = 1;
    if (p.problem.indices == nullptr) {
      A* const weights = row.of(p.weights);
      total = 0;
      for (int64_t s = threadIdx.x; s < p.columns; s += kThreads) {
        weights[s] = row.sees(s) ? row.attention(s) : A(0);
        total += weights[s];
      }
      total = gpu::row_sum(total);
      targets = weights;
    }
    const A scale = total == A(0) ? A(1) : 1 / total;
    const A grad = static_cast<const A*>(x.grad)[row.query()], log_sum = row.kept()[0];
    for (int64_t s = threadIdx.x; s < p.columns; s += kThreads) {
      const bool seen = row.sees(s);
      grads[s] = seen ? grad * (exp(row.score(s) - log_sum) - scale * targets[s]) : A(0);
    }
    __syncthreads();
    for (int64_t h = warp; h < p.problem.heads; h += kThreads / 32) {
      A* const products = row.products(h);
      const A w = row.weight(h);
      A sum = 0;
      for (int64_t s = lane; s < p.columns; s += 32) {
        const A product = products[s];
        const bool hidden = grads[s] == A(0), flat = p.problem.relu && !(product > A(0));
        if (!hidden) sum += grads[s] * (flat ? A(0) : product);
        products[s] = hidden ? A(0) : grads[s] * (flat ? A(0) : w);
      }
      sum = gpu::warp_reduce(sum, [](A a, A b) { return a + b; });
      if (lane == 0 && x.w_grad != nullptr) {
        static_cast<A*>(x.w_grad)[row.query() * p.problem.heads + h] = sum;
      }
    }
    __syncthreads();  // the next query reuses the memory
  });
}

// A warp copies one key after another.
template <class T>
__global__ void __launch_bounds__(kThreads)
    indexer_loss_gather_kernel(const __grid_constant__ IndexerLossRows p,
                               const __grid_constant__ HeadView k, int64_t heads, int64_t width,
                               compute_t<T>* keys, int64_t* places) {
  const int64_t lane = threadIdx.x % 32, warps = kThreads / 32;
  const int64_t each = p.queries * p.columns, count = p.problem.batch * heads * each;
  for (int64_t at = blockIdx.x * warps + threadIdx.x / 32; at < count; at += gridDim.x * warps) {
    const int64_t b = at / each / heads, h = at / each % heads;
    const int64_t i = at % each / p.columns, s = at % p.columns;
    const int64_t key = seen_key(p.problem, b, p.first + i, s);
    const T* const from = static_cast<const T*>(k.data) + b * k.stride_b +
                          larger(0, key) * k.stride_t + h * k.stride_h;
    for (int64_t c = lane; c < width; c += 32) {
      keys[at * width + c] = key >= 0 ? gpu::widen(from[c]) : compute_t<T>(0);
    }
    if (places != nullptr && lane == 0) places[at] = key >= 0 ? b * p.problem.tk + key : 0;
  }
}

unsigned blocks_of(int64_t items) { return static_cast<unsigned>(min(items, kMostBlocks)); }

}  // namespace

Status launch_indexer_loss(const IndexerLossRows& p, Stream stream) {
  if (p.problem.batch * p.queries == 0) return nullptr;
  dispatch_compute(p.problem.dtype, [&]<class A>(A) {
    GPU_LAUNCH(indexer_loss_kernel<A>, blocks_of(p.problem.batch * p.queries), kThreads, 0, stream,
               p);
  });
  return gpu::launch_status();
}

Status launch_indexer_loss_backward(const IndexerLossRowsBackward& p, Stream stream) {
  if (p.rows.problem.batch * p.rows.queries == 0) return nullptr;
  dispatch_compute(p.rows.problem.dtype, [&]<class A>(A) {
    GPU_LAUNCH(indexer_loss_backward_kernel<A>, blocks_of(p.rows.problem.batch * p.rows.queries),
               kThreads, 0, stream, p);
  });
  return gpu::launch_status();
}

Status launch_indexer_loss_gather(const IndexerLossRows& p, const HeadView& k, int64_t heads,
                                  int64_t width, void* keys, int64_t* places, Stream stream) {
  const int64_t count = p.problem.batch * heads * p.queries * p.columns;
  if (count == 0) return nullptr;
  dispatch(p.problem.dtype, [&]<class T>(T) {
    GPU_LAUNCH(indexer_loss_gather_kernel<T>, blocks_of(ceil_div(count, kThreads / 32)), kThreads,
               0, stream, p, k, heads, width, static_cast<compute_t<T>*>(keys), places);
  });
  return gpu::launch_status();
}

}  // namespace omniattn
