// The selective scan on the CPU, see selective.h: channels in the lanes of vectors, their states in
// registers. A few steps of a block of channels are read as rows, then the states of each vector
// walk over them, so that they stay in L1 and each is loaded and stored once for these steps.
#include "kernels/scan/selective.h"

#include "kernels/scan/scan_rules.h"
#include "runtime/denormals.h"
#include "runtime/dispatch.h"
#include "runtime/row.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

constexpr int64_t kTile = 8;  // steps that a forward reads at a time
constexpr int kForwardBlock = kVecBytes == 64 ? 16 : 8, kBackwardBlock = 8;  // states in registers
constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.69314718055994531;
static_assert(kScanChunk % kTile == 0);

// 2^x within relative error 1e-7, which is less near 0: decays of slow states are close to 1.
OMNIATTN_INLINE VecF decay_of(VecF x) {
#if defined(__AVX512F__)
  const VecF f(_mm512_reduce_ps(x.v, 8)), n = x - f;  // scale2 saturates
#else
  const VecF clamped = min(VecF(129.0f), max(VecF(-151.0f), x));
  const VecF n = round(clamped), f = clamped - n;
#endif
  return scale2(horner(f, 1.0f, 6.931470037e-01f, 2.402224243e-01f, 5.550733581e-02f,
                       9.671512991e-03f, 1.326472731e-03f),
                n);
}
OMNIATTN_INLINE VecD decay_of(VecD x) { return exp2(x); }

// Tables have, for each vector of channels, one vector for each state.

// f(n, Count) for blocks of all states, without padding: 0 times infinity is not 0.
template <int kCount>
struct Count {
  static constexpr int64_t value = kCount;
};
template <int kMost, class F>
OMNIATTN_INLINE void for_states(int64_t states, const F& f) {
  int64_t n = 0;
  for (; n + kMost <= states; n += kMost) f(n, Count<kMost>{});
  if constexpr (kMost > 1) {
    if (n < states) {
      for_states<kMost / 2>(states - n, [&](int64_t i, auto count) { f(n + i, count); });
    }
  }
}

// The table of one vector of channels from rows (lanes, states), times `scale`; null for zeros.
template <class C>
void load_table(const C* from, int64_t lanes, int64_t states, C scale, C* to) {
  constexpr int kWidth = Vec<C>::kWidth;
  for (int64_t n = 0; n < states; n += kWidth) {
    Vec<C> rows[kWidth];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kWidth; ++i) {
      const bool is_there = from != nullptr && i < lanes;
      rows[i] = is_there ? load_n(from + i * states + n, states - n) : zero<C>();
    }
    transpose(rows);
#pragma GCC unroll 16
    for (int64_t i = 0; i < kWidth; ++i) {
      if (n + i < states) store(to + (n + i) * kWidth, rows[i] * scale);
    }
  }
}
template <class C>
void store_table(const C* from, int64_t lanes, int64_t states, C* to) {
  constexpr int kWidth = Vec<C>::kWidth;
  for (int64_t n = 0; n < states; n += kWidth) {
    Vec<C> rows[kWidth];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kWidth; ++i) {
      rows[i] = n + i < states ? load(from + (n + i) * kWidth) : zero<C>();
    }
    transpose(rows);
#pragma GCC unroll 16
    for (int64_t i = 0; i < kWidth; ++i) {
      if (i < lanes) store_n(to + i * states + n, rows[i], states - n);
    }
  }
}
template <class C>
void clear(C* to, int64_t n) {
  for (int64_t i = 0; i < n; i += Vec<C>::kWidth) store(to + i, zero<C>());
}

// B or C of some steps: a number for all channels of a group, or a vector of their constants.
template <bool kConstant, class C>
struct Weights {
  const C* data;
  int64_t states;

