// The selective scan on the CPU, backward, see selective.h. Goes back chunk by chunk. For each
// vector of channels and a few of its states, it recomputes the states of the chunk and walks their
// gradients back through it; sums of dB and dC are kept per lane.
#include "kernels/scan/selective_item.h"
#include "runtime/assert.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

constexpr int kMostStates = 8;  // with their gradients, in registers
constexpr double kLn2 = 0.69314718055994531;

template <class C>
void clear(C* to, int64_t n) {
  for (int64_t i = 0; i < n; i += Vec<C>::kWidth) store(to + i, zero<C>());
}

// Memory of the backward. For all vectors of channels: tables as in the forward, gradients of the
// states, and sums over time. For a chunk: B and C, and of each lane dB and dC, and the gradient of
// |B|^2 in Longhorn's step sizes. For one vector of
// channels and a chunk: inputs of its steps, and states and decays of a block of states.
template <class C>
struct BackwardMemory {
  enum Row { kDt, kInput, kU, kSlope, kGrad, kGate, kOfDecay, kOfInput, kY, kRows };
  static constexpr int kWidth = Vec<C>::kWidth;
  C *decay, *gradient, *ddecay, *b_table, *c_table, *db_table, *dc_table, *dskip, *dbias;
  C *b, *c, *db, *dc, *of_square, *rows, *before, *decays;

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
    of_square = take(kScanChunk * kWidth);
    rows = take(kRows * kScanChunk * kWidth);
    before = take((kScanChunk + 1) * kMostStates * kWidth);
    decays = take(kScanChunk * kMostStates * kWidth);
  }
  C* row(Row of, int64_t t) const { return rows + (of * kScanChunk + t) * kWidth; }

  static int64_t elements(const Selective& p) {
    return p.states * p.block * (3 + 2 * (p.b.constant + p.c.constant)) + 2 * p.block +
           2 * kScanChunk * p.states * (1 + kWidth) +
           (kScanChunk * (kRows + 1) + (2 * kScanChunk + 1) * kMostStates) * kWidth;
  }
};

// Recomputes the states before and after each step of a chunk, and their decays, for some states of
// a vector of channels, from the states before the chunk.
template <SelectiveRule kRule, int64_t kStates, class C, class B>
[[gnu::noinline]] void recompute(int64_t steps, const C* decay, const C* dt, const C* input, B b,
                                 C* states, C* decays) {
  constexpr int kWidth = Vec<C>::kWidth;
  constexpr int64_t kParts = Rule<kRule>::parts;
  Vec<C> h[kStates];
#pragma GCC unroll 16
  for (int64_t n = 0; n < kStates; ++n) h[n] = load(states + n * kWidth);
  for (int64_t t = 0; t < steps; ++t) {
    const Vec<C> step = load(dt + t * kWidth), x = load(input + t * kWidth);
#pragma GCC unroll 16
    for (int64_t n = 0; n < kStates; n += kParts) {
      const auto a = decay_at<kRule>(step, decay + n * kWidth, b.at(t, n));
      move_on<kRule>(h + n, a, x, b.at(t, n), b.at(t, n + kParts - 1));
      store(decays + (t * kStates + n) * kWidth, a.re);
      if constexpr (kParts == 2) store(decays + (t * kStates + n + 1) * kWidth, a.im);
#pragma GCC unroll 2
      for (int64_t k = n; k < n + kParts; ++k) {
        store(states + ((t + 1) * kStates + k) * kWidth, h[k]);
      }
    }
  }
}

// Sums of dB or dC, for each step or over all steps.
template <class C>
struct Sums {
  C* data;
  int64_t step;  // elements between steps; 0 for constants

  OMNIATTN_INLINE void add(int64_t t, int64_t n, Vec<C> a, Vec<C> b) const {
    C* const at = data + t * step + n * Vec<C>::kWidth;
    store(at, fma(a, b, load(at)));
  }
};

// Backward of h = a h' for one state or a pair: dh becomes the gradient of h'; of_exponent is the
// gradient of dt A, the product of this gradient and the conjugate of h', or that of a = 1 - dt
// B^2.
template <SelectiveRule kRule, class C>
OMNIATTN_INLINE void decay_back(const C* decays, const C* before, Vec<C>* dh, Vec<C>* of_exponent) {
  constexpr int kWidth = Vec<C>::kWidth;
  const Vec<C> a = load(decays), h = load(before);
  if constexpr (kRule == SelectiveRule::longhorn) {
    of_exponent[0] = dh[0] * h;
    dh[0] = dh[0] * a;
  } else if constexpr (kRule == SelectiveRule::decay) {
    dh[0] = dh[0] * a;
    of_exponent[0] = dh[0] * h;
  } else {
    const Vec<C> a_im = load(decays + kWidth), h_im = load(before + kWidth);
    const Vec<C> re = dh[0], im = dh[1];
    dh[0] = fma(a, re, a_im * im);
    dh[1] = fma(a, im, -a_im * re);
    of_exponent[0] = fma(h, dh[0], h_im * dh[1]);
    of_exponent[1] = fma(h, dh[1], -h_im * dh[0]);
  }
}

