// The step `rows` of recurrence_backward_cuda.cu on tensor cores: the gradients of q, k and g of a
// chunk, as on the CPU's tiles (recurrence_tiles_backward_cpu.cpp).
//
// A block has a chunk of one head, a warp kKeys / 4 channels of q and k. Gradients are transposed,
// with a row per channel. With in and out the decays from the start and to the end of the chunk,
// and dP and dN the gradients of scores times their decays:
//
//   dq^T = in scale S do^T + k^T dP^T     dk^T = out dS' u^T + in S de^T + q^T dP + k^T (dN + dN^T)
#pragma once

#include "kernels/recurrence/recurrence_backward_cuda.h"
#include "kernels/recurrence_mma/recurrence_mma.h"
#include "kernels/recurrence_mma/recurrence_mma_panel_cuda.h"

namespace omniattn {
namespace {

enum Reader { kGradO, kAdded, kProbe, kReaders };  // do, u and de

// Computes the products over columns of values. SharedMemory has kTokens, q, k, beta, and `rows`
// for pieces of a panel of columns; kChannels: `carried` is one sum per channel, else one in all.
template <class T, int kKeys, bool kDelta, bool kChannels, class SharedMemory>
struct RowProducts {
  using Shared = SharedMemory;
  using Columns = TokenOperand<bf16, kPanel>;
  static constexpr int kTokens = Shared::kTokens, kTiles = kTokens / 8;
  static constexpr int kStrips = kKeys / 16 / kWarps;  // 16 channels each, of a warp
  static constexpr int kRead = kDelta ? kReaders : kProbe;
  static constexpr bool kOneScore = kTokens == 16;  // scores are one tile of a warp

  const RecurrenceBackwardParams& params;
  const Found<float>& found;
  const Recurrence& p;
  const RecurrenceSequence& s;
  Shared& shared;
  const int64_t head;
  const int row = kOneScore ? 0 : gpu::warp_id() % 2 * 16;  // of the warp's scores
  const int pair = kOneScore ? 0 : gpu::warp_id() / 2;
  const int first = gpu::warp_id() * kStrips * 16;  // channel of the warp
  const LanePlace lane{};
  float dP[2][4] = {}, dN[2][4] = {};
  Tile met[kReaders][kStrips][kTiles] = {};         // S do^T, dS' u^T, S de^T
  float carried[kChannels ? 2 * kStrips : 1] = {};  // S dS', of channels g and g + 8 of a strip

  __device__ __forceinline__ bool has_scores() const {
    return kOneScore ? gpu::warp_id() == 0 : 16 * pair <= row;
  }
  __device__ __forceinline__ int64_t at(int64_t width) const {
    return ((s.batch * p.steps + s.begin) * p.value_heads + head) * width;
  }

