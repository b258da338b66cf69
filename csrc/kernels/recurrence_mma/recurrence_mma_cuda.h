// Recurrences in chunks on tensor cores (mma.sync m16n8k16) for bf16 inputs, with one decay for all
// channels or none: operands and states.
//
// A block has a panel of kPanel columns of values of one head, a warp 16 of them. Left operands are
// transposed, with a row per column of values: the state S^T (16, K) stays in the registers of its
// warp, and results of products are left operands of the next ones. Right operands are rows of q
// and k, as they lie in shared memory, and the scores of a chunk. With in and out the decays from
// its start and to its end:
//
//   u^T        solves a triangular system (delta), from in S^T k^T; else beta v^T
//   o^T = in S^T q^T + u^T P^T        S^T <- end S^T + (out u)^T k
//
// q, k and v are factors without conversion. As on the CPU's tiles, a number of fp32 is a sum of
// pieces of bf16: two of them for what is rounded later, with an error below 2^-16, and three,
// which are exact, for what is added to a state. Every factor of a decay is a product of some
// exp(g).
#pragma once

#include "kernels/recurrence/recurrence_cuda.h"
#include "runtime/gpu_mma.h"

namespace omniattn {
namespace {

constexpr int kTokens = 32;  // of a chunk
static_assert(recurrence_chunk(false) == kTokens && kTokens == kLanes);
constexpr int kPanel = 16 * kWarps;  // columns of values of a block

// Hides a stride, so that the compiler does not keep multiples of it in registers for all chunks.
__device__ __forceinline__ int64_t hidden(int64_t stride) {
  const auto low = static_cast<uint32_t>(gpu::opaque(static_cast<int>(stride)));
  return static_cast<int64_t>(gpu::opaque(static_cast<int>(stride >> 32))) << 32 | low;
}

// Pieces. The first ones are truncated: a rounded one of the largest numbers would be infinite.
__device__ __forceinline__ uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
__device__ __forceinline__ float of_bits(uint32_t x) { return __builtin_bit_cast(float, x); }
__device__ __forceinline__ float rest_of(float x) { return x - of_bits(bits_of(x) & 0xffff0000u); }
template <int kPieces>
__device__ __forceinline__ void split(float x, float y, uint32_t (&to)[kPieces]) {
#pragma unroll
  for (int i = 0; i + 1 < kPieces; ++i) {
    to[i] = bits_of(x) >> 16 | (bits_of(y) & 0xffff0000u);
    x = rest_of(x), y = rest_of(y);
  }
  to[kPieces - 1] = gpu::pack<bf16>(x, y);
}

// 16 x 16 elements in pieces as a left operand, from two tiles in the layout of results.
template <int kPieces>
struct Left {
  uint32_t a[kPieces][4];

  __device__ __forceinline__ Left(const float (&low)[4], const float (&high)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const from = i < 2 ? low : high;
      uint32_t pieces[kPieces];
      split(from[i % 2 * 2], from[i % 2 * 2 + 1], pieces);
#pragma unroll
      for (int n = 0; n < kPieces; ++n) a[n][i] = pieces[n];
    }
  }
  // sums += this times a right operand of two tiles of 8 columns.
  __device__ __forceinline__ void multiply(const uint32_t (&b)[4], float (&first)[4],
                                           float (&second)[4], int pieces = kPieces) const {
#pragma unroll
    for (int n = kPieces - 1; n >= 0; --n) {
      if (n >= pieces) continue;
      gpu::mma<bf16>(first, a[n], {b[0], b[1]});
      gpu::mma<bf16>(second, a[n], {b[2], b[3]});
    }
  }
};

// Place of a lane in results: columns 2 t and 2 t + 1 of rows g and g + 8.
struct LanePlace {
  int lane = lane_index(), g = lane / 4, t = lane % 4;
};

// Rows of q or k in shared memory.
template <int kKeys>
struct TokenOperand {
  using Rows = gpu::SharedRows<bf16, kKeys>;
  const bf16* rows;
  int by_term, by_token;

