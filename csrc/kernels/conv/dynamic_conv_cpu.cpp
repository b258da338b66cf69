// Convolution by filters of each token, see dynamic_conv.h: a few steps at a time, one group of
// heads after another. A head with the channels of a vector or more is a group, whose taps are
// broadcast. The taps of narrower heads are first copied to rows of all channels of their group.
#include "kernels/conv/dynamic_conv.h"

#include "kernels/conv/conv_rows.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "semantics/activation_rules.h"
#include "semantics/arith.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Channels of a group of narrow heads, whose taps stay in L1.
constexpr int64_t kGroupChannels = 64;

// How the heads of a problem form groups.
template <class C>
struct Groups {
  int64_t width;             // channels of a head
  bool wide;                 // a group is one head, with a vector of channels or more
  int64_t heads;             // of a group
  int64_t channels, stride;  // of a group, and between rows of them
  int64_t rows;              // of taps of a step, K if they are copied

  explicit Groups(const DynamicConv& p)
      : width(p.width()),
        wide(width >= Vec<C>::kWidth),
        heads(wide ? 1 : larger(kGroupChannels / larger(width, int64_t{1}), int64_t{1})),
        channels(heads * width),
        stride(round_up(channels, int64_t{Vec<C>::kWidth})),
        rows(p.conv.taps) {}

  // Elements of the taps of kSteps steps.
  int64_t taps() const { return kSteps * rows * (wide ? 1 : stride); }
  int64_t products() const { return wide ? 0 : kSteps * rows * stride; }
};

// The steps [t, t + kSteps) of a sequence and a group of heads.
template <class T, int kTaps, bool kWide>
struct DynamicSteps {
  using C = compute_t<T>;
  using Inputs = ConvInputs<T, kTaps>;
  static constexpr bool kInside = Inputs::kInside;
  // Taps of narrow heads are rows of the compute type in natural order.
  static constexpr Order kOrder = kWide ? Order::any : Order::natural;

  const DynamicConv p;
  const Inputs inputs;
  const Groups<C> groups;
  const int64_t t;
  const Range steps;  // those that exist
  C* const taps;      // (kSteps, K), or (kSteps, K, stride)

  OMNIATTN_INLINE DynamicSteps(const DynamicConv& problem, const ConvSequence& s, int64_t first,
                               Range present, C* memory)
      : p(problem),
        inputs{problem.conv, s},
        groups(problem),
        t(first),
        steps(present),
        taps(memory) {}

  OMNIATTN_INLINE bool has(int64_t step) const {
    return kInside || (step >= steps.begin && step < steps.end);
  }
  // Index of the first tap of a head of step t + j.
  OMNIATTN_INLINE int64_t place(int j, int64_t head) const {
    return ((inputs.s.first + t + j) * p.heads + head) * inputs.taps;
  }
  // Calls f(first head, heads, first channel, channels) for each group.
  template <class F>
  OMNIATTN_INLINE void for_groups(const F& f) const {
    for (int64_t head = 0; head < p.heads; head += groups.heads) {
      const int64_t heads = smaller(groups.heads, p.heads - head);
      f(head, heads, head * groups.width, heads * groups.width);
    }
  }

  // Loads the taps of a group; missing steps have taps of 0.
  OMNIATTN_INLINE void load_taps(int64_t head, int64_t heads) const {
    const int64_t count = inputs.taps;
    for (int j = 0; j < kSteps; ++j) {
      const bool present = has(t + j);
      const T* const from = static_cast<const T*>(p.taps) + (present ? place(j, head) : 0);
      C* const to = taps + j * count * (kWide ? 1 : groups.stride);
      if constexpr (kWide) {
        for (int64_t k = 0; k < count; ++k) to[k] = present ? widen(from[k]) : C{0};
      } else {
        for (int64_t k = 0; k < count; ++k) {
          C* row = to + k * groups.stride;
          for (int64_t h = 0; h < heads; ++h, row += groups.width) {
            const C tap = present ? widen(from[h * count + k]) : C{0};
            for (int64_t i = 0; i < groups.width; ++i) row[i] = tap;
          }
        }
      }
    }
  }
  // Tap k of step t + j, for the channels of the group from i on.
  template <class V>
  OMNIATTN_INLINE V tap(int j, int64_t k, int64_t i, auto part) const {
    const int64_t row = j * inputs.taps + k;
    if constexpr (kWide) {
      return V(taps[row]);
    } else {
      return part.load(taps + row * groups.stride + i);
    }
  }
  // Sums s of the steps, for the channels from first + i on.
  OMNIATTN_INLINE auto sums(int64_t first, int64_t i, auto part) const {
    using V = decltype(part.load(inputs.row(0)));
    Steps<V> result(V(C(0)));
    inputs.for_taps(t, first + i, part, [&](int64_t k, const auto& x) {
#pragma GCC unroll 4
      for (int j = 0; j < kSteps; ++j) result[j] = fma(tap<V>(j, k, i, part), x[j], result[j]);
    });
    return result;
  }
};

