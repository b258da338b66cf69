// Copies keys and values of sequences from their pages (see PageView), or from rows of int8 with
// their factors, to rows of dtype, which the other kernels read.
#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/attention_tile_cuda.h"
#include "runtime/dispatch.h"
#include "runtime/int8.h"

namespace omniattn {
namespace {

using namespace gpu;

constexpr int kThreads = 256;

// to is (B, Tk, Hkv, width); rows past the end of a sequence are not written.
template <class T>
__global__ void __launch_bounds__(kThreads)
    attention_gather_rows_kernel(const __grid_constant__ AttentionProblem p,
                                 const __grid_constant__ HeadView from,
                                 const __grid_constant__ HeadView factors, int64_t width, T* to) {
  const int64_t count = p.batch * p.tk * p.hkv * width;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t n = blockIdx.x * int64_t{kThreads} + threadIdx.x; n < count; n += step) {
    const int64_t c = n % width, h = n / width % p.hkv, row = n / width / p.hkv;
    const int64_t b = row / p.tk, t = row % p.tk;
    if (t >= sequence_of(p, b).tk) continue;
    if (p.pages.table != nullptr) {
      const int64_t page = p.pages.table[b * p.pages.stride_b + t / p.pages.size];
      GPU_REQUIRE(page >= 0 && page < p.sequences.rows_k,
                  "attention_cached: block_table must name pages of k and v");
    }
    const int64_t at = key_offset(p, from, b, t) + h * from.stride_h + c;
    if (p.is_int8) {
      using A = compute_t<T>;
      const int64_t at_factor = key_offset(p, factors, b, t) + h * factors.stride_h;
      const A factor = static_cast<const A*>(factors.data)[at_factor];
      to[n] = gpu::narrow<T>(omniattn::widen(static_cast<const Int8<A>*>(from.data)[at]) * factor);
    } else {
      to[n] = static_cast<const T*>(from.data)[at];
    }
  }
}

}  // namespace

Status launch_attention_gather_rows(const AttentionProblem& p, const HeadView& from,
                                    const HeadView& factors, int64_t width, void* to,
                                    Stream stream) {
  const int64_t count = p.batch * p.tk * p.hkv * width;
  if (count == 0) return nullptr;
  dispatch(p.dtype, [&]<class T>(T) {
    GPU_LAUNCH(attention_gather_rows_kernel<T>, item_grid(ceil_div(count, kThreads)), kThreads, 0,
               stream, p, from, factors, width, static_cast<T*>(to));
  });
  return launch_status();
}

}  // namespace omniattn
