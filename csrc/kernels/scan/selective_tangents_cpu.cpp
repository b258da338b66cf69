// Tangents of the selective scan and of its gradients on the CPU, see selective_tangents.h. With
// tangents x' of x, decays a_t = e^(dt_t A), x_t = dt_t u_t and gradients dh of the states:
//
//   g'_t = dt'_t A + dt_t A'         h'_t = a_t (h'_{t-1} + g'_t h_{t-1}) + x'_t B_t + x_t B'_t
//   y'_t = C'_t h_t + C_t h'_t       dh'_t += dy'_t C_t + dy_t C'_t
//   dC'_t = dy'_t h_t + dy_t h'_t    dB'_t = dh'_t x_t + dh_t x'_t
//   dx'_t = dh'_t B_t + dh_t B'_t    dh'_{t-1} = a_t (dh'_t + g'_t dh_t)
//
// and with e_t = a_t dh_t h_{t-1}, the gradient of dt_t A, dA' = sum e'_t dt_t + e_t dt'_t.
// Channels are in the lanes of vectors. A forward pass keeps h and h' before each chunk; a backward
// pass recomputes those of a chunk for a few states and walks their gradients back through it.
#include "kernels/scan/selective_item.h"
#include "kernels/scan/selective_tangents.h"
#include "runtime/assert.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

using Params = SelectiveTangentParams;

constexpr int kMostStates = 4;  // with their tangents and gradients, in registers
constexpr double kLn2 = 0.69314718055994531;

template <class C>
void clear(C* to, int64_t n) {
  for (int64_t i = 0; i < n; i += Vec<C>::kWidth) store(to + i, zero<C>());
}

// Memory of an item. For all vectors of channels: A, also times log2 e, A', h and h', and with
// gradients those of the states, their tangents, the sum dA', and h and h' before each chunk. For a
// chunk: B, C and their tangents, and dB' and dC' of each lane. For one vector of channels and a
// chunk: rows of its steps, and for a block of states h, h', decays and g'.
template <class C>
struct TangentMemory {
  enum Row { kDt, kMovedDt, kInput, kMovedInput, kGrad, kMovedGrad, kY, kRows };
  // Sums over states, with gradients: of dx, dx', and of the gradients of dt A, times A.
  enum Sum { kOfInput, kMovedOfInput, kOfDecay, kMovedOfDecay, kSums };
  static constexpr int kWidth = Vec<C>::kWidth;
  C *decay, *scaled_decay, *moved_decay, *state, *moved_state;
  C *gradient, *moved_gradient, *moved_ddecay, *before;
  C *b, *c, *moved_b, *moved_c, *moved_db, *moved_dc;
  C *rows, *sums, *states, *moved_states, *decays, *exponents;

  // Returns the number of elements.
  int64_t place(const Params& all, C* memory) {
    const Selective& p = all.scan;
    int64_t used = 0;
    const auto take = [&](int64_t n) {
      C* const taken = memory == nullptr ? nullptr : memory + used;
      used += n;
      return taken;
    };
    const bool back = has_gradients(all);
    const int64_t table = p.states * p.block, steps = kScanChunk * p.states;
    for (C** each : {&decay, &scaled_decay, &moved_decay, &state, &moved_state}) {
      *each = take(table);
    }
    for (C** each : {&gradient, &moved_gradient, &moved_ddecay}) {
      *each = take(back ? table : 0);
    }
    before = take(back ? 2 * ceil_div(p.rows.steps, kScanChunk) * table : 0);
    for (C** each : {&b, &c, &moved_b, &moved_c}) *each = take(steps);
    for (C** each : {&moved_db, &moved_dc}) *each = take(back ? steps * kWidth : 0);
    rows = take(kRows * kScanChunk * kWidth);
    sums = take(kSums * kScanChunk * kWidth);
    for (C** each : {&states, &moved_states, &decays, &exponents}) {
      *each = take((kScanChunk + 1) * kMostStates * kWidth);
    }
    return used;
  }
  C* row(Row of, int64_t t) const { return rows + (of * kScanChunk + t) * kWidth; }
  C* sum(Sum of, int64_t t) const { return sums + (of * kScanChunk + t) * kWidth; }
};

// A block of states of a vector of channels, and the steps of a chunk.
template <class C>
struct Steps {
  const TangentMemory<C>& m;
  int64_t steps, states;  // of the chunk; of each channel
  int64_t table;          // place of the block in tables
  int64_t n;              // its first state

  // Place of state k of the block in rows of B and C.
  OMNIATTN_INLINE int64_t at(int64_t t, int64_t k) const { return t * states + n + k; }
};

