// Few query rows against many keys, see attention_params.h. Keys are split at fixed places. A
// block reads its K and V once, 16 bytes per access, for all query rows that share them
// (the queries of all heads of a group), and leaves one partial (O, m, l) per row; merge
// adds the partials in key order. Rows of int8 are read as they are stored: their factors multiply
// the products q.k and the weights of the values.
#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/attention_tile_cuda.h"
#include "runtime/gpu_row.h"
#include "runtime/int8.h"

namespace omniattn {
namespace {

using namespace gpu;

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kRows = 4;  // rows that a thread computes together
constexpr int kSplit = static_cast<int>(kSplitKeys);
constexpr int64_t kMaxHead = 512;

// Number of rows of one kv head: the queries of all heads of its group.
OMNIATTN_FN int64_t head_rows(const AttentionProblem& p) { return group_size(p) * p.tq; }
OMNIATTN_FN int64_t key_splits(const AttentionProblem& p) { return ceil_div(p.tk, kSplit); }
OMNIATTN_FN int64_t items(const AttentionProblem& p) { return p.batch * p.hkv * key_splits(p); }
OMNIATTN_FN int64_t partial_width(const AttentionProblem& p) { return p.dv + 2; }

// Shared memory: q (rows, d), logits (rows, kSplit) and the parts of O (kThreads, kRows, W), with
// rows rounded up to kRows.
template <class A>
struct DecodeShared {
  A *q, *s, *parts;
};
OMNIATTN_FN int64_t padded_rows(const AttentionProblem& p) { return round_up(head_rows(p), kRows); }
template <class A>
__device__ __forceinline__ DecodeShared<A> shared_of(const AttentionProblem& p) {
  A* const q = dynamic_shared<A>();
  A* const s = q + padded_rows(p) * p.d;
  return {q, s, s + padded_rows(p) * kSplit};
}
template <class A, int W>
size_t shared_bytes(const AttentionProblem& p) {
  return static_cast<size_t>(padded_rows(p) * (p.d + kSplit) + kThreads * kRows * W) * sizeof(A);
}

template <class K>
inline constexpr bool kHasFactors = false;
template <class A>
inline constexpr bool kHasFactors<Int8<A>> = true;

template <class K, int W>
__device__ __forceinline__ compute_t<K> element(const Pack<K, W>& x, int j) {
  if constexpr (kHasFactors<K>) {
    return omniattn::widen(x.v[j]);
  } else {
    return x[j];
  }
}

// The keys of a split, for one kv head.
template <class K>
struct SplitKeys {
  const AttentionProblem& p;
  int64_t entry, first, head;

  // Key n, its value, or the factor of either.
  template <class S = K>
  __device__ __forceinline__ const S* row(const HeadView& x, int n) const {
    return static_cast<const S*>(x.data) + key_offset(p, x, entry, first + n) + head * x.stride_h;
  }
  __device__ __forceinline__ compute_t<K> factor(const HeadView& x, int n) const {
    if constexpr (kHasFactors<K>) {
      return *row<compute_t<K>>(x, n);
    } else {
      return compute_t<K>(1);
    }
  }
};

// Smallest power of two that is at least n, but at most `most`.
__device__ __forceinline__ int threads_for(int64_t n, int most) {
  int threads = 1;
  while (threads < n && threads < most) threads *= 2;
  return threads;
}

// s[r][n] = q_r . k_n for the split's `count` keys; adjacent threads read pieces of one key.
template <class K, int W>
__device__ __forceinline__ void multiply_keys(const AttentionProblem& p, const SplitKeys<K>& stored,
                                              int count, const compute_t<K>* q, compute_t<K>* s) {
  using A = compute_t<K>;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int width = threads_for(p.d / W, 32), keys = 32 / width, part = lane % width;
  for (int base = warp * keys; base < count; base += kWarps * keys) {
    const int n = base + lane / width;
    const K* const row = stored.row(p.k, n < count ? n : 0);
    const A factor = stored.factor(p.k_scale, n < count ? n : 0);
    for (int r = 0; r < padded_rows(p); r += kRows) {
      A sum[kRows] = {};
      for (int64_t c = part * W; c < p.d; c += width * W) {
        const Pack<K, W> key = load_constant<W>(row + c);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int j = 0; j < W; ++j) sum[i] += q[(r + i) * p.d + c + j] * element(key, j);
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        for (int bits = width / 2; bits > 0; bits /= 2) {
          sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], bits);
        }
        if (part == 0 && n < count) s[(r + i) * kSplit + n] = sum[i] * factor;
      }
    }
  }
}