  OMNIATTN_INLINE Vec<C> at(int64_t t, int64_t n) const {
    return kConstant ? load(data + n * Vec<C>::kWidth) : Vec<C>(data[t * states + n]);
  }
  // Those of the states from n on.
  Weights from(int64_t n) const { return {data + (kConstant ? n * Vec<C>::kWidth : n), states}; }
};
// f(B, C) for those of the vector of channels from i on. `steps` and `table` have them in each
// form.
template <class C, class F>
OMNIATTN_INLINE void with_weights(const Selective& p, const C* b_steps, const C* b_table,
                                  const C* c_steps, const C* c_table, int64_t i, const F& f) {
  const int64_t states = p.states, at = i * states;
  const auto with_c = [&](auto b) {
    p.c.constant ? f(b, Weights<true, C>{c_table + at, states})
                 : f(b, Weights<false, C>{c_steps, states});
  };
  p.b.constant ? with_c(Weights<true, C>{b_table + at, states})
               : with_c(Weights<false, C>{b_steps, states});
}

template <class T>
struct Item : SelectiveItem {
  using C = compute_t<T>;
  static constexpr int kWidth = Vec<C>::kWidth;
  const Selective& p;

  Item(const Selective& scan, int64_t item) : SelectiveItem(selective_item(scan, item)), p(scan) {}

  const T* row(const ScanView& x, int64_t t) const {
    return x.row<T>(s.batch, s.begin + t) + first;
  }
  T* row(void* x, int64_t t) const {
    return static_cast<T*>(x) + (s.batch * p.rows.steps + s.begin + t) * p.channels + first;
  }
  const C* vector(const void* x) const {
    return x == nullptr ? nullptr : static_cast<const C*>(x) + first;
  }
  // Row r of entry i of (.., rows, D).
  template <class P>
  auto* row_of(P* x, int64_t i, int64_t rows, int64_t r) const {
    using S = std::conditional_t<std::is_const_v<P>, const C, C>;
    return static_cast<S*>(x) + (i * rows + r) * p.channels + first;
  }

  // f(i, lanes) for each vector of channels.
  template <class F>
  OMNIATTN_INLINE void for_vectors(const F& f) const {
    for (int64_t i = 0; i < width; i += kWidth) f(i, smaller(kWidth, width - i));
  }
  // Tables from entry `entry` of (.., D, N), null for zeros; and the inverse.
  void load_tables(const void* from, int64_t entry, double scale, C* to) const {
    const C* const rows =
        from == nullptr ? nullptr
                        : static_cast<const C*>(from) + (entry * p.channels + first) * p.states;
    for_vectors([&](int64_t i, int64_t lanes) {
      load_table(rows == nullptr ? rows : rows + i * p.states, lanes, p.states,
                 static_cast<C>(scale), to + i * p.states);
    });
  }
  void store_tables(const C* from, void* to, int64_t entry) const {
    C* const rows = static_cast<C*>(to) + (entry * p.channels + first) * p.states;
    for_vectors([&](int64_t i, int64_t lanes) {
      store_table(from + i * p.states, lanes, p.states, rows + i * p.states);
    });
  }
  // Steps [t, t + steps) of B or C, or its table.
  void load_weights(const SelectiveWeights& w, int64_t t, int64_t steps, C* to) const {
    for (int64_t j = 0; j < steps && !w.constant; ++j) {
      const T* const from = w.rows.row<T>(s.batch, s.begin + t + j) + group * p.states;
      for (int64_t n = 0; n < p.states; ++n) to[j * p.states + n] = widen(from[n]);
    }
  }
  void load_constants(const SelectiveWeights& w, C* to) const {
    if (w.constant) load_tables(w.rows.data, 0, 1, to);
  }

  OMNIATTN_INLINE scan_rules::Softplus<Vec<C>> step_of(int64_t i, auto part, const T* delta) const {
    Vec<C> x = part.load(delta + i);
    if (p.bias != nullptr) x = x + part.load(vector(p.bias) + i);
    if (p.softplus) return scan_rules::softplus(x);
    return {x, Vec<C>(C(1))};
  }
};

// Of the forward: tables of decays (times log2 e), states and constants, and for each vector of
// channels dt, dt u and y of some steps.
template <class C>
struct ForwardMemory {
  C *decay, *state, *b_table, *c_table, *dt, *input, *y, *b, *c;

