#include "runtime/dispatch.h"
#include "runtime/gemm_tile.h"
#include "runtime/probe.h"
#include "runtime/vec_trig.h"
#if defined(OMNIATTN_PAIRS)
#include "runtime/tile_product.h"
#endif

namespace omniattn::OMNIATTN_ISA {
namespace {

// SIMD functions.

// As dispatch. Vectors of double exist on every level with all kernels, though its kernels may not.
template <class F>
OMNIATTN_INLINE void dispatch_vectors(DType dtype, const F& f) {
  if constexpr (has_all_kernels(kIsa)) {
    if (dtype == DType::f64) return f(double{});
  }
  dispatch(dtype, f);
}

template <class T, class F>
void map_elements(const T* x, T* y, int64_t n, const F& f) {
  constexpr int64_t kWidth = Vec<compute_t<T>>::kWidth;
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(y + i, f(load(x + i)));
  store_n(y + i, f(load_n(x + i, n - i)), n - i);
}

template <class T>
void map_function(VecFunction function, const T* x, T* y, int64_t n) {
  using V = Vec<compute_t<T>>;
  switch (function) {
    case VecFunction::copy:
      return map_elements(x, y, n, [](V v) { return v; });
    case VecFunction::exp:
      return map_elements(x, y, n, [](V v) { return exp(v); });
    case VecFunction::exp2:
      return map_elements(x, y, n, [](V v) { return exp2(v); });
    case VecFunction::log:
      return map_elements(x, y, n, [](V v) { return log(v); });
    case VecFunction::tanh:
      return map_elements(x, y, n, [](V v) { return tanh(v); });
    case VecFunction::normal:
      return map_elements(x, y, n, [](V v) { return normal(v).below; });
    case VecFunction::sigmoid:
      return map_elements(x, y, n, [](V v) { return sigmoid(v); });
    case VecFunction::sqrt:
      return map_elements(x, y, n, [](V v) { return sqrt(v); });
    case VecFunction::round:
      return map_elements(x, y, n, [](V v) { return round(v); });
    case VecFunction::floor:
      return map_elements(x, y, n, [](V v) { return floor(v); });
    case VecFunction::abs:
      return map_elements(x, y, n, [](V v) { return abs(v); });
    case VecFunction::negate:
      return map_elements(x, y, n, [](V v) { return -v; });
    case VecFunction::sin:
      return map_elements(x, y, n, [](V v) { return sincos(v).sin; });
    case VecFunction::cos:
      return map_elements(x, y, n, [](V v) { return sincos(v).cos; });
  }
}

void map_any(VecFunction f, DType dtype, const void* x, void* y, int64_t n) {
  dispatch_vectors(
      dtype, [&]<class T>(T) { map_function(f, static_cast<const T*>(x), static_cast<T*>(y), n); });
}

void reduce_any(DType dtype, const void* x, int64_t n, double* sum, double* maximum) {
  dispatch_vectors(dtype, [&]<class T>(T) {
    using V = Vec<compute_t<T>>;
    const T* const p = static_cast<const T*>(x);
    V total = load(p), largest = total;
    for (int64_t i = V::kWidth; i < n; i += V::kWidth) {
      total += load(p + i);
      largest = max(largest, load(p + i));
    }
    *sum = reduce_add(total);
    *maximum = reduce_max(largest);
  });
}

// Tiles.

DType operand_of(DType storage) {
  DType operand = storage;
  dispatch(storage, [&]<class S>(S) { operand = TypeTraits<operand_t<S>>::kDType; });
  return operand;
}

int64_t packed_bytes(DType storage, int64_t k, int64_t n) {
  int64_t bytes = 0;
  dispatch(storage, [&]<class S>(S) {
    using T = operand_t<S>;
    bytes = packed_elements<T>(k, n) * static_cast<int64_t>(sizeof(T));
  });
  return bytes;
}

void pack_any(const TileProbe& p) {
  dispatch(p.dtype, [&]<class S>(S) {
    auto* const packed = static_cast<operand_t<S>*>(p.packed);
    const S* const b = static_cast<const S*>(p.b);
    if (p.b_layout == BLayout::packed_rows) pack_b(b, p.ldb, p.k, p.n, packed);
    if (p.b_layout == BLayout::packed_transposed) pack_bt(b, p.ldb, p.k, p.n, packed);
  });
}

template <class T>
void tile(const TileProbe& p) {
  const T* const a = static_cast<const T*>(p.a);
  auto* const c = static_cast<compute_t<T>*>(p.c);
  const Panels<T> b = p.b_layout == BLayout::rows
                          ? row_panels(static_cast<const T*>(p.b), p.ldb)
                          : packed_panels(static_cast<const T*>(p.packed), p.k);
  if (p.a_transposed) {
    gemm_tile<T, ALayout::kTransposed>(a, p.lda, b, c, p.ldc, p.m, p.n, p.k, p.accumulate);
  } else {
    gemm_tile<T>(a, p.lda, b, c, p.ldc, p.m, p.n, p.k, p.accumulate);
  }
}

void tile_any(const TileProbe& p, int64_t repeats) {
  const TileScope tiles;
  for (; repeats > 0; --repeats) {
    dispatch(p.dtype, [&]<class S>(S) { tile<operand_t<S>>(p); });
  }
}

// Peak rates.

// Keeps the compiler from merging or dropping the operations of a probe.
template <class T>
OMNIATTN_INLINE void keep_in_register(Vec<T>& x) {
#if defined(__aarch64__)
  asm volatile("" : "+w"(x.v));
#elif defined(OMNIATTN_WIDE_VECTORS)  // no register holds such a vector
  asm volatile("" : "+m"(x.v));
#else
  asm volatile("" : "+v"(x.v));
#endif
}

// Uses as many accumulators as a tile, so that the same units and latencies bound the probe.
template <class T>
double multiply_adds(int64_t rounds) {
  using Op = Operand<T>;
  using Acc = Vec<compute_t<T>>;
  const T one[2] = {narrow<T>(1), narrow<T>(0)};
  typename Op::B a = Op::broadcast(one), b = a;
  Acc acc[kTileAccumulators];
#pragma GCC unroll 24
  for (Acc& sum : acc) sum = zero<compute_t<T>>();
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 24
    for (Acc& sum : acc) {
      sum = Op::multiply_add(a, b, sum);
      keep_in_register(sum);
    }
  }
  return 2.0 * Op::kStep * Acc::kWidth * kTileAccumulators * static_cast<double>(rounds);
}

#if defined(OMNIATTN_PAIRS)
// Products of tiles whose operands come from L1, as in tile_product.h: the upper bound for 32 x 32
// blocks. Operands are random, since products with zero are faster, by 25 % on Sapphire Rapids.
template <class H>
[[maybe_unused]] double tile_multiply_adds(int64_t rounds) {
  constexpr int64_t kSteps = 8;  // 16 KiB of A and of B
  alignas(64) H a[kSteps * 2 * kTileElements], b[kSteps * 2 * kTileElements];
  alignas(64) float c[kStripRows * kStripRows];
  uint32_t bits = 1;
  for (H* const operand : {a, b}) {
    for (int64_t i = 0; i < kSteps * 2 * kTileElements; ++i) {
      bits = bits * 1664525u + 1013904223u;
      // 0.5 to 2 as bf16, 1.75 to 2 as fp16
      operand[i].bits = static_cast<uint16_t>((bits >> 16 & 0x80ffu) | 0x3f00u);
    }
  }
  const TileScope scope;
  const BlockProduct<H> product{packed_tiles(a), packed_tiles(b), {},     kSteps,
                                false,           false,           nullptr};
  for (int64_t i = 0; i < rounds; ++i) multiply_block<1, 2, 2>(product, c, kStripRows);
  return 2.0 * kSteps * kTileTerms * kStripRows * kStripRows * static_cast<double>(rounds);
}
#endif

double multiply_adds_any(DType operand, int64_t rounds) {
  double flops = 0;
  dispatch_vectors(operand, [&]<class S>(S) {
#if defined(OMNIATTN_PAIRS)
    if constexpr (kOnTiles) {
      flops = tile_multiply_adds<S>(rounds);
      return;
    }
#endif
    if constexpr (!kOnTiles && std::is_same_v<S, operand_t<S>>) flops = multiply_adds<S>(rounds);
  });
  return flops;
}

float read(const float* x, int64_t n) {
  VecF sums[8];
  for (VecF& sum : sums) sum = zero<float>();
  for (int64_t i = 0; i + 8 * VecF::kWidth <= n; i += 8 * VecF::kWidth) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) sums[j] += load(x + i + j * VecF::kWidth);
  }
  VecF total = zero<float>();
  for (const VecF& sum : sums) total += sum;
  return reduce_add(total);
}

void triad(float* a, const float* b, const float* c, float s, int64_t n, bool non_temporal) {
  if (non_temporal) {
    for (int64_t i = 0; i + VecF::kWidth <= n; i += VecF::kWidth) {
      stream(a + i, fma(VecF(s), load(c + i), load(b + i)));
    }
    stream_fence();
  } else {
    for (int64_t i = 0; i + VecF::kWidth <= n; i += VecF::kWidth) {
      store(a + i, fma(VecF(s), load(c + i), load(b + i)));
    }
  }
}

}  // namespace

extern const ProbeKernels probe_kernels_table;
const ProbeKernels probe_kernels_table{
    operand_of, packed_bytes,      map_any, reduce_any, pack_any,
    tile_any,   multiply_adds_any, read,    triad,
};

}  // namespace omniattn::OMNIATTN_ISA
