// RWKV-4 on the CPU, see wkv.h: step by step over a block of channels, whose states stay in L1 and
// whose vectors hide each other's latencies.
#include "kernels/scan/wkv.h"

#include "kernels/scan/scan_rules.h"
#include "runtime/assert.h"
#include "runtime/denormals.h"
#include "runtime/dispatch.h"
#include "runtime/row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

using scan_rules::WkvGradient;
using scan_rules::WkvState;

// Rows of one block of channels, `stride` elements apart.
template <class C>
struct BlockRows {
  C* data;
  int64_t stride;

  OMNIATTN_INLINE C* at(int64_t row) const { return data + row * stride; }
  OMNIATTN_INLINE WkvState<Vec<C>> load(int64_t i, auto part) const {
    return {part.load(at(0) + i), part.load(at(1) + i), part.load(at(2) + i), part.load(at(3) + i)};
  }
  OMNIATTN_INLINE void store(int64_t i, auto part, const WkvState<Vec<C>>& s) const {
    part.store(at(0) + i, s.num);
    part.store(at(1) + i, s.den);
    part.store(at(2) + i, s.top);
    part.store(at(3) + i, s.age);
  }
};

// A block of the channels of one sequence.
template <class T>
struct Block {
  using C = compute_t<T>;
  const Wkv& p;
  int64_t n, first, width;
  ScanSequence s;

  Block(const Wkv& wkv, int64_t item) : p(wkv) {
    const int64_t blocks = ceil_div(p.channels, p.block);
    n = item / blocks;
    first = item % blocks * p.block;
    width = smaller(p.block, p.channels - first);
    s = scan_sequence(p.rows, n);
  }
  const C* w() const { return static_cast<const C*>(p.w) + first; }
  const C* u() const { return static_cast<const C*>(p.u) + first; }
  const T* row(const ScanView& x, int64_t t) const {
    return x.row<T>(s.batch, s.begin + t) + first;
  }
  T* row(void* x, int64_t t) const {
    return static_cast<T*>(x) + (s.batch * p.rows.steps + s.begin + t) * p.channels + first;
  }
  // Entry i of (.., rows, C).
  template <class P>
  auto rows_of(P* x, int64_t i, int64_t rows) const {
    using S = std::conditional_t<std::is_const_v<P>, const C, C>;
    return BlockRows<S>{static_cast<S*>(x) + i * rows * p.channels + first, p.channels};
  }

  void begin(const BlockRows<C>& state) const {
    for_row<C>(width, [&](int64_t i, auto part) {
      WkvState<Vec<C>> x{C(0), C(0), static_cast<C>(kWkvEmpty), C(0)};
      if (p.initial_state != nullptr) {
        const auto from = rows_of(p.initial_state, n, 3);
        x.num = part.load(from.at(0) + i);
        x.den = part.load(from.at(1) + i);
        x.top = part.load(from.at(2) + i);
      }
      state.store(i, part, x);
    });
  }
};

template <class T>
void forward_block(const WkvParams& params, compute_t<T>* memory, int64_t item) {
  using C = compute_t<T>;
  const Block<T> b(params.wkv, item);
  const BlockRows<C> state{memory, b.p.block};
  b.begin(state);
  for (int64_t t = 0; t < b.s.count; ++t) {
    if (params.states != nullptr && t % kScanChunk == 0) {
      const auto to = b.rows_of(params.states, b.s.slot + t / kScanChunk, 4);
      for_row<C>(b.width, [&](int64_t i, auto part) { to.store(i, part, state.load(i, part)); });
    }
    const T *const k = b.row(b.p.k, t), *const v = b.row(b.p.v, t);
    T* const y = b.row(params.y, t);
    for_row<C>(b.width, [&](int64_t i, auto part) {
      auto x = state.load(i, part);
      const auto kt = part.load(k + i), vt = part.load(v + i), w = part.load(b.w() + i);
      const auto past = wkv_past(x, w, kt);
      part.store(y + i, wkv_read(x, past, part.load(b.u() + i), vt));
      wkv_advance(x, past, w, kt, vt);
      state.store(i, part, x);
    });
  }
  const auto to = b.rows_of(params.final_state, b.n, 3);
  for_row<C>(b.width, [&](int64_t i, auto part) {
    const auto x = state.load(i, part);
    part.store(to.at(0) + i, x.num);
    part.store(to.at(1) + i, x.den);
    part.store(to.at(2) + i, wkv_past(x, part.load(b.w() + i), Vec<C>(C(0))));
  });
}

