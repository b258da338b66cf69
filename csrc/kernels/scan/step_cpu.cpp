// One token of the states of Mamba and Mamba-2, see step.h. Vectors run along the contiguous
// dimension of the states: along the states of a row, whose products with C are summed over the
// lanes for a vector of rows at a time, or along rows.
#include "kernels/scan/step.h"

#include "kernels/scan/selective_item.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

constexpr int64_t kRows = 64;  // rows at a time
static_assert(kRows >= kStepHeads);

// States of some rows: their A (rate), their decay, or dt if the decay depends on the state, their
// inputs dt x, and their sums for y.
template <class C>
struct StateRows {
  int64_t count, states;
  const C *rate, *decay, *input, *before;
  C *state, *sums;
};

// One step of the states [n, n + kVecs vectors) of all rows.
template <StepRule kRule, int kVecs, class T, class C>
void advance(const StateRows<C>& r, int64_t n, const T* b_row, const T* c_row, auto part) {
  constexpr int64_t kWidth = Vec<C>::kWidth;
  Vec<C> b[kVecs], c[kVecs], rows[kWidth];
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) {
    b[v] = part.load(b_row + n + v * kWidth), c[v] = part.load(c_row + n + v * kWidth);
  }
  C parts[kWidth * kWidth];
  for (int64_t first = 0; first < r.count; first += kWidth) {
    for (int64_t j = 0; j < kWidth; ++j) {
      Vec<C> sum = zero<C>();
      if (first + j < r.count) {
        const int64_t row = first + j;
        const Vec<C> input(r.input[row]), decay(r.decay[row]);
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
          const int64_t at = row * r.states + n + v * kWidth;
          Vec<C> a = decay, h = zero<C>();
          if constexpr (kRule == StepRule::of_states) {
            a = decay_of(decay * (part.load(r.rate + at) * Vec<C>(static_cast<C>(kLog2E))));
          } else if constexpr (kRule == StepRule::longhorn) {
            a = fma(-decay * b[v], b[v], Vec<C>(C(1)));
          }
          if (r.before != nullptr) h = part.load(r.before + at);
          h = fma(a, h, input * b[v]);
          part.store(r.state + at, h);
          sum = fma(h, c[v], sum);
        }
      }
      store(parts + j * kWidth, part.zero_beyond(sum));
    }
#pragma GCC unroll 16
    for (int64_t j = 0; j < kWidth; ++j) rows[j] = load(parts + j * kWidth);
    transpose(rows);
    Vec<C> total = load(r.sums + first);
#pragma GCC unroll 16
    for (int64_t j = 0; j < kWidth; ++j) total = total + rows[j];
    store(r.sums + first, total);
  }
}
template <StepRule kRule, class T, class C>
void advance_all(const StateRows<C>& r, const T* b, const T* c) {
  constexpr int64_t kWidth = Vec<C>::kWidth;
  int64_t n = 0;
  for (; n + 4 * kWidth <= r.states; n += 4 * kWidth) {
    advance<kRule, 4>(r, n, b, c, Whole{});
  }
  for (; n + 2 * kWidth <= r.states; n += 2 * kWidth) {
    advance<kRule, 2>(r, n, b, c, Whole{});
  }
  for_row<C>(r.states - n, [&](int64_t i, auto part) { advance<kRule, 1>(r, n + i, b, c, part); });
}

// One step of states (N, P) of `width` rows, for the vectors of rows from j on.
template <int kVecs, class T, class C>
OMNIATTN_INLINE void columns(const StateRows<C>& r, int64_t width, int64_t j, const T* b,
                             const T* c, auto part) {
  constexpr int64_t kWidth = Vec<C>::kWidth;
  const Vec<C> decay(r.decay[0]);
  Vec<C> input[kVecs], sum[kVecs];
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) {
    input[v] = load(r.input + j + v * kWidth), sum[v] = zero<C>();
  }
  for (int64_t n = 0; n < r.states; ++n) {
    const Vec<C> of_b(widen(b[n])), of_c(widen(c[n]));
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      const int64_t at = n * width + j + v * kWidth;
      Vec<C> h = r.before == nullptr ? zero<C>() : part.load(r.before + at);
      h = fma(decay, h, input[v] * of_b);
      part.store(r.state + at, h);
      sum[v] = fma(h, of_c, sum[v]);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) store(r.sums + j + v * kWidth, sum[v]);
}
template <class T, class C>
void advance_columns(const StateRows<C>& r, int64_t width, const T* b, const T* c) {
  constexpr int64_t kWidth = Vec<C>::kWidth;
  int64_t j = 0;
  for (; j + 4 * kWidth <= r.count; j += 4 * kWidth) columns<4>(r, width, j, b, c, Whole{});
  for_row<C>(r.count - j, [&](int64_t i, auto part) { columns<1>(r, width, j + i, b, c, part); });
}

// One batch entry.
template <class T>
struct Step {
  using C = compute_t<T>;
  static constexpr int64_t kRoom = kRows + Vec<C>::kWidth;
  const StateStep& p;
  int64_t entry;
  C decay[kRoom], input[kRoom], sums[kRoom];