  // Calls f(tile, element, i, j) for this lane's scores.
  template <class F>
  __device__ __forceinline__ void each_score(const F& f) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        f(n, e, row + lane.g + e / 2 * 8, 16 * pair + 8 * n + 2 * lane.t + e % 2);
      }
    }
  }

  // Stores pieces of the panel of columns from `column` on.
  template <class G>
  __device__ __forceinline__ void store_rows(int64_t column) const {
    using Rows = gpu::SharedRows<bf16, kPanel>;
    const int c = lane.lane * 2;
    const bool has_column = column + c < p.value_width;
    const TokenRows<G> grad_o(params.grad_o, s, head, column + c);
    const TokenRows<T> v(p.v, s, head, column + c);
    const int64_t stride = p.value_heads * p.value_width, place = at(p.value_width) + column + c;
#pragma unroll 2
    for (int token = gpu::warp_id(); token < kTokens; token += kWarps) {
      float x[kReaders][2] = {};
      if (has_column && token < s.count) {
        const float beta = shared.beta[token];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int64_t from = place + token * stride + i;
          if (grad_o.data != nullptr) x[kGradO][i] = gpu::widen(grad_o.at(token)[i]);
          x[kAdded][i] = beta * (kDelta ? found.error[from] : gpu::widen(v.at(token)[i]));
          if constexpr (kDelta) x[kProbe][i] = -beta * found.du[from];
        }
      }
      const int to = Rows::offset(token, c / 8) + c % 8;
#pragma unroll
      for (int r = 0; r < kRead; ++r) {
        uint32_t pieces[2];
        split(x[r][0], x[r][1], pieces);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          *reinterpret_cast<uint32_t*>(shared.rows[r][n] + to) = pieces[n];
        }
      }
    }
  }

  // Two columns of two channels g and g + 8 of a state at column `column`, and the same at the next
  // 8 columns.
  __device__ __forceinline__ void load_state(const float* state, int channel, int64_t column,
                                             float (&low)[4], float (&high)[4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t r = channel + lane.g + 8 * half;
      const float* const from = state + r * p.value_width + column + 2 * lane.t;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float* const to = (i == 0 ? low : high) + 2 * half;
        const bool has = r < p.key_width && column + 8 * i < p.value_width;
        const float2 x = has ? *reinterpret_cast<const float2*>(from + 8 * i) : float2{0, 0};
        to[0] = x.x, to[1] = x.y;
      }
    }
  }
  // Adds the products of a panel of columns of values.
  __device__ __forceinline__ void panel(const float* state, const float* dstate, int64_t column) {
#pragma unroll 1
    for (int step = 0; step < kPanel / 16; ++step) {
#pragma unroll
      for (int m = 0; m < kStrips; ++m) {
        float x[2][4], dx[2][4];
        load_state(state, first + 16 * m, column + 16 * step, x[0], x[1]);
        load_state(dstate, first + 16 * m, column + 16 * step, dx[0], dx[1]);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& sum = carried[kChannels ? 2 * m + i % 4 / 2 : 0];
          sum += x[i / 4][i % 4] * dx[i / 4][i % 4];
        }
        const Left<2> of_state(x[0], x[1]), of_dstate(dx[0], dx[1]);
#pragma unroll
        for (int n = 0; n < kTiles / 2; ++n) {
          const auto add = [&](const Left<2>& left, Reader reader) {
            left.template multiply<2>(met[reader][m][2 * n], met[reader][m][2 * n + 1],
                                      [&](uint32_t (&b)[4], int piece) {
                                        Columns(shared.rows[reader][piece]).load(b, n, step);
                                      });
          };
          add(of_state, kGradO);
          add(of_dstate, kAdded);
          if constexpr (kDelta) add(of_state, kProbe);
        }
      }
      if (has_scores()) {
        add_score_gradients(kGradO, step, dP);
        if constexpr (kDelta) add_score_gradients(kProbe, step, dN);
      }
    }
  }
  // sums += rows u^T of the warp's scores.
  __device__ __forceinline__ void add_score_gradients(Reader reader, int step,
                                                      float (&sums)[2][4]) const {
    const int from = gpu::SharedRows<bf16, kPanel>::offset(row + lane.lane % 16, lane.lane / 16);
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      uint32_t left[4];
      gpu::ldmatrix_x4(left, shared.rows[reader][a] + (from ^ 16 * step));
#pragma unroll
      for (int n = 0; n < 2 - a; ++n) {
        uint32_t b[4];
        Columns(shared.rows[kAdded][n]).load(b, pair, step);
        gpu::mma<bf16>(sums[0], left, {b[0], b[1]});
        gpu::mma<bf16>(sums[1], left, {b[2], b[3]});
      }
    }
  }

  // Adds the products of all columns of values.
  __device__ __forceinline__ void multiply_columns() {
    const int64_t place = (s.slot * p.value_heads + head) * p.key_width * p.value_width;
    for (int64_t column = 0; column < p.value_width; column += kPanel) {
      __syncthreads();  // all warps have used the panel before
      if (p.o_dtype != p.dtype) {
        store_rows<float>(column);
      } else {
        store_rows<T>(column);
      }
      __syncthreads();
      panel(static_cast<const float*>(params.states) + place, found.dstates + place, column);
    }
    __syncthreads();
  }
};

}  // namespace
}  // namespace omniattn
