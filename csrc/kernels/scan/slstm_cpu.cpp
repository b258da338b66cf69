// sLSTM on the CPU, see slstm.h: a few sequences of one head at a time, so that their products with
// R are one matrix product per gate and step.
#include "kernels/scan/slstm.h"

#include "kernels/scan/scan_rules.h"
#include "runtime/assert.h"
#include "runtime/denormals.h"
#include "runtime/dispatch.h"
#include "runtime/gemm_tile.h"
#include "runtime/row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

using scan_rules::SlstmGates;
using scan_rules::SlstmGradient;
using scan_rules::SlstmState;

// Number of rows of dx that are multiplied with h at a time, for dr.
constexpr int64_t kProductRows = 64;
static_assert(kProductRows >= kSlstmGroup);

// One head of a group of sequences, longest first, so that the active sequences come first.
template <class T>
struct Group {
  using C = compute_t<T>;
  const Slstm& p;
  int64_t head, size = 0, index;
  int64_t number[kSlstmGroup];
  ScanSequence sequence[kSlstmGroup];

  Group(const Slstm& slstm, int64_t item) : p(slstm), head(item % p.heads), index(item / p.heads) {
    const int64_t end = smaller(p.rows.sequences, (index + 1) * kSlstmGroup);
    for (int64_t n = index * kSlstmGroup; n < end; ++n, ++size) {
      const ScanSequence s = scan_sequence(p.rows, n);
      int64_t i = size;
      for (; i > 0 && sequence[i - 1].count < s.count; --i) {
        sequence[i] = sequence[i - 1];
        number[i] = number[i - 1];
      }
      sequence[i] = s;
      number[i] = n;
    }
  }
  int64_t steps() const { return size > 0 ? sequence[0].count : 0; }
  // Number of sequences that have a step t.
  int64_t lasting(int64_t t) const {
    int64_t rows = 0;
    while (rows < size && sequence[rows].count > t) ++rows;
    return rows;
  }
  // Row `part` of `parts` of step t of sequence i in a tensor (B, T, parts, H, D).
  int64_t at(int64_t i, int64_t t, int64_t parts, int64_t part) const {
    const ScanSequence& s = sequence[i];
    return (((s.batch * p.rows.steps + s.begin + t) * parts + part) * p.heads + head) * p.width;
  }
  // Row `part` of step t of sequence i in a view whose rows are (parts, H, D).
  const T* row(const ScanView& x, int64_t i, int64_t t, int64_t part) const {
    const ScanSequence& s = sequence[i];
    return x.row<T>(s.batch, s.begin + t) + (part * p.heads + head) * p.width;
  }
  // Offset of row `part` of sequence i in states (N, 4, H, D).
  int64_t state_at(int64_t i, int64_t part) const {
    return ((number[i] * 4 + part) * p.heads + head) * p.width;
  }
  const T* r(int64_t gate) const {
    return static_cast<const T*>(p.r) + (gate * p.heads + head) * p.width * p.width;
  }
};

template <class C>
int64_t packed_size(const Slstm& p) {
  return 4 * packed_elements<C>(p.width, p.width);
}

// R of the four gates; for each sequence h, c, n, m and the products with R.
template <class C>
struct ForwardMemory {
  C *packed, *state, *raw;

  ForwardMemory(const Slstm& p, C* memory)
      : packed(memory), state(packed + packed_size<C>(p)), raw(state + kSlstmGroup * 4 * p.width) {}
  static int64_t elements(const Slstm& p) { return packed_size<C>(p) + kSlstmGroup * 8 * p.width; }
};

