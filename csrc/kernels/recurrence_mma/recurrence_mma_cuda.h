// Recurrences in chunks on tensor cores (mma.sync m16n8k16): operands and states.
//
// A block has a panel of kPanel columns of values of one head, a warp 16 of them. Left operands are
// transposed, with a row per column of values: the state S^T (16, K) stays in the registers of its
// warp, and results of products are left operands of the next ones. Right operands are rows of q
// and k in shared memory, and the scores of a chunk. With in and out the decays from its start and
// to its end:
//
//   u^T        solves a triangular system (delta), from in S^T k^T; else beta v^T
//   o^T = in S^T q^T + u^T P^T        S^T <- end S^T + (out u)^T k
//
// One decay for all channels is factored out of the products of rows, as written above, and q and k
// are factors as they are (recurrence_mma_scores_cuda.h), a number of f16 as the sum of two of
// bf16. A decay per channel is a part of the rows: in q, in k and out k
// (recurrence_mma_channels_cuda.h). As on the CPU's tiles, a number of fp32 is a sum of pieces of
// bf16: two of them for what is rounded later, with an error below 2^-16, and three, which are
// exact, for what is added to a state. Every factor of a decay is a product of some exp(g).
#pragma once

#include "kernels/recurrence/recurrence_cuda.h"
#include "runtime/gpu_mma.h"

namespace omniattn {
namespace {

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
// Stores the pieces of a number, `distance` elements from one to the next.
template <int kPieces>
__device__ __forceinline__ void store_pieces(float x, bf16* to, int distance) {
#pragma unroll
  for (int i = 0; i + 1 < kPieces; ++i, to += distance) {
    *to = {static_cast<uint16_t>(bits_of(x) >> 16)};
    x = rest_of(x);
  }
  *to = gpu::narrow<bf16>(x);
}
// Two numbers of 16 bits.
template <class T>
__device__ __forceinline__ void unpack(uint32_t x, float& low, float& high) {
  low = gpu::widen(T{static_cast<uint16_t>(x)});
  high = gpu::widen(T{static_cast<uint16_t>(x >> 16)});
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
  // sums += this times a right operand of two tiles of 8 columns, whose pieces load(b, piece)
  // loads. Products below those of the last piece of this with a first one are left out.
  template <int kRight, class F>
  __device__ __forceinline__ void multiply(float (&first)[4], float (&second)[4],
                                           const F& load) const {
#pragma unroll
    for (int piece = kRight - 1; piece >= 0; --piece) {
      uint32_t b[4];
      load(b, piece);
#pragma unroll
      for (int n = kPieces - 1 - piece; n >= 0; --n) {
        gpu::mma<bf16>(first, a[n], {b[0], b[1]});
        gpu::mma<bf16>(second, a[n], {b[2], b[3]});
      }
    }
  }
};

// Place of a lane in results: columns 2 t and 2 t + 1 of rows g and g + 8.
struct LanePlace {
  int lane = lane_index(), g = lane / 4, t = lane % 4;
};

// True for f16: a number is the sum of two pieces, which are made where it is loaded.
template <class T>
constexpr bool kIsSplit = TypeTraits<T>::kDType == DType::f16;
// Replaces numbers of f16 by one of their pieces.
template <class T>
__device__ __forceinline__ void take_piece(uint32_t (&x)[4], int piece) {
  if constexpr (kIsSplit<T>) {
#pragma unroll
    for (uint32_t& both : x) {
      float low, high;
      unpack<T>(both, low, high);
      uint32_t pieces[2];
      split(low, high, pieces);
      both = pieces[piece];
    }
  }
}

// Rows in shared memory; those of bf16 in kCount pieces, kDistance elements apart.
template <class T, int kKeys, int kCount = 1, int kDistance = 0>
struct TokenOperand {
  using Rows = gpu::SharedRows<T, kKeys>;
  static constexpr int kPieces = kIsSplit<T> ? 2 : kCount;
  const T* rows;
  int by_term, by_token;