  ForwardMemory(const Selective& p, C* memory) {
    const int64_t table = p.states * p.block, rows = kTile * p.block;
    decay = memory;
    state = decay + table;
    b_table = state + table;
    c_table = b_table + (p.b.constant ? table : 0);
    dt = c_table + (p.c.constant ? table : 0);
    input = dt + rows;
    y = input + rows;
    b = y + rows;
    c = b + kTile * p.states;
  }
  static int64_t elements(const Selective& p) {
    return p.states * (p.block * (2 + p.b.constant + p.c.constant) + 2 * kTile) +
           3 * kTile * p.block;
  }
};

// y += sum_n C h of `steps` steps of some states of a vector of channels.
template <int64_t kStates, class C, class B, class R>
[[gnu::noinline]] void advance(int64_t steps, const C* decay, const C* dt, const C* input, B b, R c,
                               C* state, C* y) {
  constexpr int kWidth = Vec<C>::kWidth;
  Vec<C> h[kStates];
#pragma GCC unroll 16
  for (int64_t n = 0; n < kStates; ++n) h[n] = load(state + n * kWidth);
  for (int64_t t = 0; t < steps; ++t) {
    const Vec<C> step = load(dt + t * kWidth), x = load(input + t * kWidth);
    Vec<C> even = load(y + t * kWidth), odd = zero<C>();
#pragma GCC unroll 16
    for (int64_t n = 0; n < kStates; ++n) {
      const Vec<C> a = decay_of(step * load(decay + n * kWidth));
      h[n] = fma(a, h[n], x * b.at(t, n));
      Vec<C>& sum = n % 2 == 0 ? even : odd;
      sum = fma(h[n], c.at(t, n), sum);
    }
    store(y + t * kWidth, even + odd);
  }
#pragma GCC unroll 16
  for (int64_t n = 0; n < kStates; ++n) store(state + n * kWidth, h[n]);
}

template <class T, class C = compute_t<T>>
void forward_rows(const SelectiveParams& params, const Item<T>& x, const ForwardMemory<C>& m,
                  int64_t t, int64_t steps) {
  const Selective& p = x.p;
  for (int64_t j = 0; j < steps; ++j) {
    const T *const delta = x.row(p.delta, t + j), *const u = x.row(p.u, t + j);
    for_row<C>(x.width, [&](int64_t i, auto part) {
      const int64_t at = i * kTile + j * x.kWidth;
      const Vec<C> dt = x.step_of(i, part, delta).value;
      store(m.dt + at, dt);
      store(m.input + at, dt * part.load(u + i));
      store(m.y + at, zero<C>());
    });
  }
  x.for_vectors([&](int64_t i, int64_t) {
    with_weights(p, m.b, m.b_table, m.c, m.c_table, i, [&](auto b, auto c) {
      for_states<kForwardBlock>(p.states, [&](int64_t n, auto count) {
        constexpr int64_t kStates = decltype(count)::value;
        const int64_t at = (i * p.states) + n * x.kWidth, rows = i * kTile;
        advance<kStates>(steps, m.decay + at, m.dt + rows, m.input + rows, b.from(n), c.from(n),
                         m.state + at, m.y + rows);
      });
    });
  });
  for (int64_t j = 0; j < steps; ++j) {
    T* const to = x.row(params.y, t + j);
    for_row<C>(x.width, [&](int64_t i, auto part) {
      Vec<C> y = load(m.y + i * kTile + j * x.kWidth);
      if (p.skip != nullptr) {
        y = fma(part.load(x.vector(p.skip) + i), part.load(x.row(p.u, t + j) + i), y);
      }
      if (p.z.data != nullptr) y = y * scan_rules::silu(part.load(x.row(p.z, t + j) + i)).value;
      part.store(to + i, y);
    });
  }
}