// Moves h and h' of a block of states over the steps of a chunk and adds to y'; with kKeeps, stores
// the states before and after each step, decays and g' instead.
template <int64_t kStates, bool kKeeps, class C>
[[gnu::noinline]] void advance(const Steps<C>& x) {
  using Memory = TangentMemory<C>;
  constexpr int kWidth = Vec<C>::kWidth;
  const Memory& m = x.m;
  Vec<C> h[kStates], moved[kStates];
#pragma GCC unroll 4
  for (int64_t k = 0; k < kStates; ++k) {
    h[k] = load(m.state + x.table + k * kWidth);
    moved[k] = load(m.moved_state + x.table + k * kWidth);
  }
  for (int64_t t = 0; t < x.steps; ++t) {
    const Vec<C> dt = load(m.row(Memory::kDt, t)), moved_dt = load(m.row(Memory::kMovedDt, t));
    const Vec<C> input = load(m.row(Memory::kInput, t));
    const Vec<C> moved_input = load(m.row(Memory::kMovedInput, t));
    Vec<C> y = load(m.row(Memory::kY, t));
#pragma GCC unroll 4
    for (int64_t k = 0; k < kStates; ++k) {
      const int64_t of_state = x.table + k * kWidth, kept = (t * kStates + k) * kWidth;
      const Vec<C> a = decay_of(dt * load(m.scaled_decay + of_state));
      const Vec<C> g = fma(moved_dt, load(m.decay + of_state), dt * load(m.moved_decay + of_state));
      if constexpr (kKeeps) {
        store(m.states + kept, h[k]);
        store(m.moved_states + kept, moved[k]);
        store(m.decays + kept, a);
        store(m.exponents + kept, g);
      }
      const Vec<C> b = m.b[x.at(t, k)], moved_b = m.moved_b[x.at(t, k)];
      moved[k] = fma(a, fma(g, h[k], moved[k]), fma(moved_input, b, input * moved_b));
      h[k] = fma(a, h[k], input * b);
      if constexpr (!kKeeps) {
        y = fma(h[k], Vec<C>(m.moved_c[x.at(t, k)]), fma(moved[k], Vec<C>(m.c[x.at(t, k)]), y));
      }
    }
    if constexpr (!kKeeps) store(m.row(Memory::kY, t), y);
  }
#pragma GCC unroll 4
  for (int64_t k = 0; k < kStates; ++k) {
    if constexpr (kKeeps) {
      store(m.states + (x.steps * kStates + k) * kWidth, h[k]);
      store(m.moved_states + (x.steps * kStates + k) * kWidth, moved[k]);
    } else {
      store(m.state + x.table + k * kWidth, h[k]);
      store(m.moved_state + x.table + k * kWidth, moved[k]);
    }
  }
}

// Walks the gradients of a block of states, and their tangents, back through a chunk.
template <int64_t kStates, class C>
[[gnu::noinline]] void go_back(const Steps<C>& x) {
  using Memory = TangentMemory<C>;
  constexpr int kWidth = Vec<C>::kWidth;
  const Memory& m = x.m;
  Vec<C> dh[kStates], moved[kStates], of_decays[kStates];
#pragma GCC unroll 4
  for (int64_t k = 0; k < kStates; ++k) {
    dh[k] = load(m.gradient + x.table + k * kWidth);
    moved[k] = load(m.moved_gradient + x.table + k * kWidth);
    of_decays[k] = load(m.moved_ddecay + x.table + k * kWidth);
  }
  const auto add = [](C* sums, int64_t at, Vec<C> value) OMNIATTN_LAMBDA {
    store(sums + at * kWidth, load(sums + at * kWidth) + value);
  };
  for (int64_t t = x.steps - 1; t >= 0; --t) {
    const auto row = [&](typename Memory::Row of) OMNIATTN_LAMBDA { return load(m.row(of, t)); };
    const Vec<C> dt = row(Memory::kDt), moved_dt = row(Memory::kMovedDt);
    const Vec<C> input = row(Memory::kInput), moved_input = row(Memory::kMovedInput);
    const Vec<C> dy = row(Memory::kGrad), moved_dy = row(Memory::kMovedGrad);
    Vec<C> sums[Memory::kSums];
#pragma GCC unroll 4
    for (int64_t i = 0; i < Memory::kSums; ++i) {
      sums[i] = load(m.sum(static_cast<typename Memory::Sum>(i), t));
    }
#pragma GCC unroll 4
    for (int64_t k = 0; k < kStates; ++k) {
      const int64_t of_state = x.table + k * kWidth, at = x.at(t, k);
      const int64_t before = (t * kStates + k) * kWidth, after = before + kStates * kWidth;
      const Vec<C> b = m.b[at], moved_b = m.moved_b[at], c = m.c[at], moved_c = m.moved_c[at];
      dh[k] = fma(dy, c, dh[k]);
      moved[k] = fma(moved_dy, c, fma(dy, moved_c, moved[k]));
      add(m.moved_dc, at, fma(moved_dy, load(m.states + after), dy * load(m.moved_states + after)));
      add(m.moved_db, at, fma(moved[k], input, dh[k] * moved_input));
      sums[Memory::kOfInput] = fma(dh[k], b, sums[Memory::kOfInput]);
      sums[Memory::kMovedOfInput] =
          fma(moved[k], b, fma(dh[k], moved_b, sums[Memory::kMovedOfInput]));
      const Vec<C> a = load(m.decays + before), g = load(m.exponents + before);
      moved[k] = a * fma(g, dh[k], moved[k]);
      dh[k] = a * dh[k];
      const Vec<C> h = load(m.states + before), moved_h = load(m.moved_states + before);
      const Vec<C> e = dh[k] * h, moved_e = fma(moved[k], h, dh[k] * moved_h);
      const Vec<C> decay = load(m.decay + of_state);
      sums[Memory::kOfDecay] = fma(e, decay, sums[Memory::kOfDecay]);
      sums[Memory::kMovedOfDecay] =
          fma(moved_e, decay, fma(e, load(m.moved_decay + of_state), sums[Memory::kMovedOfDecay]));
      of_decays[k] = fma(moved_e, dt, fma(e, moved_dt, of_decays[k]));
    }
#pragma GCC unroll 4
    for (int64_t i = 0; i < Memory::kSums; ++i) {
      store(m.sum(static_cast<typename Memory::Sum>(i), t), sums[i]);
    }
  }
#pragma GCC unroll 4
  for (int64_t k = 0; k < kStates; ++k) {
    store(m.gradient + x.table + k * kWidth, dh[k]);
    store(m.moved_gradient + x.table + k * kWidth, moved[k]);
    store(m.moved_ddecay + x.table + k * kWidth, of_decays[k]);
  }
}