template <class T>
void forward_step(const SlstmParams& params, const Group<T>& b, compute_t<T>* state,
                  const compute_t<T>* raw, int64_t i, int64_t t) {
  using C = compute_t<T>;
  const int64_t n = b.p.width;
  T* const y = static_cast<T*>(params.y) + b.at(i, t, 1, 0);
  C* const trace = static_cast<C*>(params.trace);
  for_row<C>(n, [&](int64_t j, auto part) {
    const auto gate = [&](int64_t g) {
      return part.load(b.row(b.p.x, i, t, g) + j) + part.load(raw + g * n + j);
    };
    SlstmState<Vec<C>> s{part.load(state + j), part.load(state + n + j),
                         part.load(state + 2 * n + j), part.load(state + 3 * n + j)};
    const SlstmGates<Vec<C>> g =
        scan_rules::slstm_step(s, gate(0), gate(1), gate(2), gate(3), b.p.exp_forget);
    part.store(state + j, s.h);
    part.store(state + n + j, s.c);
    part.store(state + 2 * n + j, s.n);
    part.store(state + 3 * n + j, s.m);
    part.store(y + j, s.h);
    if (trace == nullptr) return;
    const Vec<C> kept[kSlstmTrace] = {g.input, g.forget, g.z, g.o, s.c, s.n, g.slope};
#pragma GCC unroll 8
    for (int64_t k = 0; k < kSlstmTrace; ++k) {
      part.store(trace + b.at(i, t, kSlstmTrace, k) + j, kept[k]);
    }
  });
}

template <class C>
void copy_row(const C* from, int64_t n, C* to) {
  for_row<C>(n, [&](int64_t j, auto part) {
    part.store(to + j, from == nullptr ? Vec<C>(C(0)) : part.load(from + j));
  });
}

template <class T>
void forward_group(const SlstmParams& params, compute_t<T>* room, int64_t item) {
  using C = compute_t<T>;
  const Group<T> b(params.slstm, item);
  const int64_t n = b.p.width, panels = packed_size<C>(b.p) / 4;
  const ForwardMemory<C> memory(b.p, room);
  for (int64_t i = 0; i < b.size; ++i) {
    for (int64_t part = 0; part < 4; ++part) {
      const auto* const from = static_cast<const C*>(b.p.initial_state);
      copy_row(from == nullptr ? from : from + b.state_at(i, part), n,
               memory.state + (4 * i + part) * n);
    }
  }
  for (int64_t g = 0; g < 4 && b.steps() > 0; ++g) {
    pack_b(b.r(g), n, n, n, memory.packed + g * panels);
  }
  for (int64_t t = 0; t < b.steps(); ++t) {
    const int64_t rows = b.lasting(t);
    for (int64_t g = 0; g < 4; ++g) {
      gemm_tile<C>(memory.state, 4 * n, packed_panels(memory.packed + g * panels, n),
                   memory.raw + g * n, 4 * n, rows, n, n, false);
    }
    for (int64_t i = 0; i < rows; ++i) {
      forward_step(params, b, memory.state + 4 * i * n, memory.raw + 4 * i * n, i, t);
    }
  }
  for (int64_t i = 0; i < b.size; ++i) {
    for (int64_t part = 0; part < 4; ++part) {
      copy_row(memory.state + (4 * i + part) * n, n,
               static_cast<C*>(params.final_state) + b.state_at(i, part));
    }
  }
}

// R^T of the four gates; for each sequence the gradients of h, c, n and the excess of m; rows of
// dx, with the h before their steps.
template <class C>
struct BackwardMemory {
  C *packed, *gradient, *dx, *h;

  BackwardMemory(const Slstm& p, C* memory)
      : packed(memory),
        gradient(packed + packed_size<C>(p)),
        dx(gradient + kSlstmGroup * 4 * p.width),
        h(dx + kProductRows * 4 * p.width) {}
  static int64_t elements(const Slstm& p) {
    return packed_size<C>(p) + (kSlstmGroup * 4 + kProductRows * 5) * p.width;
  }
};

template <class T>
struct Backward {
  using C = compute_t<T>;
  const SlstmBackwardParams& params;
  Group<T> b;
  BackwardMemory<C> memory;
  int64_t n, waiting = 0;  // rows of memory.dx that await the product with h
  bool has_products = false;