template <class T>
void forward_item(const SelectiveParams& params, compute_t<T>* memory, int64_t item) {
  using C = compute_t<T>;
  const Selective& p = params.scan;
  const Item<T> x(p, item);
  const ForwardMemory<C> m(p, memory);
  x.load_tables(p.decay, 0, kLog2E, m.decay);
  x.load_tables(p.initial_state, x.sequence, 1, m.state);
  x.load_constants(p.b, m.b_table);
  x.load_constants(p.c, m.c_table);
  for (int64_t t = 0; t < x.s.count; t += kTile) {
    const int64_t steps = smaller(kTile, x.s.count - t);
    if (params.states != nullptr && t % kScanChunk == 0) {
      for (int64_t n = 0; n < p.states; ++n) {
        C* const to = x.row_of(params.states, x.s.slot + t / kScanChunk, p.states, n);
        for_row<C>(x.width, [&](int64_t i, auto part) {
          part.store(to + i, load(m.state + i * p.states + n * x.kWidth));
        });
      }
    }
    x.load_weights(p.b, t, steps, m.b);
    x.load_weights(p.c, t, steps, m.c);
    forward_rows<T>(params, x, m, t, steps);
  }
  x.store_tables(m.state, params.final_state, x.sequence);
}

// Of the backward, of all vectors of channels: tables as in the forward, gradients of the states,
// and sums over time. Of a chunk: B and C, and dB and dC of each lane. Of one vector of channels
// and a chunk: what its steps need, and the states and decays of a block of states.
template <class C>
struct BackwardMemory {
  enum Row { kDt, kInput, kU, kSlope, kGrad, kGate, kOfDecay, kOfInput, kY, kRows };
  static constexpr int kWidth = Vec<C>::kWidth;
  C *decay, *gradient, *ddecay, *b_table, *c_table, *db_table, *dc_table, *dskip, *dbias;
  C *b, *c, *db, *dc, *rows, *before, *decays;

  BackwardMemory(const Selective& p, C* memory) {
    C* next = memory;
    const auto take = [&](int64_t n) {
      C* const taken = next;
      next += n;
      return taken;
    };
    const int64_t table = p.states * p.block;
    for (C** each : {&decay, &gradient, &ddecay}) *each = take(table);
    for (C** each : {&b_table, &db_table}) *each = take(p.b.constant ? table : 0);
    for (C** each : {&c_table, &dc_table}) *each = take(p.c.constant ? table : 0);
    for (C** each : {&dskip, &dbias}) *each = take(p.block);
    for (C** each : {&b, &c}) *each = take(kScanChunk * p.states);
    for (C** each : {&db, &dc}) *each = take(kScanChunk * p.states * kWidth);
    rows = take(kRows * kScanChunk * kWidth);
    before = take((kScanChunk + 1) * kBackwardBlock * kWidth);
    decays = take(kScanChunk * kBackwardBlock * kWidth);
  }
  C* row(Row of, int64_t t) const { return rows + (of * kScanChunk + t) * kWidth; }

  static int64_t elements(const Selective& p) {
    return p.states * p.block * (3 + 2 * (p.b.constant + p.c.constant)) + 2 * p.block +
           2 * kScanChunk * p.states * (1 + kWidth) +
           (kScanChunk * kRows + (2 * kScanChunk + 1) * kBackwardBlock) * kWidth;
  }
};

// The states before and after each step of a chunk and their decays, of some states of a vector of
// channels, from the states before the chunk.
template <int64_t kStates, class C, class B>
[[gnu::noinline]] void recompute(int64_t steps, const C* decay, const C* dt, const C* input, B b,
                                 C* states, C* decays) {
  constexpr int kWidth = Vec<C>::kWidth;
  Vec<C> h[kStates];
#pragma GCC unroll 16
  for (int64_t n = 0; n < kStates; ++n) h[n] = load(states + n * kWidth);
  for (int64_t t = 0; t < steps; ++t) {
    const Vec<C> step = load(dt + t * kWidth), x = load(input + t * kWidth);
#pragma GCC unroll 16
    for (int64_t n = 0; n < kStates; ++n) {
      const Vec<C> a = decay_of(step * load(decay + n * kWidth));
      h[n] = fma(a, h[n], x * b.at(t, n));
      store(decays + (t * kStates + n) * kWidth, a);
      store(states + ((t + 1) * kStates + n) * kWidth, h[n]);
    }
  }
}