// Backward of one chunk of some states of a vector of channels. Adds to three
// sums over states: the gradients of dt A times the table of A, or of decays times -B^2, for ddt
// (kOfDecay); dh B (kOfInput); C h (kY).
template <SelectiveRule kRule, int64_t kStates, class C, class B, class R>
[[gnu::noinline]] void go_back(int64_t steps, const BackwardMemory<C>& m, const C* decay, B b, R c,
                               C* gradient, C* ddecay, Sums<C> db, Sums<C> dc) {
  using Memory = BackwardMemory<C>;
  constexpr int kWidth = Vec<C>::kWidth;
  constexpr int64_t kParts = Rule<kRule>::parts;
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
    for (int64_t n = 0; n < kStates; n += kParts) {
#pragma GCC unroll 2
      for (int64_t k = n; k < n + kParts; ++k) {
        const Vec<C> h = load(m.before + ((t + 1) * kStates + k) * kWidth), weight = c.at(t, k);
        dh[k] = fma(dy, weight, dh[k]);
        y = fma(h, weight, y);
        dc.add(t, k, dy, h);
        db.add(t, k, dh[k], x);
        of_input = fma(dh[k], b.at(t, k), of_input);
      }
      Vec<C> kept[kParts];
      const int64_t at = (t * kStates + n) * kWidth;
      decay_back<kRule>(m.decays + at, m.before + at, dh + n, kept);
      if constexpr (kRule == SelectiveRule::longhorn) {
        const Vec<C> weight = b.at(t, n), of_weight = -kept[0] * weight;
        of_decay = fma(of_weight, weight, of_decay);
        db.add(t, n, of_weight, dt + dt);
        continue;
      }
#pragma GCC unroll 2
      for (int64_t k = 0; k < kParts; ++k) {
        of_decay = fma(kept[k], load(decay + (n + k) * kWidth), of_decay);
        da[n + k] = fma(kept[k], dt, da[n + k]);
      }
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

// The part of the backward that works on states, in C whatever the dtype of rows.
template <class C>
struct BackwardStates {
  static constexpr int kWidth = Vec<C>::kWidth;
  const SelectiveBackwardParams& params;
  const Selective& p;
  const ItemStates<C>& x;
  const BackwardMemory<C>& m;

  void begin() const {
    const int64_t table = p.states * p.block;
    x.load_tables(p.decay, 0, scale_of_decays(p), m.decay);
    x.load_tables(params.grad_final_state, x.sequence, 1, m.gradient);
    x.load_constants(p.b, m.b_table);
    x.load_constants(p.c, m.c_table);
    clear(m.ddecay, table);
    clear(m.db_table, p.b.constant ? table : 0);
    clear(m.dc_table, p.c.constant ? table : 0);
    clear(m.dskip, p.block);
    clear(m.dbias, p.block);
  }

  // Walks the vector of channels from i on.
  [[gnu::noinline]] void walk(int64_t t, int64_t steps, int64_t i) const {
    using Memory = BackwardMemory<C>;
    const int64_t slot = x.s.slot + t / kScanChunk, of_vector = i * p.states;
    const int64_t lanes = smaller(kWidth, x.width - i);
    with_weights(p, m.b, m.b_table, m.c, m.c_table, i, [&](auto b, auto c) {
      const auto block = [&](int64_t n, auto rule, auto count) {
        constexpr int64_t kStates = decltype(count)::value;
        for (int64_t k = 0; k < kStates; ++k) {
          const C* const before = x.row_of(params.states, slot, p.states, n + k) + i;
          store(m.before + k * kWidth, load_n(before, lanes));
        }
        const int64_t at = of_vector + n * kWidth;
        const Sums<C> db = p.b.constant ? Sums<C>{m.db_table + at, 0}
                                        : Sums<C>{m.db + n * kWidth, p.states * kWidth};
        const Sums<C> dc = p.c.constant ? Sums<C>{m.dc_table + at, 0}
                                        : Sums<C>{m.dc + n * kWidth, p.states * kWidth};
        recompute<rule.value, kStates>(steps, m.decay + at, m.row(Memory::kDt, 0),
                                       m.row(Memory::kInput, 0), b.from(n), m.before, m.decays);
        go_back<rule.value, kStates>(steps, m, m.decay + at, b.from(n), c.from(n), m.gradient + at,
                                     m.ddecay + at, db, dc);
      };
      for_blocks<kMostStates>(p, block);
    });
  }

  // Sums over the channels of the item, for each step of a chunk. `of_square` is the gradient of
  // |B|^2 in each lane and step, or null.
  void sum_lanes(const C* sums, const C* of_square, int64_t t, int64_t steps, void* out) const {
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
        if (of_square != nullptr) {
          const Vec<C> twice(2 * reduce_add(load(of_square + j * kWidth)));
          lanes[0] = fma(twice, load_n(m.b + j * p.states + n, p.states - n), lanes[0]);
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
};

template <class T>
struct Backward {
  using C = compute_t<T>;
  using Memory = BackwardMemory<C>;
  const SelectiveBackwardParams& params;
  const Selective& p;
  Item<T> x;
  Memory m;

  Backward(const SelectiveBackwardParams& all, C* memory, int64_t item)
      : params(all), p(all.scan), x(p, item), m(p, memory) {}

  // Stores the inputs of a chunk's steps for a vector of channels; zeroes the sums over states.
  void prepare(int64_t t, int64_t steps, int64_t i, auto part) const {
    for (int64_t j = 0; j < steps; ++j) {
      const auto dt = x.step_of(i, part, x.row(p.delta, t + j), x.square_of(m.b + j * p.states));
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

  // Lines of steps are far apart and share few sets of L1, so whole lines bypass it.
  OMNIATTN_INLINE static void put(T* to, auto part, Vec<C> value) {
    constexpr int64_t kLine = 64;
    const bool whole =
        Vec<C>::kWidth * sizeof(T) == kLine && reinterpret_cast<uintptr_t>(to) % kLine == 0;
    whole ? part.stream(to, value) : part.store(to, value);
  }

  void finish(int64_t t, int64_t steps, int64_t i, auto part) const {
    const Vec<C> skip = p.skip != nullptr ? part.load(x.vector(p.skip) + i) : zero<C>();
    // Undoes the scale of the table of A.
    const Vec<C> unscaled = static_cast<C>(p.rule == SelectiveRule::decay ? kLn2 : 1);
    Vec<C> dskip = load(m.dskip + i), dbias = load(m.dbias + i);
    for (int64_t j = steps - 1; j >= 0; --j) {
      const auto of = [&](typename Memory::Row row) { return load(m.row(row, j)); };
      const Vec<C> u = of(Memory::kU), dy = of(Memory::kGrad), of_input = of(Memory::kOfInput);
      const Vec<C> ddt = fma(of(Memory::kOfDecay), unscaled, of_input * u);
      const Vec<C> ddelta = ddt * of(Memory::kSlope);
      if (p.rule == SelectiveRule::longhorn) {
        const Vec<C> dt = of(Memory::kDt);
        C* const sum = m.of_square + j * Vec<C>::kWidth;
        store(sum, fma(-ddt * dt, dt, load(sum)));
      }
      put(x.row(params.du, t + j) + i, part, fma(of_input, of(Memory::kDt), skip * dy));
      put(x.row(params.ddelta, t + j) + i, part, ddelta);
      if (p.z.data != nullptr) {
        put(x.row(params.dz, t + j) + i, part, of(Memory::kGate) * fma(skip, u, of(Memory::kY)));
      }
      dskip = fma(dy, u, dskip);
      dbias = dbias + ddelta;
    }
    store(m.dskip + i, dskip);
    store(m.dbias + i, dbias);
  }

  void run() const {
    const BackwardStates<C> states{params, p, x, m};
    states.begin();
    for (int64_t t = round_up(x.s.count, kScanChunk) - kScanChunk; t >= 0; t -= kScanChunk) {
      const int64_t steps = smaller(kScanChunk, x.s.count - t);
      x.load_weights(p.b, t, steps, m.b);
      x.load_weights(p.c, t, steps, m.c);
      clear(m.db, steps * p.states * x.kWidth);
      clear(m.dc, steps * p.states * x.kWidth);
      clear(m.of_square, steps * x.kWidth);
      for_row<C>(x.width, [&](int64_t i, auto part) {
        prepare(t, steps, i, part);
        states.walk(t, steps, i);
        finish(t, steps, i, part);
      });
      const bool has_square = p.rule == SelectiveRule::longhorn;
      states.sum_lanes(m.db, has_square ? m.of_square : nullptr, t, steps, params.db);
      states.sum_lanes(m.dc, nullptr, t, steps, params.dc);
    }
    states.end();
  }
};

int64_t bytes(const Selective& p) {
  int64_t bytes = 0;
  dispatch_compute(p.dtype, [&]<class C>(C) {
    bytes = BackwardMemory<C>::elements(p) * static_cast<int64_t>(sizeof(C));
  });
  return bytes;
}

void backward(const SelectiveBackwardParams& p, void* memory, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, p.scan.items());
  OMNIATTN_ASSERT_HAS(memory, bytes(p.scan));
  const FlushDenormals flush;
  dispatch(p.scan.dtype, [&]<class T>(T) {
    for (int64_t i = begin; i < end; ++i) {
      Backward<T>(p, static_cast<compute_t<T>*>(memory), i).run();
    }
  });
  stream_fence();
}

}  // namespace

extern const SelectiveBackwardKernels selective_backward_kernels_table;
const SelectiveBackwardKernels selective_backward_kernels_table{bytes, backward};

}  // namespace omniattn::OMNIATTN_ISA
