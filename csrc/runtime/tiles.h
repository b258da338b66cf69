// The eight AMX tile registers, 16 rows of 64 bytes each, and products of pairs of bf16 or fp16
// (H):
//
//   C (16 x 16 fp32) += A (16 x 32 H) B,   B as 16 pairs of rows x 16 columns
//
// Without OMNIATTN_TILES, software does the same, equal to the hardware in every bit except NaN
// payloads: each element of C sums one chain of fused multiply-adds over the even terms and one
// over the odd terms, both from 0, and adds the sum to C. Rounding is to nearest even, and denormal
// fp32 operands and results count as 0, whatever MXCSR says. A denormal bf16 is a denormal fp32
// too; a denormal fp16 is not, and keeps its value (Intel SDM, TDPBF16PS and TDPFP16PS).
//
// A TileScope must be alive on the thread: leaf functions make one per call. It is not kept longer,
// because oneDNN configures the tiles of the same threads for itself.
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/assert.h"
#include "runtime/isa.h"
#include "runtime/vec.h"

namespace omniattn::OMNIATTN_ISA {

#if defined(OMNIATTN_PAIRS) && !defined(OMNIATTN_TILES)
// Scopes that are alive on this thread.
inline thread_local int tile_scopes = 0;
#endif

namespace {

struct NoTileScope {
  NoTileScope() {}
  ~NoTileScope() {}
  NoTileScope(const NoTileScope&) = delete;
};

#if defined(OMNIATTN_TILES)

struct alignas(64) TileConfiguration {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfiguration) == 64);

// Loading the configuration and releasing the tiles takes 141 cycles (Sapphire Rapids).
struct AmxScope {
  OMNIATTN_INLINE AmxScope() {
    static constexpr TileConfiguration kWhole = {
        1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    asm volatile("ldtilecfg %0" ::"m"(kWhole));
  }
  OMNIATTN_INLINE ~AmxScope() { asm volatile("tilerelease"); }
  AmxScope(const AmxScope&) = delete;
};

// Our own assembly: the macros of gcc 12 take no constant expressions as tile numbers, do not
// declare the memory they read and write, and lack fp16. Strides are in bytes.
struct TileRegisters {
  template <int kTile>
  OMNIATTN_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  template <int kTile>
  OMNIATTN_INLINE void load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
  }
  // Loads data that L1 need not keep. With plain loads a streamed operand evicts the resident one:
  // 1.6 instead of 2.3 TFLOP/s in a loop of 16 steps.
  template <int kTile>
  OMNIATTN_INLINE void load_once(const void* p, int64_t stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  OMNIATTN_INLINE void store(void* p, int64_t stride) const {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
  }
  template <class H, int kC, int kA, int kB>
  OMNIATTN_INLINE void multiply_add() {
    if constexpr (std::is_same_v<H, bf16>) {
      asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
    } else {  // tdpfp16ps, which binutils has from 2.40 on
      constexpr int kThirdOperand = (~kB & 15) << 3 | 3, kOthers = 0xc0 | kC << 3 | kA;
      asm volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" ::"i"(kThirdOperand), "i"(kOthers));
    }
  }
};

#elif defined(OMNIATTN_PAIRS)

struct AmxScope {
  AmxScope() { ++tile_scopes; }
  ~AmxScope() { --tile_scopes; }
  AmxScope(const AmxScope&) = delete;
};

struct TileRegisters {
  TileRegisters() {
    if (tile_scopes == 0) OMNIATTN_FAIL("tiles are used outside a TileScope");
  }
  template <int kTile>
  void zero() {
    __builtin_memset(tiles[kTile], 0, sizeof(tiles[kTile]));
  }
  template <int kTile>
  void load(const void* p, int64_t stride) {
    const char* const from = static_cast<const char*>(p);
    for (int r = 0; r < 16; ++r) __builtin_memcpy(tiles[kTile][r], from + r * stride, 64);
  }
  template <int kTile>
  void load_once(const void* p, int64_t stride) {
    load<kTile>(p, stride);
  }
  template <int kTile>
  void store(void* p, int64_t stride) const {
    char* const to = static_cast<char*>(p);
    for (int r = 0; r < 16; ++r) __builtin_memcpy(to + r * stride, tiles[kTile][r], 64);
  }
  template <class H, int kC, int kA, int kB>
  void multiply_add() {
    constexpr unsigned kFlushAndMaskAll = 0x9fc0, kRounding = 0x6000;
    const unsigned saved = _mm_getcsr();
    _mm_setcsr((saved & ~kRounding) | kFlushAndMaskAll);
    multiply_add_rows(tiles[kC], terms<H>(tiles[kA]), terms<H>(tiles[kB]));
    _mm_setcsr(saved);
  }

 private:
  using Tile = float[16][16];
  template <class H>
  using Terms = H[16][32];
  template <class H>
  static const Terms<H>& terms(const Tile& tile) {
    return reinterpret_cast<const Terms<H>&>(tile);
  }

  // Not inlined: no operation may move past the changes of MXCSR.
  template <class H>
  [[gnu::noinline]] static void multiply_add_rows(Tile& c, const Terms<H>& a, const Terms<H>& b) {
    VecF first[16], second[16];
    for (int k = 0; k < 16; ++k) {
      first[k] = first_terms<H>(load_pairs(b[k]));
      second[k] = second_terms<H>(load_pairs(b[k]));
    }
    for (int m = 0; m < 16; ++m) {
      VecF even(0.0f), odd(0.0f);
      for (int k = 0; k < 16; ++k) {
        even = fma(VecF(widen(a[m][2 * k])), first[k], even);
        odd = fma(VecF(widen(a[m][2 * k + 1])), second[k], odd);
      }
      OMNIATTN_ISA::store(c[m], OMNIATTN_ISA::load(c[m]) + (even + odd));
    }
  }

  alignas(64) Tile tiles[8];
};

#else

using AmxScope = NoTileScope;

#endif

using TileScope = std::conditional_t<multiplies_on_tiles(kIsa), AmxScope, NoTileScope>;

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