  __device__ __forceinline__ explicit TokenOperand(const bf16* from) : rows(from) {
    const int lane = lane_index();
    by_term = Rows::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    by_token = Rows::offset(lane % 16, lane / 16);
  }
  // Two tiles of 8 tokens as columns, with terms [16 step, 16 step + 16) of K.
  __device__ __forceinline__ void load(uint32_t (&b)[4], int pair, int step) const {
    gpu::ldmatrix_x4(b, rows + 16 * pair * kKeys + (gpu::opaque(by_term) ^ 16 * step));
  }
  // Two tiles of 8 columns of K, with tokens [16 step, 16 step + 16) as terms.
  __device__ __forceinline__ void load_keys(uint32_t (&b)[4], int pair, int step) const {
    gpu::ldmatrix_x4_trans(b, rows + 16 * step * kKeys + (gpu::opaque(by_token) ^ 16 * pair));
  }
};

using Tile = float[4];               // 16 x 8 results, of which a lane has four
constexpr int kTiles = kTokens / 8;  // tiles of 16 columns of values, transposed
constexpr int kTokenPairs = kTiles / 2;

// Token and column of element i of tile n of transposed results.
__device__ __forceinline__ int token_of(int n, int i) {
  return 8 * n + lane_index() % 4 * 2 + i % 2;
}
__device__ __forceinline__ int column_of(int i) { return i / 2 * 8 + lane_index() / 4; }

// S^T of 16 columns of values, or its gradient, from column `first` on.
template <int kKeys>
struct PanelState {
  const Recurrence& p;
  const int64_t head, first;
  float x[kKeys / 8][4] = {};

  // Calls f(element, the same element of state n of (.., Hv, K, V)) for this lane's elements.
  template <class X, class F>
  __device__ __forceinline__ void each(X* states, int64_t n, const F& f) {
    const LanePlace lane;
    const int64_t width = hidden(p.value_width);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t column = first + 8 * half;
      if (column >= width) continue;
      X* at = states + ((n * p.value_heads + head) * p.key_width + 2 * lane.t) * width + column +
              lane.g;
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i, at += 8 * width) {
        if (8 * i >= p.key_width) break;
        f(x[i][2 * half], at[0]);
        f(x[i][2 * half + 1], at[width]);
      }
    }
  }
  // Loads the state; null: zeros.
  __device__ __forceinline__ void load(const void* states, int64_t n) {
    if (states == nullptr) return;
    each(static_cast<const float*>(states), n, [](float& to, float from) { to = from; });
  }
  __device__ __forceinline__ void store(void* states, int64_t n) {
    if (states == nullptr) return;
    each(static_cast<float*>(states), n, [](float from, float& to) { to = from; });
  }
  __device__ __forceinline__ void decay(float factor) {
#pragma unroll
    for (Tile& tile : x) {
#pragma unroll
      for (float& element : tile) element *= factor;
    }
  }
  // sums[n] = S^T rows[n]^T
  template <int N>
  __device__ __forceinline__ void read(const TokenOperand<kKeys> (&rows)[N],
                                       Tile (&sums)[N][kTiles]) const {
#pragma unroll
    for (int n = 0; n < N; ++n) gpu::clear(sums[n]);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      const Left<2> left(x[2 * step], x[2 * step + 1]);
#pragma unroll
      for (int pair = 0; pair < kTokenPairs; ++pair) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          uint32_t b[4];
          rows[n].load(b, pair, step);
          left.multiply(b, sums[n][2 * pair], sums[n][2 * pair + 1]);
        }
      }
    }
  }
  // S^T += u^T rows
  __device__ __forceinline__ void add(const Tile (&u)[kTiles], const TokenOperand<kKeys>& rows) {
#pragma unroll
    for (int step = 0; step < kTokenPairs; ++step) {
      const Left<3> left(u[2 * step], u[2 * step + 1]);
#pragma unroll
      for (int pair = 0; pair < kKeys / 16; ++pair) {
        uint32_t b[4];
        rows.load_keys(b, pair, step);
        left.multiply(b, x[2 * pair], x[2 * pair + 1]);
      }
    }
  }
};

// Rows of a head's tensor from the first token of a sequence on.
template <class T>
struct TokenRows {
  const T* data;
  int64_t step;