// Sums of dB or dC: for each step, or over all of them.
template <class C>
struct Sums {
  C* data;
  int64_t step;  // elements between steps, 0 of constants

  OMNIATTN_INLINE void add(int64_t t, int64_t n, Vec<C> a, Vec<C> b) const {
    C* const at = data + t * step + n * Vec<C>::kWidth;
    store(at, fma(a, b, load(at)));
  }
};

// One chunk of some states of a vector of channels, backward. Adds to the sums over states: of dh h
// a A log2 e for d dt (kOfDecay), of dh B (kOfInput), of C h (kY).
template <int64_t kStates, class C, class B, class R>
[[gnu::noinline]] void go_back(int64_t steps, const BackwardMemory<C>& m, const C* decay, B b, R c,
                               C* gradient, C* ddecay, Sums<C> db, Sums<C> dc) {
  using Memory = BackwardMemory<C>;
  constexpr int kWidth = Vec<C>::kWidth;
  Vec<C> dh[kStates], da[kStates];
#pragma GCC unroll 16
  for (int64_t n = 0; n < kStates; ++n) {
    dh[n] = load(gradient + n * kWidth);
    da[n] = load(ddecay + n * kWidth);
  }
  for (int64_t t = steps - 1; t >= 0; --t) {
    const Vec<C> dt = load(m.row(Memory::kDt, t)), x = load(m.row(Memory::kInput, t));
    const Vec<C> dy = load(m.row(Memory::kGrad, t));
    Vec<C> of_decay = load(m.row(Memory::kOfDecay, t)), y = load(m.row(Memory::kY, t));
    Vec<C> of_input = load(m.row(Memory::kOfInput, t));
#pragma GCC unroll 16
    for (int64_t n = 0; n < kStates; ++n) {
      const Vec<C> h = load(m.before + ((t + 1) * kStates + n) * kWidth), weight = c.at(t, n);
      dh[n] = fma(dy, weight, dh[n]);
      y = fma(h, weight, y);
      dc.add(t, n, dy, h);
      db.add(t, n, dh[n], x);
      of_input = fma(dh[n], b.at(t, n), of_input);
      dh[n] = dh[n] * load(m.decays + (t * kStates + n) * kWidth);
      const Vec<C> kept = dh[n] * load(m.before + (t * kStates + n) * kWidth);
      of_decay = fma(kept, load(decay + n * kWidth), of_decay);
      da[n] = fma(kept, dt, da[n]);
    }
    store(m.row(Memory::kOfDecay, t), of_decay);
    store(m.row(Memory::kOfInput, t), of_input);
    store(m.row(Memory::kY, t), y);
  }
#pragma GCC unroll 16
  for (int64_t n = 0; n < kStates; ++n) {
    store(gradient + n * kWidth, dh[n]);
    store(ddecay + n * kWidth, da[n]);
  }
}

template <class T>
struct Backward {
  using C = compute_t<T>;
  using Memory = BackwardMemory<C>;
  static constexpr int kWidth = Vec<C>::kWidth;
  const SelectiveBackwardParams& params;
  const Selective& p;
  Item<T> x;
  Memory m;

  Backward(const SelectiveBackwardParams& all, C* memory, int64_t item)
      : params(all), p(all.scan), x(p, item), m(p, memory) {}

  void begin() const {
    const int64_t table = p.states * p.block;
    x.load_tables(p.decay, 0, kLog2E, m.decay);
    x.load_tables(params.grad_final_state, x.sequence, 1, m.gradient);
    x.load_constants(p.b, m.b_table);
    x.load_constants(p.c, m.c_table);
    clear(m.ddecay, table);
    clear(m.db_table, p.b.constant ? table : 0);
    clear(m.dc_table, p.c.constant ? table : 0);
    clear(m.dskip, p.block);
    clear(m.dbias, p.block);
  }