// Memory of the backward: a state, gradients of a state, and num, den
// and past of each step of a chunk.
template <class C>
struct BackwardMemory {
  static constexpr int64_t kRows = 4 + 3 + 3 * kScanChunk;
  BlockRows<C> state, gradient, steps;

  BackwardMemory(C* memory, int64_t block)
      : state{memory, block},
        gradient{memory + 4 * block, block},
        steps{memory + 7 * block, block} {}
  OMNIATTN_INLINE WkvGradient<Vec<C>> load(int64_t i, auto part) const {
    return {part.load(gradient.at(0) + i), part.load(gradient.at(1) + i),
            part.load(gradient.at(2) + i)};
  }
  OMNIATTN_INLINE void store(int64_t i, auto part, const WkvGradient<Vec<C>>& g) const {
    part.store(gradient.at(0) + i, g.num);
    part.store(gradient.at(1) + i, g.den);
    part.store(gradient.at(2) + i, g.excess);
  }
};

// Starts with the gradients of the final state; zeroes the sums dw and du.
template <class T, class C = compute_t<T>>
void begin_backward(const WkvBackwardParams& params, const Block<T>& b,
                    const BackwardMemory<C>& memory, const BlockRows<C>& sums) {
  for_row<C>(b.width, [&](int64_t i, auto part) {
    WkvGradient<Vec<C>> g{C(0), C(0), C(0)};
    if (params.grad_final_state != nullptr) {
      const auto of = b.rows_of(params.grad_final_state, b.n, 3);
      const auto x = memory.state.load(i, part);
      g.num = part.load(of.at(0) + i);
      g.den = part.load(of.at(1) + i);
      g.excess = part.load(of.at(2) + i) - fma(g.num, x.num, g.den * x.den);
    }
    memory.store(i, part, g);
    part.store(sums.at(0) + i, Vec<C>(C(0)));
    part.store(sums.at(1) + i, Vec<C>(C(0)));
  });
}

// Recomputes num, den and past of the steps [t, end) of a chunk, and the state after them.
template <class T, class C = compute_t<T>>
void recompute_chunk(const WkvBackwardParams& params, const Block<T>& b,
                     const BackwardMemory<C>& memory, int64_t t, int64_t end) {
  const auto from = b.rows_of(params.states, b.s.slot + t / kScanChunk, 4);
  for_row<C>(b.width, [&](int64_t i, auto part) {
    memory.state.store(i, part,
                       {part.load(from.at(0) + i), part.load(from.at(1) + i),
                        part.load(from.at(2) + i), part.load(from.at(3) + i)});
  });
  for (int64_t j = 0; t + j < end; ++j) {
    const T *const k = b.row(b.p.k, t + j), *const v = b.row(b.p.v, t + j);
    for_row<C>(b.width, [&](int64_t i, auto part) {
      auto x = memory.state.load(i, part);
      const auto kt = part.load(k + i), w = part.load(b.w() + i);
      const auto past = wkv_past(x, w, kt);
      part.store(memory.steps.at(3 * j) + i, x.num);
      part.store(memory.steps.at(3 * j + 1) + i, x.den);
      part.store(memory.steps.at(3 * j + 2) + i, past);
      wkv_advance(x, past, w, kt, part.load(v + i));
      memory.state.store(i, part, x);
    });
  }
}

