// The step `rows` of recurrence_backward_cuda.cu on tensor cores: the gradients of q, k and g of a
// chunk, as on the CPU's tiles (recurrence_tiles_backward_cpu.cpp).
//
// A block has a chunk of one head, a warp kKeys / 4 channels of q and k. Gradients are transposed,
// with a row per channel. With in and out the decays from the start and to the end of the chunk,
// and dP and dN the gradients of scores times their decays:
//
//   dq^T = in scale S do^T + k^T dP^T     dk^T = out dS' u^T + in S de^T + q^T dP + k^T (dN + dN^T)
#include "kernels/recurrence/recurrence_backward_cuda.h"
#include "kernels/recurrence_mma/recurrence_mma_scores_cuda.h"

namespace omniattn {
namespace {

enum Reader { kGradO, kAdded, kProbe, kReaders };  // do, u and de

template <int kKeys>
struct RowsShared {
  bf16 q[kTokens * kKeys], k[kTokens * kKeys];
  union {
    bf16 rows[kReaders][2][kTokens * kPanel];   // pieces of a panel of columns of values
    bf16 scores[2][2][kTokens * kScoreStride];  // pieces of dP and dN
  };
  alignas(16) float between[kTokens * kFactorStride];
  float in[kTokens], beta[kTokens];
  float crossing[kTokens][kTokens + 1];  // shares of dg of pairs of tokens
  float entering[kWarps][kTokens], leaving[kWarps][kTokens], carried[kWarps];
};

template <int kKeys, bool kDelta>
struct RowsByMma {
  using Shared = RowsShared<kKeys>;
  using Columns = TokenOperand<kPanel>;
  static constexpr int kStrips = kKeys / 16 / kWarps;  // 16 channels each, of a warp
  static constexpr int kRead = kDelta ? kReaders : kProbe;

  const RecurrenceBackwardParams& params;
  const Found<float>& found;
  const Recurrence& p;
  const RecurrenceSequence& s;
  Shared& shared;
  const int64_t head;
  const int row = gpu::warp_id() % 2 * 16, pair = gpu::warp_id() / 2;  // of the warp's scores
  const int first = gpu::warp_id() * kStrips * 16;                     // channel of the warp
  const LanePlace lane{};
  float P[2][4] = {}, N[2][4] = {};  // scores: of all tiles up to the diagonal
  float dP[2][4] = {}, dN[2][4] = {};
  Tile met[kReaders][kStrips][kTiles] = {};  // S do^T, dS' u^T, S de^T
  float carried = 0;

  __device__ __forceinline__ bool is_lower() const { return 16 * pair <= row; }
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

  __device__ __forceinline__ void find_scores() {
    scores<1, kKeys>(P, shared.q, shared.k, row, pair);
    if constexpr (kDelta) scores<1, kKeys>(N, shared.k, shared.k, row, pair);
    each_score([&](int n, int e, int i, int j) {
      const float factor = shared.between[i * kFactorStride + j];
      P[n][e] = j <= i ? P[n][e] * factor : 0;
      if constexpr (kDelta) N[n][e] = j < i ? N[n][e] * factor : 0;
    });
  }