  // What the steps of a chunk of a vector of channels need, and zeros for the sums over states.
  void prepare(int64_t t, int64_t steps, int64_t i, auto part) const {
    for (int64_t j = 0; j < steps; ++j) {
      const auto dt = x.step_of(i, part, x.row(p.delta, t + j));
      const Vec<C> u = part.load(x.row(p.u, t + j) + i);
      Vec<C> dy = part.load(x.row(params.grad_y, t + j) + i);
      if (p.z.data != nullptr) {
        const auto gate = scan_rules::silu(part.load(x.row(p.z, t + j) + i));
        store(m.row(Memory::kGate, j), dy * gate.slope);
        dy = dy * gate.value;
      }
      store(m.row(Memory::kDt, j), dt.value);
      store(m.row(Memory::kSlope, j), dt.slope);
      store(m.row(Memory::kU, j), u);
      store(m.row(Memory::kInput, j), dt.value * u);
      store(m.row(Memory::kGrad, j), dy);
      for (const auto row : {Memory::kOfDecay, Memory::kOfInput, Memory::kY}) {
        store(m.row(row, j), zero<C>());
      }
    }
  }

  void walk(int64_t t, int64_t steps, int64_t i, auto part) const {
    const int64_t slot = x.s.slot + t / kScanChunk, of_vector = i * p.states;
    with_weights(p, m.b, m.b_table, m.c, m.c_table, i, [&](auto b, auto c) {
      const auto block = [&](int64_t n, auto count) {
        constexpr int64_t kStates = decltype(count)::value;
        for (int64_t k = 0; k < kStates; ++k) {
          const C* const before = x.row_of(params.states, slot, p.states, n + k) + i;
          store(m.before + k * kWidth, part.load(before));
        }
        const int64_t at = of_vector + n * kWidth;
        const Sums<C> db = p.b.constant ? Sums<C>{m.db_table + at, 0}
                                        : Sums<C>{m.db + n * kWidth, p.states * kWidth};
        const Sums<C> dc = p.c.constant ? Sums<C>{m.dc_table + at, 0}
                                        : Sums<C>{m.dc + n * kWidth, p.states * kWidth};
        recompute<kStates>(steps, m.decay + at, m.row(Memory::kDt, 0), m.row(Memory::kInput, 0),
                           b.from(n), m.before, m.decays);
        go_back<kStates>(steps, m, m.decay + at, b.from(n), c.from(n), m.gradient + at,
                         m.ddecay + at, db, dc);
      };
      for_states<kBackwardBlock>(p.states, block);
    });
  }

  void finish(int64_t t, int64_t steps, int64_t i, auto part) const {
    const Vec<C> skip = p.skip != nullptr ? part.load(x.vector(p.skip) + i) : zero<C>();
    Vec<C> dskip = load(m.dskip + i), dbias = load(m.dbias + i);
    for (int64_t j = steps - 1; j >= 0; --j) {
      const auto of = [&](typename Memory::Row row) { return load(m.row(row, j)); };
      const Vec<C> u = of(Memory::kU), dy = of(Memory::kGrad), of_input = of(Memory::kOfInput);
      const Vec<C> ddelta = fma(of(Memory::kOfDecay), Vec<C>(static_cast<C>(kLn2)), of_input * u) *
                            of(Memory::kSlope);
      part.store(x.row(params.du, t + j) + i, fma(of_input, of(Memory::kDt), skip * dy));
      part.store(x.row(params.ddelta, t + j) + i, ddelta);
      if (p.z.data != nullptr) {
        part.store(x.row(params.dz, t + j) + i, of(Memory::kGate) * fma(skip, u, of(Memory::kY)));
      }
      dskip = fma(dy, u, dskip);
      dbias = dbias + ddelta;
    }
    store(m.dskip + i, dskip);
    store(m.dbias + i, dbias);
  }