  __device__ TokenRows(const StepView& x, const RecurrenceSequence& s, int64_t head,
                       int64_t column = 0)
      : data(static_cast<const T*>(x.data)), step(x.step) {
    if (data != nullptr) data += s.batch * x.batch + s.begin * x.step + head * x.head + column;
  }
  __device__ __forceinline__ const T* at(int64_t t) const { return data + t * step; }
  // Starts the copy of a chunk; of `count` tokens and `width` columns, the others are zeros.
  template <int kWidth>
  __device__ __forceinline__ void copy(T* to, int64_t t, int64_t count, int64_t width) const {
    constexpr int kPieces = kWidth / 8, kStep = kThreads / kPieces;
    static_assert(kThreads % kPieces == 0 && kTokens % kStep == 0 && kStep % 8 == 0);
    const int thread = static_cast<int>(threadIdx.x), first = thread / kPieces;
    const int c = thread % kPieces;
    T* const place = to + gpu::opaque(gpu::SharedRows<T, kWidth>::offset(first, c));
    const int64_t left = 8 * c < width ? count - t - first : 0, stride = hidden(step);
    const T* from = at(t) + first * stride + 8 * c;
#pragma unroll
    for (int r = 0; r < kTokens; r += kStep, from += kStep * stride) {
      gpu::cp_async_16(place + r * kWidth, r < left ? from : data, r < left);
    }
  }
  // Value of this lane's token; `absent` without a tensor, 0 past the last token.
  __device__ __forceinline__ float of_lane(int64_t t, int64_t count, float absent) const {
    const int64_t i = t + lane_index();
    return i < 0 || i >= count ? 0.0f : data == nullptr ? absent : *at(i);
  }
};

// Columns [first, first + 16) of all tokens, transposed, in the layout of results.
template <int kWidth>
__device__ __forceinline__ void load_columns(Tile (&v)[kTiles], const bf16* rows, int first) {
  const int lane = lane_index(), piece = first / 8 + lane / 16;
  const int at = gpu::opaque(gpu::SharedRows<bf16, kWidth>::offset(lane % 16, piece));
#pragma unroll
  for (int pair = 0; pair < kTokenPairs; ++pair) {
    uint32_t x[4];  // tile 2 pair and the next, of columns g; both, of columns g + 8
    gpu::ldmatrix_x4_trans(x, rows + at + 16 * pair * kWidth);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * pair + i % 2][i / 2 * 2] = of_bits(x[i] << 16);
      v[2 * pair + i % 2][i / 2 * 2 + 1] = of_bits(x[i] & 0xffff0000u);
    }
  }
}

// Loads the columns of values of this warp.
__device__ __forceinline__ void load_values(Tile (&v)[kTiles], const bf16* rows) {
  load_columns<kPanel>(v, rows, 16 * gpu::warp_id());
}

// Writes rows of 16 columns, of which `width` exist, through `memory` of kPanel columns for whole
// pieces of 16 bytes.
__device__ __forceinline__ void write_rows(const Tile (&x)[kTiles], bf16* memory, bf16* to,
                                           int64_t stride, int64_t count, int64_t width) {
  using Rows = gpu::SharedRows<bf16, kPanel>;
  const LanePlace lane;
  const int piece = 2 * gpu::warp_id();
  stride = hidden(stride);
  __syncwarp();
  const int to_memory = gpu::opaque(Rows::offset(2 * lane.t, piece) + lane.g);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // The next token and the next piece differ in one bit of the swizzled place.
      const int at = (to_memory ^ (i % 2 ^ i / 2) * 8) + (8 * n + i % 2) * kPanel;
      memory[at] = gpu::narrow<bf16>(x[n][i]);
    }
  }
  __syncwarp();
  const int token = lane.lane / 2, half = lane.lane % 2;
  const int from_memory = Rows::offset(token, piece + half);
#pragma unroll
  for (int n = 0; n < kTokens; n += 16) {
    if (token + n < count && 8 * half < width) {
      gpu::store_16(to + (token + n) * stride + 8 * half,
                    *reinterpret_cast<const uint4*>(memory + from_memory + n * kPanel));
    }
  }
}
// In fp32.
__device__ __forceinline__ void write_rows(const Tile (&x)[kTiles], float* to, int64_t stride,
                                           int64_t count, int64_t width) {
  stride = hidden(stride);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = token_of(n, i), column = column_of(i);
      if (token < count && column < width) to[token * stride + column] = x[n][i];
    }
  }
}

}  // namespace
}  // namespace omniattn