template <class T, int kTaps, bool kWide>
[[gnu::noinline]] void forward_steps(const DynamicConvParams& p, const ConvSequence& s, int64_t t,
                                     int64_t last, void* memory, bool past_caches) {
  using C = compute_t<T>;
  using Steps = DynamicSteps<T, kTaps, kWide>;
  const Steps at(p.problem, s, t, {t, last}, static_cast<C*>(memory));
  const int64_t n = p.problem.conv.channels;
  T* const y = static_cast<T*>(p.y) + (s.first + t) * n;
  const bool silu = p.problem.conv.silu, residual = p.problem.residual;
  at.for_groups([&](int64_t head, int64_t heads, int64_t first, int64_t channels) {
    at.load_taps(head, heads);
    for_row<T, Steps::kOrder>(channels, [&](int64_t i, auto part) OMNIATTN_LAMBDA {
      const auto sums = at.sums(first, i, part);
#pragma GCC unroll 4
      for (int j = 0; j < kSteps; ++j) {
        if (!at.has(t + j)) break;
        auto sum = sums[j];
        if (silu) sum = lanewise([](auto v) { return activation_rules::Silu::at(v).value; }, sum);
        if (residual) sum = sum + part.load(at.inputs.row(t + j) + first + i);
        T* const to = y + j * n + first + i;
        past_caches ? part.stream(to, sum) : part.store(to, sum);
      }
    });
  });
}

template <class T, bool kWide>
void forward(const DynamicConvParams& p, void* memory, int64_t begin, int64_t end) {
  const CausalConv& conv = p.problem.conv;
  const bool past_caches = streams<T>(p.past_caches, p.y, p.problem.width());
  for_sequences(conv, 0, begin, end, [&](const ConvSequence& s, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t += kSteps) {
      const bool inside = conv.taps == kUsualTaps<T> && t >= conv.taps - 1 && t + kSteps <= last;
      (inside ? forward_steps<T, kUsualTaps<T>, kWide>
              : forward_steps<T, 0, kWide>)(p, s, t, last, memory, past_caches);
    }
  });
  if (past_caches) stream_fence();
}

// Memory of the backward.
template <class C>
struct BackwardMemory {
  C* taps;
  C* recent;    // (K - 1, D): sums of the gradients of the rows after those that are finished
  C* g;         // (kSteps, stride)
  C* products;  // (kSteps, K, stride), of narrow heads
  int64_t elements;

  BackwardMemory(const DynamicConv& p, void* memory) : taps(static_cast<C*>(memory)) {
    const Groups<C> groups(p);
    recent = taps + groups.taps();
    g = recent + (p.conv.taps - 1) * p.conv.channels;
    products = g + kSteps * groups.stride;
    elements = products + groups.products() - taps;
  }
};

// Computes kSteps rows of gradients from t on, of the rows [first, last) of one sequence.
template <class T, int kTaps, bool kWide>
struct DynamicBackward {
  using C = compute_t<T>;
  using At = DynamicSteps<T, kTaps, kWide>;
  const DynamicConvBackwardParams& p;
  const BackwardMemory<C> memory;
  const int64_t first, last;
  const bool past_caches;
  const At at;
  const ConvSequence s = at.inputs.s;
  const int64_t t = at.t, n = at.p.conv.channels, before = at.inputs.before;
  static constexpr bool kInside = kTaps > 0;

  [[gnu::noinline]] static void run(const DynamicConvBackwardParams& p, const ConvSequence& s,
                                    const BackwardMemory<C>& memory, int64_t first, int64_t last,
                                    int64_t t, bool past_caches) {
    const Range present = intersect({0, s.steps}, {t, last});
    const DynamicBackward steps{p,    memory,      first,
                                last, past_caches, {p.problem, s, t, present, memory.taps}};
    steps.at.for_groups([&](int64_t head, int64_t heads, int64_t from, int64_t channels) {
      steps.at.load_taps(head, heads);
      for_row<T, At::kOrder>(channels, [&](int64_t i, auto part) OMNIATTN_LAMBDA {
        const auto g = steps.gradients(from, i, part);
        steps.add_to_rows(from, i, part, g);
      });
      kWide ? steps.sum_products(head, from, channels) : steps.add_products(head, heads, from);
    });
  }

