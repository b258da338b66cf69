// Elementwise random draws on CUDA, see random.h: each thread draws two blocks of four words for
// eight elements.
#include "kernels/random/random.h"

#include "runtime/gpu_row.h"

namespace omniattn {
namespace {

using gpu::Pack;

constexpr unsigned kThreads = 256;
constexpr int kElements = 8;  // per thread

// A seed in GPU memory is read here, so that a captured graph can have another seed in each replay.
template <class Params>
__device__ __forceinline__ ElementStream stream_of(const Params& p) {
  if (p.seed == nullptr) return p.stream;
  return {philox_key(p.seed[0]), static_cast<uint32_t>(p.seed[1])};
}

struct ElementWords {
  PhiloxWords half[2];

  __device__ __forceinline__ uint32_t operator[](int j) const { return half[j / 4].word[j % 4]; }
};

// Calls f(first element, words) for this thread's elements; the grid loops over all elements.
template <class F>
__device__ __forceinline__ void for_elements(const ElementStream& stream, int64_t n, const F& f) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x * kElements;
  int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kElements;
  for (; i < n; i += step) {
    const auto group = static_cast<uint64_t>(i) / 4;
    f(i, ElementWords{{element_words(stream, group), element_words(stream, group + 1)}});
  }
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(const __grid_constant__ DropoutParams p) {
  using C = compute_t<T>;
  const T* const x = static_cast<const T*>(p.x);
  T* const y = static_cast<T*>(p.y);
  const auto scale = static_cast<C>(p.scale);
  const auto map = [&](C value, uint32_t word) {
    return gpu::narrow<T>(word >= p.threshold ? value * scale : C(0));
  };
  for_elements(stream_of(p), p.n, [&](int64_t i, const ElementWords& words) {
    if (kAligned && i + kElements <= p.n) {
      const auto from = gpu::load_constant<kElements>(x + i);
      Pack<T, kElements> to;
#pragma unroll
      for (int j = 0; j < kElements; ++j) to.v[j] = map(from[j], words[j]);
      gpu::store(y + i, to);
    } else {
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        if (i + j < p.n) y[i + j] = map(gpu::widen(x[i + j]), words[j]);
      }
    }
  });
}

__global__ void __launch_bounds__(kThreads)
    uniform_kernel(const __grid_constant__ UniformParams p) {
  for_elements(stream_of(p), p.n, [&](int64_t i, const ElementWords& words) {
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      if (i + j < p.n) p.y[i + j] = uniform_of(words[j]);
    }
  });
}

unsigned grid_of(int64_t n) {
  constexpr int64_t kMaxGrid = 0x7fffffff, kPerBlock = kThreads * kElements;
  return static_cast<unsigned>(min((n + kPerBlock - 1) / kPerBlock, kMaxGrid));
}

}  // namespace

Status launch_dropout(const DropoutParams& p, Stream stream) {
  if (p.n == 0) return nullptr;
  dispatch(p.dtype, [&]<class T>(T) {
    if (gpu::aligned_16(p.x) && gpu::aligned_16(p.y)) {
      GPU_LAUNCH((dropout_kernel<T, true>), grid_of(p.n), kThreads, 0, stream, p);
    } else {
      GPU_LAUNCH((dropout_kernel<T, false>), grid_of(p.n), kThreads, 0, stream, p);
    }
  });
  return gpu::launch_status();
}

Status launch_uniform(const UniformParams& p, Stream stream) {
  if (p.n == 0) return nullptr;
  GPU_LAUNCH((uniform_kernel), grid_of(p.n), kThreads, 0, stream, p);
  return gpu::launch_status();
}

}  // namespace omniattn