  // Stores pieces of the panel of columns from `column` on.
  template <class G>
  __device__ __forceinline__ void store_rows(int64_t column) const {
    using Rows = gpu::SharedRows<bf16, kPanel>;
    const int c = lane.lane * 2;
    const bool has_column = column + c < p.value_width;
    const TokenRows<G> grad_o(params.grad_o, s, head, column + c);
    const TokenRows<bf16> v(p.v, s, head, column + c);
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
  // sums += left times the pieces of a reader, two tokens' tiles.
  __device__ __forceinline__ void multiply(const Left<2>& left, Reader reader, int tokens, int step,
                                           float (&low)[4], float (&high)[4]) const {
    uint32_t b[4];
    Columns(shared.rows[reader][1]).load(b, tokens, step);
    left.multiply(b, low, high, 1);
    Columns(shared.rows[reader][0]).load(b, tokens, step);
    left.multiply(b, low, high);
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
        for (int i = 0; i < 8; ++i) carried += x[i / 4][i % 4] * dx[i / 4][i % 4];
        const Left<2> of_state(x[0], x[1]), of_dstate(dx[0], dx[1]);
#pragma unroll
        for (int n = 0; n < kTokenPairs; ++n) {
          const auto add = [&](const Left<2>& left, Reader reader) {
            multiply(left, reader, n, step, met[reader][m][2 * n], met[reader][m][2 * n + 1]);
          };
          add(of_state, kGradO);
          add(of_dstate, kAdded);
          if constexpr (kDelta) add(of_state, kProbe);
        }
      }
      if (is_lower()) {
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

  // Stores dP and dN with their decays, and their shares of dg.
  __device__ __forceinline__ void store_scores() {
    const float scale = static_cast<float>(p.scale);
    each_score([&](int n, int e, int i, int j) {
      dP[n][e] = j <= i ? scale * dP[n][e] : 0;
      float share = dP[n][e] * P[n][e];
      if constexpr (kDelta) {
        dN[n][e] = j < i ? dN[n][e] : 0;
        share += dN[n][e] * N[n][e];
      }
      if (j < i) shared.crossing[i][j] = share;
    });
    each_score([&](int n, int e, int i, int j) {
      if (e % 2 == 1) return;
      const float* const factor = shared.between + i * kFactorStride + j;
      const auto store = [&](const float (&x)[2][4], int which) {
        uint32_t pieces[2];
        split(x[n][e] * factor[0], x[n][e + 1] * factor[1], pieces);
#pragma unroll
        for (int a = 0; a < 2; ++a) {
          *reinterpret_cast<uint32_t*>(shared.scores[which][a] + i * kScoreStride + j) = pieces[a];
        }
      };
      store(dP, 0);
      if constexpr (kDelta) store(dN, 1);
    });
  }

  // Channels [channel, channel + 16) of rows of q or k as a left operand, transposed.
  __device__ __forceinline__ void load_channels(uint32_t (&a)[4], const bf16* rows, int channel,
                                                int step) const {
    using Rows = gpu::SharedRows<bf16, kKeys>;
    const int l = lane.lane;
    gpu::ldmatrix_x4_trans(
        a, rows + 16 * step * kKeys + Rows::offset(l / 16 * 8 + l % 8, channel / 8 + l / 8 % 2));
  }
  // sums += a times pieces of scores: of rows that are the results' tokens, or of their columns.
  template <bool kByRow>
  __device__ __forceinline__ void multiply_scores(const uint32_t (&a)[4], int which, int step,
                                                  int tokens, Tile (&sums)[kTiles]) const {
    if (!has_scores<kByRow>(step, tokens)) return;
#pragma unroll
    for (int n = 1; n >= 0; --n) {
      uint32_t b[4];
      load_scores<kByRow>(b, shared.scores[which][n], step, tokens);
      gpu::mma<bf16>(sums[2 * tokens], a, {b[0], b[1]});
      gpu::mma<bf16>(sums[2 * tokens + 1], a, {b[2], b[3]});
    }
  }

  // Finds the gradients of 16 channels and adds their shares of dg.
  __device__ __forceinline__ void finish_strip(int m, Tile (&entering)[kTiles],
                                               Tile (&leaving)[kTiles]) {
    const int channel = first + 16 * m;
    const float scale = static_cast<float>(p.scale);
    const float* const out = shared.between + (kTokens - 1) * kFactorStride;
    Tile q[kTiles], k[kTiles], dq[kTiles], dk[kTiles];
    load_columns<kKeys>(q, shared.q, channel);
    load_columns<kKeys>(k, shared.k, channel);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = token_of(n, i);
        dq[n][i] = met[kGradO][m][n][i] * (shared.in[token] * scale);
        const float key = met[kAdded][m][n][i] * out[token];
        float enters = q[n][i] * dq[n][i];
        dk[n][i] = key;
        if constexpr (kDelta) {
          const float probe = met[kProbe][m][n][i] * shared.in[token];
          enters += k[n][i] * probe;
          dk[n][i] += probe;
        }
        entering[n][i] += enters;
        leaving[n][i] += k[n][i] * key;
      }
    }
#pragma unroll
    for (int step = 0; step < kTokenPairs; ++step) {
      uint32_t of_q[4], of_k[4];
      load_channels(of_q, shared.q, channel, step);
      load_channels(of_k, shared.k, channel, step);
#pragma unroll
      for (int tokens = 0; tokens < kTokenPairs; ++tokens) {
        multiply_scores<true>(of_k, 0, step, tokens, dq);
        multiply_scores<false>(of_q, 0, step, tokens, dk);
        if constexpr (kDelta) {
          multiply_scores<true>(of_k, 1, step, tokens, dk);
          multiply_scores<false>(of_k, 1, step, tokens, dk);
        }
      }
    }
    const int64_t stride = p.value_heads * p.key_width, to = at(p.key_width) + channel;
    write_rows(dq, found.dq + to, stride, s.count, p.key_width - channel);
    write_rows(dk, found.dk + to, stride, s.count, p.key_width - channel);
  }

  // Sum over the rows of results, for each token.
  __device__ __forceinline__ void store_sums(const Tile (&x)[kTiles], float* to) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        float sum = x[n][b] + x[n][2 + b];
#pragma unroll
        for (int step = 4; step < kLanes; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (lane.g == 0) to[8 * n + 2 * lane.t + b] = sum;
      }
    }
  }