  Backward(const SlstmBackwardParams& x, C* room, int64_t item)
      : params(x), b(x.slstm, item), memory(x.slstm, room), n(x.slstm.width) {}

  const C* trace(int64_t i, int64_t t, int64_t part) const {
    return static_cast<const C*>(params.trace) + b.at(i, t, kSlstmTrace, part);
  }
  const C* initial(int64_t i, int64_t part) const {
    const auto* const from = static_cast<const C*>(b.p.initial_state);
    return from == nullptr ? nullptr : from + b.state_at(i, part);
  }
  C* gradient(int64_t i) const { return memory.gradient + 4 * i * n; }

  // h, c and n after step t; step -1 is the initial state.
  OMNIATTN_INLINE auto state(int64_t i, int64_t t, int64_t j, auto part) const {
    struct State {
      Vec<C> h, c, n;
    };
    if (t >= 0) {
      const Vec<C> c = part.load(trace(i, t, 4) + j), norm = part.load(trace(i, t, 5) + j);
      return State{part.load(trace(i, t, 3) + j) * (c / norm), c, norm};
    }
    if (b.p.initial_state == nullptr) return State{C(0), C(0), C(0)};
    return State{part.load(initial(i, 0) + j), part.load(initial(i, 1) + j),
                 part.load(initial(i, 2) + j)};
  }

  void begin(int64_t i) const {
    const auto* const of = static_cast<const C*>(params.grad_final_state);
    for_row<C>(n, [&](int64_t j, auto part) {
      Vec<C> d[4] = {C(0), C(0), C(0), C(0)};
      if (of != nullptr) {
#pragma GCC unroll 4
        for (int64_t k = 0; k < 4; ++k) d[k] = part.load(of + b.state_at(i, k) + j);
        const auto s = state(i, b.sequence[i].count - 1, j, part);
        d[3] = d[3] - fma(d[1], s.c, d[2] * s.n);
      }
#pragma GCC unroll 4
      for (int64_t k = 0; k < 4; ++k) part.store(gradient(i) + k * n + j, d[k]);
    });
  }

  // Computes dx of a step of one sequence and stores it in row `row` of the waiting rows.
  void step(int64_t i, int64_t t, int64_t row) const {
    OMNIATTN_ASSERT(row < kProductRows);
    const T* const dy = b.row(params.grad_y, i, t, 0);
    C* const at = gradient(i);
    for_row<C>(n, [&](int64_t j, auto part) {
      const auto of = [&](int64_t k) { return part.load(trace(i, t, k) + j); };
      const SlstmGates<Vec<C>> y{of(0), of(1), of(2), of(3), of(6)};
      SlstmGradient<Vec<C>> g{part.load(at + n + j), part.load(at + 2 * n + j),
                              part.load(at + 3 * n + j)};
      const auto before = state(i, t - 1, j, part);
      const auto d = scan_rules::slstm_back(y, of(4), of(5), before.c, before.n,
                                            part.load(at + j) + part.load(dy + j), g);
      part.store(at + n + j, g.c);
      part.store(at + 2 * n + j, g.n);
      part.store(at + 3 * n + j, g.excess);
      part.store(memory.h + row * n + j, before.h);
      const Vec<C> gates[4] = {d.i, d.f, d.z, d.o};
#pragma GCC unroll 4
      for (int64_t k = 0; k < 4; ++k) {
        part.store(memory.dx + (4 * row + k) * n + j, gates[k]);
        part.store(static_cast<T*>(params.dx) + b.at(i, t, 4, k) + j, gates[k]);
      }
    });
  }