 private:
  OMNIATTN_INLINE const T* grad_y(int64_t step) const {
    return static_cast<const T*>(p.grad_y) + s.batch * p.grad_y_batch +
           (s.row + step) * p.grad_y_row;
  }
  OMNIATTN_INLINE bool is_before(int64_t r) const { return !kInside && r < before; }

  // g of the steps; 0 for steps that do not exist.
  OMNIATTN_INLINE auto gradients(int64_t from, int64_t i, auto part) const {
    using V = decltype(part.load(at.inputs.row(0)));
    Steps<V> g(V(C(0))), slopes(V(C(1)));
    if (at.p.conv.silu) {
      const auto sums = at.sums(from, i, part);
      const auto slope = [](auto v) { return activation_rules::Silu::at(v).slope; };
#pragma GCC unroll 4
      for (int j = 0; j < kSteps; ++j) slopes[j] = lanewise(slope, sums[j]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < kSteps; ++j) {
      if (at.has(t + j)) g[j] = part.load(grad_y(t + j) + from + i) * slopes[j];
      part.store_sums(memory.g + j * at.groups.stride + i, g[j]);
    }
    return g;
  }

  // Adds the shares of the steps to the rows that they read, and stores those of kSteps rows, which
  // no later step reads.
  template <class V>
  OMNIATTN_INLINE void add_to_rows(int64_t from, int64_t i, auto part, const Steps<V>& g) const {
    C* const recent = memory.recent + from + i;
    const int64_t taps = at.inputs.taps;
#pragma GCC unroll 8
    for (int64_t row = 0; row < (kInside ? kTaps : taps) - 1 + kSteps; ++row) {
      V sum = row < before ? V(part.load_sums(recent + row * n)) : V(C(0));
#pragma GCC unroll 4
      for (int j = 0; j < kSteps; ++j) {
        const int64_t k = row - j;
        if (k >= 0 && k < taps) sum = fma(at.template tap<V>(j, k, i, part), g[j], sum);
      }
      if (row < kSteps) {
        finish(t + row, from + i, part, sum);
      } else {
        part.store_sums(recent + (row - kSteps) * n, sum);
      }
    }
  }
  // Stores the gradient of a row of `before` or of x.
  template <class V>
  OMNIATTN_INLINE void finish(int64_t r, int64_t channel, auto part, V sum) const {
    if (!kInside && (r < first || r >= last)) return;
    if (!kInside && p.grad_final != nullptr && r >= s.steps) {
      sum = sum + part.load(static_cast<const T*>(p.grad_final) + (s.n * before + r - s.steps) * n +
                            channel);
    }
    if (is_before(r)) {
      if (p.dbefore == nullptr) return;
      return part.store(static_cast<T*>(p.dbefore) + (s.n * before + r) * n + channel, sum);
    }
    if (at.p.residual) sum = sum + part.load(grad_y(r - before) + channel);
    T* const to = static_cast<T*>(p.dx) + (s.first + r - before) * n + channel;
    past_caches ? part.stream(to, sum) : part.store(to, sum);
  }

  OMNIATTN_INLINE bool owns(int j) const { return kInside || (t + j >= first && at.has(t + j)); }
  OMNIATTN_INLINE T* dtaps(int j, int64_t head) const {
    return static_cast<T*>(p.dtaps) + at.place(j, head);
  }
  // Gradients of the taps of a wide head: for each row, the products with the g of all steps.
  OMNIATTN_INLINE void sum_products(int64_t head, int64_t from, int64_t channels) const {
    const int64_t taps = at.inputs.taps, stride = at.groups.stride;
    for (int64_t row = 0; row < taps - 1 + kSteps; ++row) {
      const T* const x = at.inputs.row(t + row - before) + from;
      Steps<Vec<C>> sums(Vec<C>(C{0}));
      for_row<T, Order::any>(channels, [&](int64_t i, auto part) OMNIATTN_LAMBDA {
        const auto input = part.load(x + i);
#pragma GCC unroll 4
        for (int j = 0; j < kSteps; ++j) {
          sums[j] = add_product(sums[j], input, part.load_sums(memory.g + j * stride + i));
        }
      });
#pragma GCC unroll 4
      for (int j = 0; j < kSteps; ++j) {
        const int64_t k = row - j;
        if (k >= 0 && k < taps && owns(j)) dtaps(j, head)[k] = narrow<T>(reduce_add(sums[j]));
      }
    }
  }
  OMNIATTN_INLINE static Vec<C> add_product(Vec<C> sum, Vec<C> a, auto b) { return fma(a, b, sum); }
  OMNIATTN_INLINE static VecF add_product(VecF sum, Halves a, Halves b) {
    return fma(a.even, b.even, fma(a.odd, b.odd, sum));
  }
  // Gradients of the taps of narrow heads, from their products channel by channel.
  OMNIATTN_INLINE void add_products(int64_t head, int64_t heads, int64_t from) const {
    const int64_t taps = at.inputs.taps, stride = at.groups.stride, width = at.groups.width;
    for_row<T>(heads * width, [&](int64_t i, auto part) OMNIATTN_LAMBDA {
      at.inputs.for_taps(t, from + i, part, [&](int64_t k, const auto& x) {
#pragma GCC unroll 4
        for (int j = 0; j < kSteps; ++j) {
          part.store(memory.products + (j * taps + k) * stride + i,
                     x[j] * part.load(memory.g + j * stride + i));
        }
      });
    });
    for (int j = 0; j < kSteps; ++j) {
      if (!owns(j)) continue;
      T* to = dtaps(j, head);
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t k = 0; k < taps; ++k) {
          const C* const each = memory.products + (j * taps + k) * stride + h * width;
          C sum = 0;
          for (int64_t i = 0; i < width; ++i) sum += each[i];
          *to++ = narrow<T>(sum);
        }
      }
    }
  }
};

