// The CUDA names that kernels use, for g++: with this folder first in the include path, this header
// replaces csrc/runtime/gpu.h.
#pragma once

#include <math.h>  // with the float overloads in the global namespace

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "emulator/block.h"
#include "runtime/dtype.h"
#include "runtime/stream.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define GPU_NOINLINE [[gnu::noinline]] inline
#define __launch_bounds__(...)
#define __grid_constant__

#define threadIdx (::omniattn::emulator::block().current->index)
#define blockIdx (::omniattn::emulator::block().index)
#define blockDim (::omniattn::emulator::block().size)
#define gridDim (::omniattn::emulator::block().grid)

// Defaults to the source position of the caller.
#define OMNIATTN_HERE \
  const ::omniattn::emulator::Location& where = ::omniattn::emulator::Location::current()

using std::max;
using std::min;

template <class T>
inline T __ldg(const T* p) {
  return *p;
}
inline float __fdividef(float x, float y) { return x / y; }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline int __popc(uint32_t x) { return std::popcount(x); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<uint32_t>(x)) + 1; }
inline int __clz(int x) { return std::countl_zero(static_cast<uint32_t>(x)); }

// One OS thread runs everything, so a plain addition is atomic. Hidden from the race checker on
// purpose.
template <class T>
__attribute__((no_sanitize("thread"))) inline T atomicAdd(T* address, T value) {
  const T old = *address;
  *address = old + value;
  return old;
}

inline void __syncthreads(OMNIATTN_HERE) {
  using namespace omniattn::emulator;
  const dim3 size = block().size;
  barrier(0, static_cast<int>(size.x * size.y * size.z), true, "__syncthreads", where);
}

inline void __syncwarp(uint32_t mask = ~0u, OMNIATTN_HERE) {
  using namespace omniattn::emulator;
  uint32_t slot = mask;
  collective(
      mask, "__syncwarp", &slot,
      [](const Slots&) {
        const Thread& t = *block().current;
        if (observer != nullptr) observer->warp_synchronised(t.warp, t.mask);
      },
      where);
}

namespace omniattn::emulator {

template <class T>
struct Shuffle {
  T value, result;
  int source;
};

template <class T>
T shuffle(uint32_t mask, T value, int source, const char* operation, const Location& where) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  Shuffle<T> slot{value, value, source};
  collective(
      mask, operation, &slot,
      [](const Slots& slots) {
        for (void* const s : slots) {
          if (s == nullptr) continue;
          auto& lane = *static_cast<Shuffle<T>*>(s);
          const void* const from = slots[static_cast<size_t>(lane.source)];
          if (from == nullptr)
            fail(text(block().current->operation, " reads a lane outside its mask"));
          lane.result = static_cast<const Shuffle<T>*>(from)->value;
        }
      },
      where);
  return slot.result;
}

inline int lane() { return block().current->lane; }

}  // namespace omniattn::emulator

template <class T>
inline T __shfl_sync(uint32_t mask, T value, int source, int width = 32, OMNIATTN_HERE) {
  const int base = omniattn::emulator::lane() & ~(width - 1);
  return omniattn::emulator::shuffle(mask, value, base | (source & (width - 1)), "__shfl_sync",
                                     where);
}
template <class T>
inline T __shfl_xor_sync(uint32_t mask, T value, int bits, int width = 32, OMNIATTN_HERE) {
  const int lane = omniattn::emulator::lane(), source = lane ^ bits;
  const bool inside = source <= (lane | (width - 1));
  return omniattn::emulator::shuffle(mask, value, inside ? source : lane, "__shfl_xor_sync", where);
}
template <class T>
inline T __shfl_down_sync(uint32_t mask, T value, int delta, int width = 32, OMNIATTN_HERE) {
  const int lane = omniattn::emulator::lane(), source = lane + delta;
  const bool inside = source <= (lane | (width - 1));
  return omniattn::emulator::shuffle(mask, value, inside ? source : lane, "__shfl_down_sync",
                                     where);
}
template <class T>
inline T __shfl_up_sync(uint32_t mask, T value, int delta, int width = 32, OMNIATTN_HERE) {
  const int lane = omniattn::emulator::lane(), source = lane - delta;
  const bool inside = source >= (lane & ~(width - 1));
  return omniattn::emulator::shuffle(mask, value, inside ? source : lane, "__shfl_up_sync", where);
}