  // dg_t is the sum of the shares that cross token t; one warp computes it for all tokens.
  __device__ __forceinline__ void write_dg() const {
    const int t = lane.lane;
    float sum = 0;
    for (int i = kTokens - 1; i >= 0; --i) {
      if (i > t) sum += shared.crossing[i][t];
      shared.crossing[i][t] = i > t ? sum : 0;
    }
    __syncwarp();
    float dg = 0, enters = 0, leaves = 0, all = 0;
    for (int j = 0; j < kTokens; ++j) dg += shared.crossing[t][j];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      enters += shared.entering[w][t];
      leaves += shared.leaving[w][t];
      all += shared.carried[w];
    }
    const float own = leaves;
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      const float later = __shfl_down_sync(0xffffffffu, enters, step);
      const float earlier = __shfl_up_sync(0xffffffffu, leaves, step);
      if (t + step < kLanes) enters += later;
      if (t >= step) leaves += earlier;
    }
    dg += all * shared.in[kTokens - 1] + (leaves - own) + enters;
    if (t < s.count) static_cast<float*>(params.dg)[at(1) + t * p.value_heads] = dg;
  }

  __device__ __forceinline__ void run() {
    const int64_t key_head = p.key_head_of(head);
    TokenRows<bf16>(p.q, s, key_head).template copy<kKeys>(shared.q, 0, s.count, p.key_width);
    TokenRows<bf16>(p.k, s, key_head).template copy<kKeys>(shared.k, 0, s.count, p.key_width);
    gpu::cp_async_commit();
    const float w = exp(TokenRows<float>(p.g, s, head).of_lane(0, s.count, 0));
    set_decays(shared, w, TokenRows<float>(p.beta, s, head).of_lane(0, s.count, 1));
    gpu::cp_async_wait<0>();
    __syncthreads();
    find_scores();
    const int64_t place = (s.slot * p.value_heads + head) * p.key_width * p.value_width;
    for (int64_t column = 0; column < p.value_width; column += kPanel) {
      __syncthreads();  // all warps have used the panel before
      if (p.o_dtype != p.dtype) {
        store_rows<float>(column);
      } else {
        store_rows<bf16>(column);
      }
      __syncthreads();
      panel(static_cast<const float*>(params.states) + place, found.dstates + place, column);
    }
    __syncthreads();
    if (is_lower()) store_scores();
    __syncthreads();
    Tile entering[kTiles], leaving[kTiles];
    gpu::clear(entering);
    gpu::clear(leaving);
#pragma unroll
    for (int m = 0; m < kStrips; ++m) finish_strip(m, entering, leaving);
    if (params.dg == nullptr) return;
    store_sums(entering, shared.entering[gpu::warp_id()]);
    store_sums(leaving, shared.leaving[gpu::warp_id()]);
    carried = warp_sum(carried);
    if (lane.lane == 0) shared.carried[gpu::warp_id()] = carried;
    __syncthreads();
    if (gpu::warp_id() == 0) write_dg();
  }
};

// Blocks: value heads of slots.
template <int kKeys, bool kDelta>
__global__ void __launch_bounds__(kThreads, 2)
    recurrence_rows_mma_kernel(const __grid_constant__ RecurrenceBackwardParams params,
                               const __grid_constant__ Found<float> found) {
  const Recurrence& p = params.recurrence;
  const RecurrenceSequence s = chunk_of_slot(p, blockIdx.x / p.value_heads);
  if (s.count == 0) return;
  RowsByMma<kKeys, kDelta>{.params = params,
                           .found = found,
                           .p = p,
                           .s = s,
                           .shared = *gpu::dynamic_shared<RowsShared<kKeys>>(),
                           .head = blockIdx.x % p.value_heads}
      .run();
}

template <int kKeys>
void launch(const RecurrenceBackwardParams& params, const Found<float>& found, int64_t chunks,
            Stream stream) {
  constexpr size_t kBytes = sizeof(RowsShared<kKeys>);
  if (params.recurrence.delta) {
    GPU_LAUNCH((recurrence_rows_mma_kernel<kKeys, true>), blocks(chunks), kThreads, kBytes, stream,
               params, found);
  } else {
    GPU_LAUNCH((recurrence_rows_mma_kernel<kKeys, false>), blocks(chunks), kThreads, kBytes, stream,
               params, found);
  }
}

}  // namespace

void launch_recurrence_rows_mma(const RecurrenceBackwardParams& params, void* memory,
                                Stream stream) {
  const Recurrence& p = params.recurrence;
  const int64_t chunks = p.sequences == 0 ? 0 : recurrence_slots(p) * p.value_heads;
  if (chunks == 0 || p.key_width == 0) return;
  const Found<float> found(p, memory);
  p.key_width <= 64 ? launch<64>(params, found, chunks, stream)
                    : launch<128>(params, found, chunks, stream);
}

}  // namespace omniattn