template <class T, bool kWide>
void backward(const DynamicConvBackwardParams& p, void* memory, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  const CausalConv& conv = p.problem.conv;
  const int64_t before = conv.taps - 1;
  const BackwardMemory<C> room(p.problem, memory);
  const bool past_caches = streams<T>(p.past_caches, p.dx, p.problem.width());
  for_sequences(conv, before, begin, end, [&](const auto& s, int64_t first, int64_t last) {
    for (int64_t i = 0; i < before * conv.channels; ++i) room.recent[i] = 0;
    for (int64_t t = first - before; t < last; t += kSteps) {
      const bool inside = conv.taps == kUsualTaps<T> && t >= larger(first, before) &&
                          t + kSteps <= smaller(last, s.steps);
      (inside ? DynamicBackward<T, kUsualTaps<T>, kWide>::run : DynamicBackward<T, 0, kWide>::run)(
          p, s, room, first, last, t, past_caches);
    }
  });
  if (past_caches) stream_fence();
}

int64_t forward_bytes(const DynamicConv& p) {
  int64_t result = 0;
  dispatch_compute(p.conv.dtype, [&]<class C>(C) { result = Groups<C>(p).taps() * sizeof(C); });
  return result;
}
int64_t backward_bytes(const DynamicConv& p) {
  int64_t result = 0;
  dispatch_compute(p.conv.dtype, [&]<class C>(C) {
    result = BackwardMemory<C>(p, nullptr).elements * sizeof(C);
  });
  return result;
}

void forward_any(const DynamicConvParams& p, void* memory, int64_t begin, int64_t end) {
  const CausalConv& conv = p.problem.conv;
  OMNIATTN_ASSERT_ITEMS(begin, end, conv_rows(conv));
  OMNIATTN_ASSERT_ROWS(conv.x, conv.x_row, conv_rows(conv), conv.channels);
  OMNIATTN_ASSERT_HAS(memory, forward_bytes(p.problem));
  dispatch(conv.dtype, [&]<class T>(T) {
    const bool wide = Groups<compute_t<T>>(p.problem).wide;
    (wide ? forward<T, true> : forward<T, false>)(p, memory, begin, end);
  });
}
void backward_any(const DynamicConvBackwardParams& p, void* memory, int64_t begin, int64_t end) {
  const CausalConv& conv = p.problem.conv;
  OMNIATTN_ASSERT_ITEMS(begin, end, conv_rows(conv) + conv.sequences * (conv.taps - 1));
  OMNIATTN_ASSERT_ROWS(p.grad_y, p.grad_y_row, conv_rows(conv), conv.channels);
  OMNIATTN_ASSERT_HAS(memory, backward_bytes(p.problem));
  dispatch(conv.dtype, [&]<class T>(T) {
    const bool wide = Groups<compute_t<T>>(p.problem).wide;
    (wide ? backward<T, true> : backward<T, false>)(p, memory, begin, end);
  });
}

}  // namespace

extern const DynamicConvKernels dynamic_conv_kernels_table;
const DynamicConvKernels dynamic_conv_kernels_table{forward_bytes, forward_any, backward_bytes,
                                                    backward_any};

}  // namespace omniattn::OMNIATTN_ISA