inline uint32_t __ballot_sync(uint32_t mask, int predicate, OMNIATTN_HERE) {
  using namespace omniattn::emulator;
  uint32_t slot = predicate != 0;
  collective(
      mask, "__ballot_sync", &slot,
      [](const Slots& slots) {
        uint32_t votes = 0;
        for (size_t i = 0; i < slots.size(); ++i) {
          if (slots[i] != nullptr) votes |= *static_cast<uint32_t*>(slots[i]) << i;
        }
        for (void* const s : slots) {
          if (s != nullptr) *static_cast<uint32_t*>(s) = votes;
        }
      },
      where);
  return slot;
}
inline int __any_sync(uint32_t mask, int predicate, OMNIATTN_HERE) {
  return __ballot_sync(mask, predicate, where) != 0;
}
inline int __all_sync(uint32_t mask, int predicate, OMNIATTN_HERE) {
  return __ballot_sync(mask, predicate, where) == mask;
}

// A shared array of the block; each declaration and template instantiation is a separate array.
#define GPU_SHARED(T, name, n)                                                       \
  T(&name)                                                                           \
  [n] = *[]() -> T(*)[n] {                                                           \
    static char key;                                                                 \
    return reinterpret_cast<T(*)[n]>(                                                \
        ::omniattn::emulator::block().shared.array(&key, #name, sizeof(T[n])).data); \
  }()

#define GPU_REQUIRE(condition, message)                                 \
  ((condition) ? void()                                                 \
               : ::omniattn::emulator::fail(::omniattn::emulator::text( \
                     message, ", required at ",                         \
                     ::omniattn::emulator::position(::omniattn::emulator::Location::current()))))

// Runs at once; the stream is ignored.
#define GPU_LAUNCH(kernel, grid, threads, shared_bytes, stream, ...) \
  (static_cast<void>(stream),                                        \
   ::omniattn::emulator::launch((grid), (threads), (shared_bytes), [&] { kernel(__VA_ARGS__); }))

namespace omniattn::gpu {

inline int64_t shared_memory_limit() { return static_cast<int64_t>(emulator::shared_memory_limit); }

inline Status launch_status() { return nullptr; }  // errors are thrown

template <class T>
T* dynamic_shared() {
  const emulator::SharedArray* const a = emulator::block().dynamic;
  return a != nullptr ? reinterpret_cast<T*>(a->data) : nullptr;
}

// The fragments of the PTX manual: lane 4g + t holds rows g and g + 8 of A (16 x K), and columns 2t
// and 2t + 1 of the same rows of C (16 x 8).
struct MmaOperands {
  float* d;
  const uint32_t *a, *b;
};

template <int K>
inline void multiply(const emulator::Slots& slots, float (&a)[16][K], float (&b)[K][8]) {
  for (int lane = 0; lane < 32; ++lane) {
    float* const d = static_cast<MmaOperands*>(slots[static_cast<size_t>(lane)])->d;
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + 8 * (i / 2), col = 2 * (lane % 4) + i % 2;
      for (int k = 0; k < K; ++k) d[i] += a[row][k] * b[k][col];
    }
  }
}

template <class Half>
inline void mma_16(const emulator::Slots& slots) {
  float a[16][16], b[16][8];
  const auto part = [](uint32_t pair, int high) {
    return omniattn::widen(Half{static_cast<uint16_t>(pair >> 16 * high)});
  };
  for (int lane = 0; lane < 32; ++lane) {
    const auto& in = *static_cast<MmaOperands*>(slots[static_cast<size_t>(lane)]);
    const int g = lane / 4, t = lane % 4;
    for (int high = 0; high < 2; ++high) {
      for (int i = 0; i < 4; ++i)
        a[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + high] = part(in.a[i], high);
      for (int i = 0; i < 2; ++i) b[2 * t + 8 * i + high][g] = part(in.b[i], high);
    }
  }
  multiply<16>(slots, a, b);
}

inline void mma_8(const emulator::Slots& slots) {
  float a[16][8], b[8][8];
  const auto tf32 = [](uint32_t bits) { return std::bit_cast<float>(bits & 0xffffe000u); };
  for (int lane = 0; lane < 32; ++lane) {
    const auto& in = *static_cast<MmaOperands*>(slots[static_cast<size_t>(lane)]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) a[g + 8 * (i % 2)][t + 4 * (i / 2)] = tf32(in.a[i]);
    for (int i = 0; i < 2; ++i) b[t + 4 * i][g] = tf32(in.b[i]);
  }
  multiply<8>(slots, a, b);
}

inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], OMNIATTN_HERE) {
  MmaOperands slot{d, a, b};
  emulator::collective(~0u, "mma.bf16", &slot, mma_16<bf16>, where);
}
inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], OMNIATTN_HERE) {
  MmaOperands slot{d, a, b};
  emulator::collective(~0u, "mma.f16", &slot, mma_16<f16>, where);
}
inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], OMNIATTN_HERE) {
  MmaOperands slot{d, a, b};
  emulator::collective(~0u, "mma.tf32", &slot, mma_8, where);
}
inline uint32_t to_tf32(float x) {  // rounds half away from zero
  return (std::bit_cast<uint32_t>(x) + 0x1000u) & 0xffffe000u;
}