// One item.
template <class C>
struct Tangents {
  using Memory = TangentMemory<C>;
  static constexpr int kWidth = Vec<C>::kWidth;
  const Params& params;
  const Selective& p;
  Item<C> x;
  Memory m;

  Tangents(const Params& all, C* memory, int64_t item) : params(all), p(all.scan), x(p, item) {
    m.place(all, memory);
  }

  void load_chunk(int64_t t, int64_t steps) const {
    x.load_weights(p.b, t, steps, m.b);
    x.load_weights(p.c, t, steps, m.c);
    x.load_weights({params.moved_b, false}, t, steps, m.moved_b);
    x.load_weights({params.moved_c, false}, t, steps, m.moved_c);
  }
  void load_steps(int64_t t, int64_t steps, int64_t i, auto part) const {
    const auto value = [&](const ScanView& from, int64_t j) {
      return from.data == nullptr ? zero<C>() : part.load(x.row(from, t + j) + i);
    };
    for (int64_t j = 0; j < steps; ++j) {
      const Vec<C> dt = value(p.delta, j), moved_dt = value(params.moved_delta, j);
      const Vec<C> u = value(p.u, j), moved_u = value(params.moved_u, j);
      store(m.row(Memory::kDt, j), dt);
      store(m.row(Memory::kMovedDt, j), moved_dt);
      store(m.row(Memory::kInput, j), dt * u);
      store(m.row(Memory::kMovedInput, j), fma(moved_dt, u, dt * moved_u));
      store(m.row(Memory::kGrad, j), value(params.grad_y, j));
      store(m.row(Memory::kMovedGrad, j), value(params.moved_grad_y, j));
      store(m.row(Memory::kY, j), zero<C>());
    }
  }
  // Calls f(steps of a block of states, Count) for the states of the vector of channels from i on.
  template <class F>
  void for_states_of(int64_t i, int64_t steps, const F& f) const {
    for_states<kMostStates, 1>(p.states, [&](int64_t n, auto count) {
      f(Steps<C>{m, steps, p.states, i * p.states + n * kWidth, n}, count);
    });
  }
  // h and h' before a chunk, as tables.
  C* before(int64_t t, bool moved) const {
    return m.before + (2 * (t / kScanChunk) + moved) * p.states * p.block;
  }

  void forward() const {
    const int64_t table = p.states * p.block;
    x.load_tables(p.decay, 0, 1, m.decay);
    x.load_tables(p.decay, 0, kLog2E, m.scaled_decay);
    x.load_tables(params.moved_decay, 0, 1, m.moved_decay);
    x.load_tables(p.initial_state, x.sequence, 1, m.state);
    x.load_tables(params.moved_initial_state, x.sequence, 1, m.moved_state);
    for (int64_t t = 0; t < x.s.count; t += kScanChunk) {
      const int64_t steps = smaller(kScanChunk, x.s.count - t);
      if (has_gradients(params)) {
        __builtin_memcpy(before(t, false), m.state, static_cast<size_t>(table) * sizeof(C));
        __builtin_memcpy(before(t, true), m.moved_state, static_cast<size_t>(table) * sizeof(C));
      }
      load_chunk(t, steps);
      for_row<C>(x.width, [&](int64_t i, auto part) {
        load_steps(t, steps, i, part);
        for_states_of(i, steps, [](const Steps<C>& block, auto count) {
          advance<decltype(count)::value, false>(block);
        });
        for (int64_t j = 0; j < steps; ++j) {
          part.store(x.row(params.moved_y, t + j) + i, load(m.row(Memory::kY, j)));
        }
      });
    }
    x.store_tables(m.moved_state, params.moved_final_state, x.sequence);
  }