  const T* row(const StepRows& x) const { return static_cast<const T*>(x.data) + entry * x.batch; }
  // dt of the heads from `head` on.
  Vec<C> step_of(int64_t head, auto part, C square = 0) const {
    Vec<C> x = part.load(row(p.dt) + head);
    if (p.bias != nullptr) x = x + part.load(static_cast<const C*>(p.bias) + head);
    if (p.rule == StepRule::longhorn) return scan_rules::longhorn_step(x, Vec<C>(square)).value;
    if (p.softplus) x = scan_rules::softplus(x).value;
    // NaN stays NaN: min and max return the second argument.
    return min(Vec<C>(static_cast<C>(p.largest)), max(Vec<C>(static_cast<C>(p.least)), x));
  }
  StateRows<C> rows(int64_t count, int64_t first, int64_t offset) {
    const int64_t at = entry * p.heads * p.width * p.states + offset;
    return {
        .count = count,
        .states = p.states,
        .rate = p.decay == nullptr ? nullptr : static_cast<const C*>(p.decay) + first * p.states,
        .decay = decay,
        .input = input,
        .before = p.before == nullptr ? nullptr : static_cast<const C*>(p.before) + at,
        .state = static_cast<C*>(p.state) + at,
        .sums = sums};
  }
  // Stores y of `count` rows from `first` on; `skip` is D of the first row.
  void store_rows(int64_t first, int64_t count, const C* skip) const {
    T* const y = static_cast<T*>(p.y) + entry * p.heads * p.width + first;
    for_row<C>(count, [&](int64_t i, auto part) {
      Vec<C> sum = load(sums + i);
      if (skip != nullptr) {
        const Vec<C> d = p.skip_of_rows ? part.load(skip + i) : Vec<C>(*skip);
        sum = fma(d, part.load(row(p.x) + first + i), sum);
      }
      if (p.z.data != nullptr) {
        sum = sum * scan_rules::silu(part.load(row(p.z) + first + i)).value;
      }
      part.store(y + i, sum);
    });
  }

  // Steps channels of a group, with a decay for each state.
  void move_channels(int64_t group, int64_t first, int64_t count) {
    const T *const b = row(p.b) + group * p.states, *const c = row(p.c) + group * p.states;
    const bool is_longhorn = p.rule == StepRule::longhorn;
    C square = 0;
    for (int64_t n = 0; is_longhorn && n < p.states; ++n) square += widen(b[n]) * widen(b[n]);
    for_row<C>(count, [&](int64_t i, auto part) {
      const Vec<C> dt = step_of(first + i, part, square);
      store(decay + i, dt);
      store(input + i, dt * part.load(row(p.x) + first + i));
      store(sums + i, zero<C>());
    });
    const StateRows<C> of_channels = rows(count, first, first * p.states);
    is_longhorn ? advance_all<StepRule::longhorn>(of_channels, b, c)
                : advance_all<StepRule::of_states>(of_channels, b, c);
    store_rows(first, count, p.skip == nullptr ? nullptr : static_cast<const C*>(p.skip) + first);
  }

  void move_head(int64_t head) {
    const int64_t group = head / p.group_heads() * p.states;
    const T *const b = row(p.b) + group, *const c = row(p.c) + group;
    const Vec<C> steps = step_of(head, First{1});
    store(decay, steps);
    const Vec<C> dt(decay[0]);
    const Vec<C> a = exp(dt * Vec<C>(static_cast<const C*>(p.decay)[head]));
    for (int64_t r = 0; r < p.width; r += kRows) {
      const int64_t count = smaller(kRows, p.width - r), first = head * p.width + r;
      for_row<C>(count, [&](int64_t i, auto part) {
        store(decay + i, a);
        store(input + i, dt * part.load(row(p.x) + first + i));
        store(sums + i, zero<C>());
      });
      if (p.states_first) {
        advance_columns(rows(count, 0, head * p.width * p.states + r), p.width, b, c);
      } else {
        advance_all<StepRule::of_head>(rows(count, 0, first * p.states), b, c);
      }
      const C* const skip = static_cast<const C*>(p.skip);
      store_rows(first, count, skip == nullptr ? nullptr : skip + (p.skip_of_rows ? first : head));
    }
  }

  void item(int64_t index) {
    if (p.rule == StepRule::of_head) {
      entry = index / p.heads;
      move_head(index % p.heads);
      return;
    }
    const int64_t of_group = p.group_heads(), blocks = ceil_div(of_group, kStepHeads);
    const int64_t group = index / blocks % p.groups, at = index % blocks * kStepHeads;
    entry = index / blocks / p.groups;
    move_channels(group, group * of_group + at, smaller(kStepHeads, of_group - at));
  }
};

void run(const StateStep& p, int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, step_items(p));
  const FlushDenormals flush;
  dispatch(p.dtype, [&]<class T>(T) {
    Step<T> step{p, 0, {}, {}, {}};
    for (int64_t i = begin; i < end; ++i) step.item(i);
  });
}

}  // namespace

extern const StateStepKernels state_step_kernels_table;
const StateStepKernels state_step_kernels_table{run};

}  // namespace omniattn::OMNIATTN_ISA