  // The sums over the channels of the item, of the steps of a chunk.
  void sum_lanes(const C* sums, int64_t t, int64_t steps, void* out) const {
    if (out == nullptr) return;
    const int64_t rows = p.rows.steps * (p.rows.boundaries == nullptr ? p.rows.sequences : 1);
    for (int64_t j = 0; j < steps; ++j) {
      const int64_t row = x.block * rows + x.s.batch * p.rows.steps + x.s.begin + t + j;
      C* const to = static_cast<C*>(out) + (row * p.groups + x.group) * p.states;
      for (int64_t n = 0; n < p.states; n += kWidth) {
        Vec<C> lanes[kWidth];
#pragma GCC unroll 16
        for (int64_t k = 0; k < kWidth; ++k) {
          const bool is_there = n + k < p.states;
          lanes[k] = is_there ? load(sums + (j * p.states + n + k) * kWidth) : zero<C>();
        }
        transpose(lanes);
#pragma GCC unroll 4
        for (int64_t half = kWidth / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
          for (int64_t k = 0; k < half; ++k) lanes[k] = lanes[k] + lanes[k + half];
        }
        store_n(to + n, lanes[0], p.states - n);
      }
    }
  }

  void end() const {
    const int64_t rows = selective_rows(p);
    const auto put = [&](int64_t row, auto value_at) {
      C* const to = x.row_of(params.partial, x.sequence, rows, row);
      for_row<C>(x.width, [&](int64_t i, auto part) { part.store(to + i, value_at(i)); });
    };
    const auto put_table = [&](int64_t row, const C* table) {
      for (int64_t n = 0; n < p.states; ++n) {
        put(row + n, [&](int64_t i) { return load(table + i * p.states + n * kWidth); });
      }
    };
    put_table(0, m.ddecay);
    put(p.states, [&](int64_t i) { return load(m.dskip + i); });
    put(p.states + 1, [&](int64_t i) { return load(m.dbias + i); });
    if (p.b.constant) put_table(selective_row_of_b(p), m.db_table);
    if (p.c.constant) put_table(selective_row_of_c(p), m.dc_table);
    x.store_tables(m.gradient, params.dinitial_state, x.sequence);
  }

  void run() const {
    begin();
    for (int64_t t = round_up(x.s.count, kScanChunk) - kScanChunk; t >= 0; t -= kScanChunk) {
      const int64_t steps = smaller(kScanChunk, x.s.count - t);
      x.load_weights(p.b, t, steps, m.b);
      x.load_weights(p.c, t, steps, m.c);
      clear(m.db, steps * p.states * kWidth);
      clear(m.dc, steps * p.states * kWidth);
      for_row<C>(x.width, [&](int64_t i, auto part) {
        prepare(t, steps, i, part);
        walk(t, steps, i, part);
        finish(t, steps, i, part);
      });
      sum_lanes(m.db, t, steps, params.db);
      sum_lanes(m.dc, t, steps, params.dc);
    }
    end();
  }
};

int64_t bytes(const Selective& p) {
  return p.dtype == DType::f64 ? ForwardMemory<double>::elements(p) * 8
                               : ForwardMemory<float>::elements(p) * 4;
}
int64_t backward_bytes(const Selective& p) {
  return p.dtype == DType::f64 ? BackwardMemory<double>::elements(p) * 8
                               : BackwardMemory<float>::elements(p) * 4;
}

void forward(const SelectiveParams& p, void* memory, int64_t begin, int64_t end) {
  const FlushDenormals flush;
  dispatch(p.scan.dtype, [&]<class T>(T) {
    for (int64_t i = begin; i < end; ++i) {
      forward_item<T>(p, static_cast<compute_t<T>*>(memory), i);
    }
  });
}
void backward(const SelectiveBackwardParams& p, void* memory, int64_t begin, int64_t end) {
  const FlushDenormals flush;
  dispatch(p.scan.dtype, [&]<class T>(T) {
    for (int64_t i = begin; i < end; ++i) {
      Backward<T>(p, static_cast<compute_t<T>*>(memory), i).run();
    }
  });
}

}  // namespace

extern const SelectiveKernels selective_kernels_table;
const SelectiveKernels selective_kernels_table{bytes, forward, backward_bytes, backward};

}  // namespace omniattn::OMNIATTN_ISA