  __device__ __forceinline__ explicit TokenOperand(const T* from) : rows(from) {
    const int lane = lane_index();
    by_term = Rows::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    by_token = Rows::offset(lane % 16, lane / 16);
  }
  // Two tiles of 8 tokens as columns, with terms [16 step, 16 step + 16) of K.
  __device__ __forceinline__ void load(uint32_t (&b)[4], int pair, int step, int piece = 0) const {
    const T* const from = rows + piece * kDistance + 16 * pair * kKeys;
    if constexpr (kIsSplit<T>) __syncwarp();  // delays later loads, which would take registers
    gpu::ldmatrix_x4(b, from + (gpu::opaque(by_term) ^ 16 * step));
    take_piece<T>(b, piece);
  }
  // Two tiles of 8 columns of K, with tokens [16 step, 16 step + 16) as terms.
  __device__ __forceinline__ void load_keys(uint32_t (&b)[4], int pair, int step,
                                            int piece = 0) const {
    const T* const from = rows + piece * kDistance + 16 * step * kKeys;
    if constexpr (kIsSplit<T>) __syncwarp();
    gpu::ldmatrix_x4_trans(b, from + (gpu::opaque(by_token) ^ 16 * pair));
    take_piece<T>(b, piece);
  }
};

using Tile = float[4];  // 16 x 8 results, of which a lane has four

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
  // By a factor of each channel.
  __device__ __forceinline__ void decay(const float* factors) {
    const float* const own = factors + 2 * LanePlace().t;
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i) {
      const float2 factor = *reinterpret_cast<const float2*>(own + 8 * i);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        x[i][2 * half] *= factor.x;
        x[i][2 * half + 1] *= factor.y;
      }
    }
  }
  // sums[n] = S^T rows[n]^T
  template <class Operand, int N, int kTiles>
  __device__ __forceinline__ void read(const Operand (&rows)[N], Tile (&sums)[N][kTiles]) const {
#pragma unroll
    for (int n = 0; n < N; ++n) gpu::clear(sums[n]);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      const Left<2> left(x[2 * step], x[2 * step + 1]);
#pragma unroll
      for (int pair = 0; pair < kTiles / 2; ++pair) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          left.template multiply<Operand::kPieces>(
              sums[n][2 * pair], sums[n][2 * pair + 1],
              [&](uint32_t (&b)[4], int piece) { rows[n].load(b, pair, step, piece); });
        }
      }
    }
  }
  // S^T += u^T rows
  template <class Operand, int kTiles>
  __device__ __forceinline__ void add(const Tile (&u)[kTiles], const Operand& rows) {
#pragma unroll
    for (int step = 0; step < kTiles / 2; ++step) {
      const Left<3> left(u[2 * step], u[2 * step + 1]);
#pragma unroll
      for (int pair = 0; pair < kKeys / 16; ++pair) {
        left.template multiply<Operand::kPieces>(
            x[2 * pair], x[2 * pair + 1],
            [&](uint32_t (&b)[4], int piece) { rows.load_keys(b, pair, step, piece); });
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
  // Starts the copy of a chunk; of `count` tokens and `width` columns, the others are zeros. Rows
  // of 16 bits become operands.
  template <int kWidth, int kTokens>
  __device__ __forceinline__ void copy(T* to, int64_t t, int64_t count, int64_t width) const {
    constexpr int kPiece = 16 / sizeof(T), kPieces = kWidth / kPiece, kStep = kThreads / kPieces;
    constexpr bool kOperand = kPiece == 8;
    static_assert(kThreads % kPieces == 0 && kTokens % kStep == 0);
    static_assert(kStep % 8 == 0 || !kOperand);
    const int thread = static_cast<int>(threadIdx.x), first = thread / kPieces;
    const int c = thread % kPieces;
    const int offset =
        kOperand ? gpu::SharedRows<T, kWidth>::offset(first, c) : first * kWidth + kPiece * c;
    T* const place = to + gpu::opaque(offset);
    const int64_t left = kPiece * c < width ? count - t - first : 0, stride = hidden(step);
    const T* from = at(t) + first * stride + kPiece * c;
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
template <int kWidth, class T, int kTiles>
__device__ __forceinline__ void load_columns(Tile (&v)[kTiles], const T* rows, int first) {
  const int lane = lane_index(), piece = first / 8 + lane / 16;
  const int at = gpu::opaque(gpu::SharedRows<T, kWidth>::offset(lane % 16, piece));
#pragma unroll
  for (int pair = 0; pair < kTiles / 2; ++pair) {
    uint32_t x[4];  // tile 2 pair and the next, of columns g; both, of columns g + 8
    gpu::ldmatrix_x4_trans(x, rows + at + 16 * pair * kWidth);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* const to = v[2 * pair + i % 2] + i / 2 * 2;
      unpack<T>(x[i], to[0], to[1]);
    }
  }
}

// Loads the columns of values of this warp.
template <class T, int kTiles>
__device__ __forceinline__ void load_values(Tile (&v)[kTiles], const T* rows) {
  load_columns<kPanel>(v, rows, 16 * gpu::warp_id());
}

// Writes rows of 16 columns, of which `width` exist, through `memory` of kPanel columns for whole
// pieces of 16 bytes.
template <class T, int kTiles>
__device__ __forceinline__ void write_rows(const Tile (&x)[kTiles], T* memory, T* to,
                                           int64_t stride, int64_t count, int64_t width) {
  using Rows = gpu::SharedRows<T, kPanel>;
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
      memory[at] = gpu::narrow<T>(x[n][i]);
    }
  }
  __syncwarp();
  const int token = lane.lane / 2, half = lane.lane % 2;
  const int from_memory = Rows::offset(token, piece + half);
#pragma unroll
  for (int n = 0; n < 8 * kTiles; n += 16) {
    if (token + n < count && 8 * half < width) {
      gpu::store_16(to + (token + n) * stride + 8 * half,
                    *reinterpret_cast<const uint4*>(memory + from_memory + n * kPanel));
    }
  }
}
// In fp32.
template <int kTiles>
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