// One warp turns logits into probabilities times the dropout factors
// and writes m and l to `partial`.
template <class A>
__device__ __forceinline__ void softmax_row(const AttentionProblem& p, const Tile& row, int count,
                                            A* s, A* partial) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool drops = p.dropout.threshold != 0;
  uint64_t visible = ~uint64_t{0}, keep = ~uint64_t{0};  // of keys 64 lane, ..., 64 lane + 63
  if (lane < kSplit / 64) {
    const int64_t key = row.k + 64 * lane;
    if (row.masked) visible = row_bits(p, row.sequence, row.b, row.h, row.q, key);
    if (drops) keep = keep_bits(dropout_of(p), row.b * p.hq + row.h, row.q, key);
  }
  A top = negative_infinity<A>();
  for (int n = lane; n < kSplit; n += 32) {
    const bool sees = (__shfl_sync(0xffffffffu, visible, n / 64) >> n % 64 & 1) != 0;
    if (n >= count) continue;
    s[n] = logit_of(p, row, 0, n, s[n], sees).value;
    top = max(top, s[n]);
  }
  top = is_softmax(p.score) ? warp_reduce(top, [](A x, A y) { return max(x, y); }) : A(0);
  const A shift = softmax_shift(top), exponent = exponent_factor<A>(p.score);
  A l = 0;
  for (int n = lane; n < kSplit; n += 32) {
    const bool keeps = (__shfl_sync(0xffffffffu, keep, n / 64) >> n % 64 & 1) != 0;
    if (n >= count) continue;
    const A e =
        is_softmax(p.score) ? exp2(exponent * (s[n] - shift)) : weight_at(p.score, s[n]).value;
    l += e;
    s[n] = drops ? (keeps ? e * static_cast<A>(p.dropout.scale) : A(0)) : e;
  }
  l = warp_reduce(l, [](A x, A y) { return x + y; });
  if (lane == 0) {
    partial[p.dv] = top;
    partial[p.dv + 1] = l;
  }
}

// O = P V of the split: each thread sums W columns over a subset of the keys; then threads with the
// same columns add their sums in order.
template <class K, int W>
__device__ __forceinline__ void multiply_values(const AttentionProblem& p,
                                                const SplitKeys<K>& stored, int count,
                                                const compute_t<K>* s, compute_t<K>* parts,
                                                compute_t<K>* partial) {
  using A = compute_t<K>;
  const int thread = static_cast<int>(threadIdx.x);
  const int width = threads_for(p.dv / W, kThreads), groups = kThreads / width;
  const int group = thread / width, column = thread % width;
  for (int64_t first = 0; first < p.dv; first += width * W) {
    const int64_t c = first + column * W;
    for (int r = 0; r < padded_rows(p); r += kRows) {
      A sum[kRows][W] = {};
      for (int n = group; c < p.dv && n < count; n += groups) {
        const Pack<K, W> value = load_constant<W>(stored.row(p.v, n) + c);
        const A factor = stored.factor(p.v_scale, n);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const A weight = s[(r + i) * kSplit + n] * factor;
#pragma unroll
          for (int j = 0; j < W; ++j) sum[i][j] += weight * element(value, j);
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < W; ++j) parts[(i * W + j) * kThreads + thread] = sum[i][j];
      }
      __syncthreads();
      for (int e = thread; e < kRows * W * width; e += kThreads) {
        const int i = e / (W * width), j = e / width % W, x = e % width;
        const int64_t to = first + x * W + j;
        if (to >= p.dv || r + i >= head_rows(p)) continue;
        A total = 0;
        for (int g = 0; g < groups; ++g) total += parts[(i * W + j) * kThreads + g * width + x];
        partial[(r + i) * partial_width(p) + to] = total;
      }
      __syncthreads();
    }
  }
}

// Requires that the pages of a split's keys exist.
__device__ __forceinline__ void require_pages(const AttentionProblem& p, int64_t b, int64_t first,
                                              int count) {
  if (p.pages.table == nullptr) return;
  const int64_t end = ceil_div(first + count, p.pages.size);
  for (int64_t n = first / p.pages.size + threadIdx.x; n < end; n += kThreads) {
    const int64_t page = p.pages.table[b * p.pages.stride_b + n];
    GPU_REQUIRE(page >= 0 && page < p.sequences.rows_k,
                "attention_cached: block_table must name pages of k and v");
  }
}

template <class T, class K, int W>
__global__ void __launch_bounds__(kThreads)
    attention_decode_kernel(const __grid_constant__ AttentionForwardParams params) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.problem;
  const DecodeShared<A> shared = shared_of<A>(p);
  const int64_t splits = key_splits(p), rows = head_rows(p);
  for (int64_t item = blockIdx.x; item < items(p); item += gridDim.x) {
    const int64_t split = item % splits, kv = item / splits % p.hkv, b = item / splits / p.hkv;
    const Sequence s = sequence_of(p, b);
    const int64_t key = split * kSplit, left = s.tk - key;
    if (left <= 0) continue;
    const int count = left < kSplit ? static_cast<int>(left) : kSplit;
    const auto head = [&](int64_t r) { return kv * group_size(p) + r / p.tq; };
    A* const partial = static_cast<A*>(params.workspace) + item * rows * partial_width(p);
    const SplitKeys<K> keys{p, s.entry, s.k + key, kv};
    require_pages(p, keys.entry, keys.first, count);

    for (int64_t i = threadIdx.x; i < padded_rows(p) * p.d; i += kThreads) {
      const int64_t r = i / p.d, c = i % p.d;
      const bool inside = r < rows && r % p.tq < s.tq;
      shared.q[i] = inside ? gpu::widen(row_of<T>(p.q, s.entry, s.q + r % p.tq, head(r))[c]) : A(0);
    }
    for (int64_t i = rows * kSplit + threadIdx.x; i < padded_rows(p) * kSplit; i += kThreads) {
      shared.s[i] = 0;
    }
    __syncthreads();
    multiply_keys<K, W>(p, keys, count, shared.q, shared.s);
    __syncthreads();
    for (int64_t r = threadIdx.x / 32; r < rows; r += kWarps) {
      const Tile row{s, b, head(r), r % p.tq, key, p.mask.count > 0};
      softmax_row(p, row, count, shared.s + r * kSplit, partial + r * partial_width(p));
    }
    __syncthreads();
    multiply_values<K, W>(p, keys, count, shared.s, shared.parts, partial);
    __syncthreads();
  }
}

