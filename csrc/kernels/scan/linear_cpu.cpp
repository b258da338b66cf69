// The linear scan on the CPU, see linear.h: step by step over a block of channels, whose states
// stay in L1 and whose vectors hide each other's latencies.
#include "kernels/scan/linear.h"

#include "runtime/assert.h"
#include "runtime/denormals.h"
#include "runtime/dispatch.h"
#include "runtime/row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// A block of the channels of one sequence.
template <class T>
struct Block {
  using C = compute_t<T>;
  const LinearScan& p;
  int64_t n, first, width;
  ScanSequence s;

  Block(const LinearScan& scan, int64_t item) : p(scan) {
    const int64_t blocks = ceil_div(p.channels, p.block);
    n = item / blocks;
    first = item % blocks * p.block;
    width = smaller(p.block, p.channels - first);
    s = scan_sequence(p.rows, n);
  }
  template <class R>
  const R* row(const ScanView& x, int64_t t) const {
    return x.row<R>(s.batch, s.begin + t) + first;
  }
  template <class R>
  R* row(void* x, int64_t t) const {
    return static_cast<R*>(x) + (s.batch * p.rows.steps + s.begin + t) * p.channels + first;
  }
  // Row i of (.., C).
  C* of(void* x, int64_t i) const { return static_cast<C*>(x) + i * p.channels + first; }
  const C* of(const void* x, int64_t i) const {
    return static_cast<const C*>(x) + i * p.channels + first;
  }
  // Copies a row, or zeros if `from` is null.
  void copy(C* to, const C* from) const {
    for_row<C>(width, [&](int64_t i, auto part) {
      part.store(to + i, from == nullptr ? Vec<C>(C(0)) : part.load(from + i));
    });
  }
  const C* of_or_null(const void* x, int64_t i) const { return x == nullptr ? nullptr : of(x, i); }
};

template <class T>
void forward_block(const LinearScanParams& params, compute_t<T>* state, int64_t item) {
  using C = compute_t<T>;
  const Block<T> b(params.scan, item);
  b.copy(state, b.of_or_null(b.p.initial_state, b.n));
  for (int64_t t = 0; t < b.s.count; ++t) {
    if (params.states != nullptr && t % kScanChunk == 0) {
      b.copy(b.of(params.states, b.s.slot + t / kScanChunk), state);
    }
    const T* const x = b.template row<T>(b.p.x, t);
    const C* const g = b.template row<C>(b.p.g, t);
    T* const y = b.template row<T>(params.y, t);
    for_row<C>(b.width, [&](int64_t i, auto part) {
      const auto h = fma(exp(part.load(g + i)), part.load(state + i), part.load(x + i));
      part.store(state + i, h);
      part.store(y + i, h);
    });
  }
  b.copy(b.of(params.final_state, b.n), state);
}

// Memory of the backward: the gradient of a state, the decay of each step of a chunk and the part
// of its state that it keeps.
template <class C>
struct BackwardMemory {
  static constexpr int64_t kRows = 2 + 2 * kScanChunk;
  C* memory;
  int64_t block;

  OMNIATTN_INLINE C* gradient() const { return memory; }
  OMNIATTN_INLINE C* state() const { return memory + block; }
  OMNIATTN_INLINE C* decay(int64_t j) const { return memory + (2 + 2 * j) * block; }
  OMNIATTN_INLINE C* kept(int64_t j) const { return memory + (3 + 2 * j) * block; }
};

// Computes the decays of the steps [t, end) of a chunk and the parts of states that they keep.
template <class T, class C = compute_t<T>>
void recompute_chunk(const LinearScanBackwardParams& params, const Block<T>& b,
                     const BackwardMemory<C>& memory, int64_t t, int64_t end) {
  b.copy(memory.state(), b.of(params.states, b.s.slot + t / kScanChunk));
  for (int64_t j = 0; t + j < end; ++j) {
    const T* const x = b.template row<T>(b.p.x, t + j);
    const C* const g = b.template row<C>(b.p.g, t + j);
    for_row<C>(b.width, [&](int64_t i, auto part) {
      const auto decay = exp(part.load(g + i)), kept = decay * part.load(memory.state() + i);
      part.store(memory.decay(j) + i, decay);
      part.store(memory.kept(j) + i, kept);
      part.store(memory.state() + i, kept + part.load(x + i));
    });
  }
}

template <class T>
void backward_block(const LinearScanBackwardParams& params, compute_t<T>* room, int64_t item) {
  using C = compute_t<T>;
  const Block<T> b(params.scan, item);
  const BackwardMemory<C> memory{room, b.p.block};
  C* const gradient = memory.gradient();
  b.copy(gradient, b.of_or_null(params.grad_final_state, b.n));
  const int64_t last = b.s.count - 1;
  for (int64_t t = last / kScanChunk * kScanChunk; t >= 0 && last >= 0; t -= kScanChunk) {
    const int64_t end = smaller(t + kScanChunk, b.s.count);
    if (params.dg != nullptr) recompute_chunk<T>(params, b, memory, t, end);
    for (int64_t j = end - t - 1; j >= 0; --j) {
      const T* const dy = b.template row<T>(params.grad_y, t + j);
      T* const dx = b.template row<T>(params.dx, t + j);
      const C* const g = b.template row<C>(b.p.g, t + j);
      C* const dg = params.dg == nullptr ? nullptr : b.template row<C>(params.dg, t + j);
      for_row<C>(b.width, [&](int64_t i, auto part) {
        const auto dh = part.load(gradient + i) + part.load(dy + i);
        part.store(dx + i, dh);
        if (dg == nullptr) {
          part.store(gradient + i, dh * exp(part.load(g + i)));
          return;
        }
        part.store(dg + i, dh * part.load(memory.kept(j) + i));
        part.store(gradient + i, dh * part.load(memory.decay(j) + i));
      });
    }
  }
  if (params.dinitial_state != nullptr) b.copy(b.of(params.dinitial_state, b.n), gradient);
}

int64_t element(const LinearScan& p) { return p.dtype == DType::f64 ? 8 : 4; }
int64_t items(const LinearScan& p) { return p.rows.sequences * ceil_div(p.channels, p.block); }
int64_t bytes(const LinearScan& p) { return p.block * element(p); }
int64_t backward_bytes(const LinearScan& p) {
  return BackwardMemory<float>::kRows * p.block * element(p);
}

void forward(const LinearScanParams& p, void* memory, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, items(p.scan));
  OMNIATTN_ASSERT_HAS(memory, bytes(p.scan));
  const FlushDenormals flush;
  dispatch(p.scan.dtype, [&]<class T>(T) {
    for (int64_t i = begin; i < end; ++i) {
      forward_block<T>(p, static_cast<compute_t<T>*>(memory), i);
    }
  });
}
void backward(const LinearScanBackwardParams& p, void* memory, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, items(p.scan));
  OMNIATTN_ASSERT_HAS(memory, backward_bytes(p.scan));
  const FlushDenormals flush;
  dispatch(p.scan.dtype, [&]<class T>(T) {
    for (int64_t i = begin; i < end; ++i) {
      backward_block<T>(p, static_cast<compute_t<T>*>(memory), i);
    }
  });
}

}  // namespace

extern const LinearScanKernels linear_scan_kernels_table;
const LinearScanKernels linear_scan_kernels_table{bytes, forward, backward_bytes, backward};

}  // namespace omniattn::OMNIATTN_ISA