struct MatrixRow {
  uint32_t* r;
  const uint16_t* p;
};

// Lane l gives the address of row l % 8 of matrix l / 8 and receives two adjacent elements of each.
template <bool kTransposed>
inline void load_matrices(const emulator::Slots& slots) {
  const auto element = [&](int matrix, int row, int col) -> uint32_t {
    return static_cast<MatrixRow*>(slots[static_cast<size_t>(8 * matrix + row)])->p[col];
  };
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = 2 * (lane % 4);
    for (int m = 0; m < 4; ++m) {
      const uint32_t low = kTransposed ? element(m, t, g) : element(m, g, t);
      const uint32_t high = kTransposed ? element(m, t + 1, g) : element(m, g, t + 1);
      static_cast<MatrixRow*>(slots[static_cast<size_t>(lane)])->r[m] = low | high << 16;
    }
  }
}

__forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row, OMNIATTN_HERE) {
  emulator::require_shared_16(row, "ldmatrix", where);
  emulator::touch(row, 16, false);
  MatrixRow slot{r, static_cast<const uint16_t*>(row)};
  emulator::collective(~0u, "ldmatrix", &slot, load_matrices<false>, where);
}
__forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, OMNIATTN_HERE) {
  emulator::require_shared_16(row, "ldmatrix.trans", where);
  emulator::touch(row, 16, false);
  MatrixRow slot{r, static_cast<const uint16_t*>(row)};
  emulator::collective(~0u, "ldmatrix.trans", &slot, load_matrices<true>, where);
}

inline void store_16(void* global, const uint4& x, OMNIATTN_HERE) {
  emulator::require_global_16(global, "st.global.v4", where);
  *static_cast<uint4*>(global) = x;
}

__forceinline__ void cp_async_16(void* shared, const void* global, bool valid = true,
                                 OMNIATTN_HERE) {
  emulator::copy_async(shared, global, valid, where);
}
inline void cp_async_commit() { emulator::commit_copies(); }
template <int kPending>
inline void cp_async_wait() {
  emulator::wait_copies(kPending);
}

inline void barrier_sync(int id, int count, OMNIATTN_HERE) {
  emulator::barrier(id, count, true, "bar.sync", where);
}
inline void barrier_arrive(int id, int count, OMNIATTN_HERE) {
  emulator::barrier(id, count, false, "bar.arrive", where);
}

using omniattn::narrow;
using omniattn::widen;

inline int opaque(int x) { return x; }
template <class T>
inline uint32_t pack(float low, float high) {
  return narrow<T>(low).bits | static_cast<uint32_t>(narrow<T>(high).bits) << 16;
}

inline float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;  // ex2.approx.ftz
}

}  // namespace omniattn::gpu

#undef OMNIATTN_HERE