template <class T>
void backward_block(const WkvBackwardParams& params, compute_t<T>* room, int64_t item) {
  using C = compute_t<T>;
  const Block<T> b(params.wkv, item);
  const BackwardMemory<C> memory(room, b.p.block);
  const BlockRows<C> sums = b.rows_of(params.partial, b.n, 2);
  if (b.s.count == 0) {
    b.begin(memory.state);
    begin_backward<T>(params, b, memory, sums);
  }
  const int64_t last = b.s.count - 1;
  for (int64_t t = last / kScanChunk * kScanChunk; t >= 0 && last >= 0; t -= kScanChunk) {
    const int64_t end = smaller(t + kScanChunk, b.s.count);
    recompute_chunk<T>(params, b, memory, t, end);
    if (end == b.s.count) begin_backward<T>(params, b, memory, sums);
    for (int64_t j = end - t - 1; j >= 0; --j) {
      const T *const v = b.row(b.p.v, t + j), *const dy = b.row(params.grad_y, t + j);
      T *const dk = b.row(params.dk, t + j), *const dv = b.row(params.dv, t + j);
      for_row<C>(b.width, [&](int64_t i, auto part) {
        auto g = memory.load(i, part);
        const auto d = wkv_back(part.load(memory.steps.at(3 * j) + i),
                                part.load(memory.steps.at(3 * j + 1) + i),
                                part.load(memory.steps.at(3 * j + 2) + i), part.load(b.w() + i),
                                part.load(b.u() + i), part.load(v + i), part.load(dy + i), g);
        part.store(dk + i, d.dk);
        part.store(dv + i, d.dv);
        part.store(sums.at(0) + i, part.load(sums.at(0) + i) + d.dw);
        part.store(sums.at(1) + i, part.load(sums.at(1) + i) + d.du);
        memory.store(i, part, g);
      });
    }
  }
  if (params.dinitial_state == nullptr) return;
  b.begin(memory.state);
  const auto to = b.rows_of(params.dinitial_state, b.n, 3);
  for_row<C>(b.width, [&](int64_t i, auto part) {
    const auto x = memory.state.load(i, part);
    const auto g = memory.load(i, part);
    part.store(to.at(0) + i, g.num);
    part.store(to.at(1) + i, g.den);
    part.store(to.at(2) + i, fma(g.num, x.num, g.den * x.den) + g.excess);
  });
}

int64_t element(const Wkv& p) { return p.dtype == DType::f64 ? 8 : 4; }
int64_t items(const Wkv& p) { return p.rows.sequences * ceil_div(p.channels, p.block); }
int64_t bytes(const Wkv& p) { return 4 * p.block * element(p); }
int64_t backward_bytes(const Wkv& p) { return BackwardMemory<float>::kRows * p.block * element(p); }

void forward(const WkvParams& p, void* memory, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, items(p.wkv));
  OMNIATTN_ASSERT_HAS(memory, bytes(p.wkv));
  const FlushDenormals flush;
  dispatch(p.wkv.dtype, [&]<class T>(T) {
    for (int64_t i = begin; i < end; ++i) {
      forward_block<T>(p, static_cast<compute_t<T>*>(memory), i);
    }
  });
}
void backward(const WkvBackwardParams& p, void* memory, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, items(p.wkv));
  OMNIATTN_ASSERT_HAS(memory, backward_bytes(p.wkv));
  const FlushDenormals flush;
  dispatch(p.wkv.dtype, [&]<class T>(T) {
    for (int64_t i = begin; i < end; ++i) {
      backward_block<T>(p, static_cast<compute_t<T>*>(memory), i);
    }
  });
}

}  // namespace

extern const WkvKernels wkv_kernels_table;
const WkvKernels wkv_kernels_table{bytes, forward, backward_bytes, backward};

}  // namespace omniattn::OMNIATTN_ISA
