// The selective scan on the CPU, see selective.h: channels are in the lanes of vectors, their
// states in registers. A few steps of a block of channels are read as rows; then the states of each
// vector walk over these steps, which stay in L1, so each state is loaded and stored once for them.
#include "kernels/scan/selective_item.h"
#include "runtime/assert.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

constexpr int64_t kTile = 8;                           // steps read at a time
constexpr int kMostStates = kVecBytes == 64 ? 16 : 8;  // in registers
static_assert(kScanChunk % kTile == 0);

// Memory of the forward: tables of decays (times log2 e), states and constants, and for each vector
// of channels dt, dt u and y of some steps.
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

// y += sum_n C h over `steps` steps, for some states of a vector of channels.
template <SelectiveRule kRule, int64_t kStates, class C, class B, class R>
[[gnu::noinline]] void advance(int64_t steps, const C* decay, const C* dt, const C* input, B b, R c,
                               C* state, C* y) {
  constexpr int kWidth = Vec<C>::kWidth;
  constexpr int64_t kParts = Rule<kRule>::parts;
  Vec<C> h[kStates];
#pragma GCC unroll 16
  for (int64_t n = 0; n < kStates; ++n) h[n] = load(state + n * kWidth);
  for (int64_t t = 0; t < steps; ++t) {
    const Vec<C> step = load(dt + t * kWidth), x = load(input + t * kWidth);
    Vec<C> even = load(y + t * kWidth), odd = zero<C>();
#pragma GCC unroll 16
    for (int64_t n = 0; n < kStates; n += kParts) {
      const auto a = decay_at<kRule>(step, decay + n * kWidth, b.at(t, n));
      move_on<kRule>(h + n, a, x, b.at(t, n), b.at(t, n + kParts - 1));
#pragma GCC unroll 2
      for (int64_t k = n; k < n + kParts; ++k) {
        Vec<C>& sum = k % 2 == 0 ? even : odd;
        sum = fma(h[k], c.at(t, k), sum);
      }
    }
    store(y + t * kWidth, even + odd);
  }
#pragma GCC unroll 16
  for (int64_t n = 0; n < kStates; ++n) store(state + n * kWidth, h[n]);
}

// Prefetches a share of the y of these steps and of the inputs of the next ones; each vector of
// channels takes another share. Rows of steps are pages apart, so the hardware does not prefetch
// them. Inline, since GCC drops calls to functions that only prefetch.
template <class T>
OMNIATTN_INLINE void fetch_ahead(const SelectiveParams& params, const Item<T>& x, int64_t t,
                                 int64_t steps, int64_t i) {
  const Selective& p = x.p;
  for (int64_t at = i * kTile; at < (i + x.kWidth) * kTile; at += 64 / int64_t{sizeof(T)}) {
    const int64_t now = t + at / x.width, next = now + steps, channel = at % x.width;
    if (now < t + steps) __builtin_prefetch(x.row(params.y, now) + channel, 1);
    if (next >= x.s.count) continue;
    prefetch(x.row(p.u, next) + channel);
    prefetch(x.row(p.delta, next) + channel);
    if (p.z.data != nullptr) prefetch(x.row(p.z, next) + channel);
  }
}

template <class T, class C = compute_t<T>>
void forward_rows(const SelectiveParams& params, const Item<T>& x, const ForwardMemory<C>& m,
                  int64_t t, int64_t steps) {
  const Selective& p = x.p;
  for (int64_t j = 0; j < steps; ++j) {
    const T *const delta = x.row(p.delta, t + j), *const u = x.row(p.u, t + j);
    const C square = x.square_of(m.b + j * p.states);
    for_row<C>(x.width, [&](int64_t i, auto part) {
      const int64_t at = i * kTile + j * x.kWidth;
      const Vec<C> dt = x.step_of(i, part, delta, square).value;
      store(m.dt + at, dt);
      store(m.input + at, dt * part.load(u + i));
      store(m.y + at, zero<C>());
    });
  }
  x.for_vectors([&](int64_t i, int64_t) {
    fetch_ahead(params, x, t, steps, i);
    with_weights(p, m.b, m.b_table, m.c, m.c_table, i, [&](auto b, auto c) {
      for_blocks<kMostStates>(p, [&](int64_t n, auto rule, auto count) {
        constexpr int64_t kStates = decltype(count)::value;
        const int64_t at = (i * p.states) + n * x.kWidth, rows = i * kTile;
        advance<rule.value, kStates>(steps, m.decay + at, m.dt + rows, m.input + rows, b.from(n),
                                     c.from(n), m.state + at, m.y + rows);
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
  x.load_tables(p.decay, 0, scale_of_decays(p), m.decay);
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

int64_t bytes(const Selective& p) {
  int64_t bytes = 0;
  dispatch_compute(p.dtype, [&]<class C>(C) {
    bytes = ForwardMemory<C>::elements(p) * static_cast<int64_t>(sizeof(C));
  });
  return bytes;
}

void forward(const SelectiveParams& p, void* memory, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, p.scan.items());
  OMNIATTN_ASSERT_HAS(memory, bytes(p.scan));
  const FlushDenormals flush;
  dispatch(p.scan.dtype, [&]<class T>(T) {
    for (int64_t i = begin; i < end; ++i) {
      forward_item<T>(p, static_cast<compute_t<T>*>(memory), i);
    }
  });
}

}  // namespace

extern const SelectiveKernels selective_kernels_table;
const SelectiveKernels selective_kernels_table{bytes, forward};

}  // namespace omniattn::OMNIATTN_ISA