  // Adds h^T dx of the waiting rows to dr, if dr is wanted, and empties the buffer.
  void add_products() {
    if (params.dr != nullptr) multiply_waiting();
    has_products = true;
    waiting = 0;
  }
  void multiply_waiting() {
    C* const dr = static_cast<C*>(params.dr) + b.index * 4 * b.p.heads * n * n;
    for (int64_t g = 0; g < 4; ++g) {
      C* const of_gate = dr + (g * b.p.heads + b.head) * n * n;
      if (waiting > 0) {
        gemm_tile<C, ALayout::kTransposed>(memory.h, n, row_panels(memory.dx + g * n, 4 * n),
                                           of_gate, n, n, n, waiting, has_products);
      } else if (!has_products) {
        for (int64_t row = 0; row < n; ++row) copy_row<C>(nullptr, n, of_gate + row * n);
      }
    }
  }

  void finish(int64_t i) const {
    for_row<C>(n, [&](int64_t j, auto part) {
      const auto s = state(i, -1, j, part);
      Vec<C> d[4];
#pragma GCC unroll 4
      for (int64_t k = 0; k < 4; ++k) d[k] = part.load(gradient(i) + k * n + j);
      d[3] = d[3] + fma(d[1], s.c, d[2] * s.n);
#pragma GCC unroll 4
      for (int64_t k = 0; k < 4; ++k) {
        part.store(static_cast<C*>(params.dinitial_state) + b.state_at(i, k) + j, d[k]);
      }
    });
  }

  void run() {
    const int64_t panels = packed_size<C>(b.p) / 4;
    for (int64_t i = 0; i < b.size; ++i) begin(i);
    for (int64_t g = 0; g < 4 && b.steps() > 0; ++g) {
      pack_bt(b.r(g), n, n, n, memory.packed + g * panels);
    }
    for (int64_t t = b.steps() - 1; t >= 0; --t) {
      const int64_t rows = b.lasting(t);
      if (waiting + rows > kProductRows) add_products();
      for (int64_t i = 0; i < rows; ++i) step(i, t, waiting + i);
      for (int64_t g = 0; g < 4; ++g) {
        gemm_tile<C>(memory.dx + (4 * waiting + g) * n, 4 * n,
                     packed_panels(memory.packed + g * panels, n), memory.gradient, 4 * n, rows, n,
                     n, g > 0);
      }
      waiting += rows;
    }
    add_products();
    for (int64_t i = 0; i < b.size; ++i) finish(i);
  }
};

int64_t bytes(const Slstm& p) {
  int64_t bytes = 0;
  dispatch_compute(p.dtype, [&]<class C>(C) {
    bytes = ForwardMemory<C>::elements(p) * static_cast<int64_t>(sizeof(C));
  });
  return bytes;
}
int64_t backward_bytes(const Slstm& p) {
  int64_t bytes = 0;
  dispatch_compute(p.dtype, [&]<class C>(C) {
    bytes = BackwardMemory<C>::elements(p) * static_cast<int64_t>(sizeof(C));
  });
  return bytes;
}

void forward(const SlstmParams& p, void* memory, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, slstm_groups(p.slstm.rows) * p.slstm.heads);
  OMNIATTN_ASSERT_HAS(memory, bytes(p.slstm));
  const FlushDenormals flush;
  dispatch(p.slstm.dtype, [&]<class T>(T) {
    for (int64_t i = begin; i < end; ++i) {
      forward_group<T>(p, static_cast<compute_t<T>*>(memory), i);
    }
  });
}
void backward(const SlstmBackwardParams& p, void* memory, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, slstm_groups(p.slstm.rows) * p.slstm.heads);
  OMNIATTN_ASSERT_HAS(memory, backward_bytes(p.slstm));
  const FlushDenormals flush;
  dispatch(p.slstm.dtype, [&]<class T>(T) {
    for (int64_t i = begin; i < end; ++i) {
      Backward<T>(p, static_cast<compute_t<T>*>(memory), i).run();
    }
  });
}

}  // namespace

extern const SlstmKernels slstm_kernels_table;
const SlstmKernels slstm_kernels_table{bytes, forward, backward_bytes, backward};

}  // namespace omniattn::OMNIATTN_ISA