  void store_steps(int64_t t, int64_t steps, int64_t i, auto part) const {
    for (int64_t j = 0; j < steps; ++j) {
      const auto sum = [&](typename Memory::Sum of) { return load(m.sum(of, j)); };
      const Vec<C> u = part.load(x.row(p.u, t + j) + i);
      const Vec<C> moved_u = part.load(x.row(params.moved_u, t + j) + i);
      const Vec<C> dx = sum(Memory::kOfInput), moved_dx = sum(Memory::kMovedOfInput);
      const Vec<C> dt = load(m.row(Memory::kDt, j)), moved_dt = load(m.row(Memory::kMovedDt, j));
      part.store(x.row(params.moved_du, t + j) + i, fma(moved_dx, dt, dx * moved_dt));
      part.store(x.row(params.moved_ddelta, t + j) + i,
                 fma(moved_dx, u, fma(dx, moved_u, sum(Memory::kMovedOfDecay))));
    }
  }

  // Sums over the channels of the item, for each step of a chunk.
  void sum_lanes(const C* sums, int64_t t, int64_t steps, void* out) const {
    const int64_t rows = p.rows.steps * (p.rows.boundaries == nullptr ? p.rows.sequences : 1);
    for (int64_t j = 0; j < steps; ++j) {
      const int64_t row = x.block * rows + x.s.batch * p.rows.steps + x.s.begin + t + j;
      C* const to = static_cast<C*>(out) + (row * p.groups + x.group) * p.states;
      for (int64_t n = 0; n < p.states; ++n) {
        to[n] = reduce_add(load(sums + (j * p.states + n) * kWidth));
      }
    }
  }

  void backward() const {
    x.load_tables(params.grad_final_state, x.sequence, 1, m.gradient);
    x.load_tables(params.moved_grad_final_state, x.sequence, 1, m.moved_gradient);
    clear(m.moved_ddecay, p.states * p.block);
    for (int64_t t = round_up(x.s.count, kScanChunk) - kScanChunk; t >= 0; t -= kScanChunk) {
      const int64_t steps = smaller(kScanChunk, x.s.count - t);
      load_chunk(t, steps);
      clear(m.moved_db, steps * p.states * kWidth);
      clear(m.moved_dc, steps * p.states * kWidth);
      Memory of_chunk = m;
      of_chunk.state = before(t, false);
      of_chunk.moved_state = before(t, true);
      for_row<C>(x.width, [&](int64_t i, auto part) {
        load_steps(t, steps, i, part);
        clear(m.sums, Memory::kSums * kScanChunk * kWidth);
        for_states_of(i, steps, [&](Steps<C> block, auto count) {
          constexpr int64_t kStates = decltype(count)::value;
          advance<kStates, true>(
              Steps<C>{of_chunk, block.steps, block.states, block.table, block.n});
          go_back<kStates>(block);
        });
        store_steps(t, steps, i, part);
      });
      sum_lanes(m.moved_db, t, steps, params.moved_db);
      sum_lanes(m.moved_dc, t, steps, params.moved_dc);
    }
    x.store_tables(m.moved_ddecay, params.moved_ddecay, x.sequence);
    x.store_tables(m.moved_gradient, params.moved_dinitial_state, x.sequence);
  }
};

int64_t bytes(const Params& params) {
  int64_t bytes = 0;
  dispatch_compute(params.scan.dtype, [&]<class C>(C) {
    bytes = TangentMemory<C>{}.place(params, nullptr) * static_cast<int64_t>(sizeof(C));
  });
  return bytes;
}

void tangents(const Params& params, void* memory, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, params.scan.items());
  OMNIATTN_ASSERT_HAS(memory, bytes(params));
  const FlushDenormals flush;
  dispatch_compute(params.scan.dtype, [&]<class C>(C) {
    for (int64_t i = begin; i < end; ++i) {
      const Tangents<C> item(params, static_cast<C*>(memory), i);
      item.forward();
      if (has_gradients(params)) item.backward();
    }
  });
}

}  // namespace

extern const SelectiveTangentKernels selective_tangent_kernels_table;
const SelectiveTangentKernels selective_tangent_kernels_table{bytes, tangents};

}  // namespace omniattn::OMNIATTN_ISA