// One block per row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    attention_merge_kernel(const __grid_constant__ AttentionForwardParams params) {
  using A = compute_t<T>;
  const AttentionProblem& p = params.problem;
  const int64_t rows = head_rows(p), step = rows * partial_width(p);
  for (int64_t row = blockIdx.x; row < merge_items(p); row += gridDim.x) {
    const int64_t q = row % p.tq, h = row / p.tq % p.hq, b = row / p.tq / p.hq;
    const Sequence s = sequence_of(p, b);
    if (q >= s.tq) continue;
    const int64_t kv = h / group_size(p), r = h % group_size(p) * p.tq + q;
    const A* const first = static_cast<const A*>(params.workspace) +
                           (b * p.hkv + kv) * key_splits(p) * step + r * partial_width(p);
    const int64_t splits = ceil_div(s.tk, kSplit);
    const A before = initial_maximum<A>(p, h);
    A m = before;
    for (int64_t n = 0; n < splits; ++n) m = max(m, first[n * step + p.dv]);
    const auto weight = [&](A top) {
      return exp2(exponent_factor<A>(p.score) * (top - softmax_shift(m)));
    };
    A l = softmax_initial_sum(before) * weight(before);
    for (int64_t n = 0; n < splits; ++n) {
      l += weight(first[n * step + p.dv]) * first[n * step + p.dv + 1];
    }
    T* const out = row_of<T>(params.out, s.entry, s.q + q, h);
    for (int64_t c = threadIdx.x; c < p.dv; c += kThreads) {
      A sum = 0;
      for (int64_t n = 0; n < splits; ++n) {
        sum += weight(first[n * step + p.dv]) * first[n * step + c];
      }
      out[c] = gpu::narrow<T>(sum * row_factor(p.score, l));
    }
    if (threadIdx.x == 0) {
      store_lse(params, row_index(p, s, h, q), row_lse(p.score, m, l, log(l)));
    }
  }
}

}  // namespace

bool takes_split_path(const AttentionProblem& p) {
  if (!takes_decode_path(p) || p.d > kMaxHead) return false;
  // Shared memory for the widest vectors: the other widths need less.
  const bool is_double = p.dtype == DType::f64;
  const auto bytes = p.is_int8
                         ? is_double ? shared_bytes<double, 16>(p) : shared_bytes<float, 16>(p)
                     : is_double ? shared_bytes<double, 2>(p)
                                 : shared_bytes<float, 8>(p);
  return static_cast<int64_t>(bytes) <= shared_memory_limit();
}

int64_t attention_decode_workspace(const AttentionProblem& p) {
  return items(p) * head_rows(p) * partial_width(p);
}

Status launch_attention_decode(const AttentionForwardParams& params, Stream stream) {
  const AttentionProblem& p = params.problem;
  const auto fits = [&](int width) {
    const auto rows_fit = [&](const HeadView& x) {
      return aligned_16(x.data) && x.stride_b % width == 0 && x.stride_t % width == 0 &&
             x.stride_h % width == 0;
    };
    return p.d % width == 0 && p.dv % width == 0 && rows_fit(p.k) && rows_fit(p.v);
  };
  dispatch(p.dtype, [&]<class T>(T) {
    using A = compute_t<T>;
    const auto launch = [&]<class K, int W>(K, Width<W>) {
      GPU_LAUNCH((attention_decode_kernel<T, K, W>), item_grid(items(p)), kThreads,
                 (shared_bytes<A, W>(p)), stream, params);
    };
    constexpr int kWide = kVectorWidth<T>, kCodes = kVectorWidth<Int8<A>>;
    if (p.is_int8) {
      fits(kCodes) ? launch(Int8<A>{}, Width<kCodes>{}) : launch(Int8<A>{}, Width<1>{});
    } else {
      fits(kWide) ? launch(T{}, Width<kWide>{}) : launch(T{}, Width<1>{});
    }
    GPU_LAUNCH(attention_merge_kernel<T>, item_grid(merge_items(p)), kThreads, 0, stream, params);
  });
  return launch_status();
}

}  // namespace omniattn
