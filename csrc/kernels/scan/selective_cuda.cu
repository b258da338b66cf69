// The selective scan on CUDA, see selective.h: one thread per channel and sequence
// walks over its steps with all its states. The backward recomputes the states of a
// chunk into memory that neighboring threads read together; dB and dC are summed over
// the channels of a block in a fixed order.
#include "kernels/scan/selective.h"

#include "kernels/scan/scan_rules.h"
#include "runtime/dispatch.h"
#include "runtime/gpu_row.h"
#include "semantics/packed_rows.h"

namespace omniattn {
namespace {

constexpr int kThreads = kSelectiveThreads, kWarps = kThreads / 32;
// Calls f(n) for all states, or for the first state of each pair. Small counts are unrolled, so
// that arrays over states are in registers.
template <class C, int kMost, int kParts = 1, class F>
__device__ __forceinline__ void for_states(const Selective& p, const F& f) {
  if constexpr (kMost * sizeof(C) <= 64) {
#pragma unroll
    for (int n = 0; n < kMost; n += kParts) {
      if (n < p.states) f(n);
    }
  } else {
#pragma unroll 1
    for (int n = 0; n < p.states; n += kParts) f(n);
  }
}

constexpr auto kPairs = SelectiveRule::pairs, kLonghorn = SelectiveRule::longhorn;
// Number of states that share one decay.
template <SelectiveRule kRule>
constexpr int kPartsOf = kRule == kPairs ? 2 : 1;

// e^(dt A) for a state or a pair, or 1 - dt b^2, and h = a h + x b.
template <SelectiveRule kRule, class C>
struct Decay {
  static constexpr int kParts = kPartsOf<kRule>;
  C re, im;

  __device__ __forceinline__ Decay(C dt, const C* a, const C* b) : im(0) {
    if constexpr (kRule == kLonghorn) {
      re = fma(-dt * b[0], b[0], C(1));
      return;
    }
    re = exp(dt * a[0]);
    if constexpr (kParts == 2) {
      // Corrects by the rounding error of the product, which matters at large angles.
      const C angle = dt * a[1], rest = fma(dt, a[1], -angle);
      const C sine = sin(angle), cosine = cos(angle), of_rest = sin(rest), along = cos(rest);
      im = re * fma(sine, along, cosine * of_rest);
      re *= fma(cosine, along, -sine * of_rest);
    }
  }
  __device__ __forceinline__ void move_on(C* h, C x, const C* b) const {
    const C before = h[0];
    h[0] = fma(re, before, x * b[0]);
    if constexpr (kParts == 2) {
      h[0] = fma(-im, h[1], h[0]);
      h[1] = fma(re, h[1], fma(im, before, x * b[1]));
    }
  }
  // Turns the gradient dh of h = a h' into the gradient of h', and returns that of dt A, or of a.
  __device__ __forceinline__ void back(C* dh, const C* before, C* of_exponent) const {
    const C later = dh[0];
    if constexpr (kRule == kLonghorn) {
      dh[0] = re * later;
      of_exponent[0] = later * before[0];
    } else if constexpr (kParts == 1) {
      dh[0] = re * later;
      of_exponent[0] = dh[0] * before[0];
    } else {
      dh[0] = fma(re, later, im * dh[1]);
      dh[1] = fma(re, dh[1], -im * later);
      of_exponent[0] = fma(before[0], dh[0], before[1] * dh[1]);
      of_exponent[1] = fma(before[0], dh[1], -before[1] * dh[0]);
    }
  }
};

// The channel and sequence of this thread. A thread past the end of its
// block of channels reads zeros.
template <class T>
struct Channel : SelectiveItem {
  using C = compute_t<T>;
  const Selective& p;
  int64_t c;
  bool exists;

  __device__ Channel(const Selective& scan)
      : SelectiveItem(selective_item(scan, blockIdx.x)), p(scan), c(first + threadIdx.x) {
    exists = static_cast<int64_t>(threadIdx.x) < width;
    GPU_REQUIRE(fits_rows(sequence, p.rows.sequences, s.begin, s.count, p.rows.steps),
                "selective_scan: cu_seqlens must grow from 0 to the number of tokens");
  }
  __device__ __forceinline__ C input(const ScanView& x, int64_t t) const {
    return exists ? gpu::widen(x.row<T>(s.batch, s.begin + t)[c]) : C(0);
  }
  __device__ __forceinline__ void put(void* x, int64_t t, C value) const {
    if (!exists) return;
    static_cast<T*>(x)[(s.batch * p.rows.steps + s.begin + t) * p.channels + c] =
        gpu::narrow<T>(value);
  }
  __device__ __forceinline__ C vector(const void* x) const {
    return x != nullptr && exists ? static_cast<const C*>(x)[c] : C(0);
  }
  // Element n of entry i of (.., D, N), 0 without such a tensor; row r of entry i of (.., rows, D).
  __device__ __forceinline__ C table(const void* x, int64_t i, int64_t n) const {
    if (x == nullptr || !exists) return C(0);
    return static_cast<const C*>(x)[(i * p.channels + c) * p.states + n];
  }
  __device__ __forceinline__ C& table_at(void* x, int64_t i, int64_t n) const {
    return static_cast<C*>(x)[(i * p.channels + c) * p.states + n];
  }
  __device__ __forceinline__ C& row(void* x, int64_t i, int64_t rows, int64_t r) const {
    return static_cast<C*>(x)[(i * rows + r) * p.channels + c];
  }
  __device__ __forceinline__ C weight(const SelectiveWeights& w, int64_t t, int64_t n) const {
    if (w.constant) return table(w.rows.data, 0, n);
    return weight_of_group(w, t, n);
  }
  // Weight of a step, which all channels of a group share.
  __device__ __forceinline__ C weight_of_group(const SelectiveWeights& w, int64_t t,
                                               int64_t n) const {
    if (p.rule == kPairs) return w.rows.row<C>(s.batch, s.begin + t)[group * p.states + n];
    return gpu::widen(w.rows.row<T>(s.batch, s.begin + t)[group * p.states + n]);
  }
  // |B|^2 of a step.
  __device__ __forceinline__ C square(int64_t t) const {
    C sum = 0;
    for (int64_t n = 0; n < p.states; ++n) {
      const C b = weight(p.b, t, n);
      sum = fma(b, b, sum);
    }
    return sum;
  }
  template <SelectiveRule kRule>
  __device__ __forceinline__ ValueAndSlope<C> step(int64_t t) const {
    const C x = input(p.delta, t) + vector(p.bias);
    if constexpr (kRule == kLonghorn) return scan_rules::longhorn_step(x, square(t));
    if (p.softplus) return scan_rules::softplus(x);
    return {x, C(1)};
  }
};

template <class T, int kMost, SelectiveRule kRule>
__global__ void __launch_bounds__(kThreads, 1)
    selective_forward_kernel(const __grid_constant__ SelectiveParams params) {
  using C = compute_t<T>;
  constexpr int kParts = kPartsOf<kRule>;
  const Selective& p = params.scan;
  const Channel<T> x(p);
  if (!x.exists) return;
  const C skip = x.vector(p.skip);
  C h[kMost], decay[kMost];
  for_states<C, kMost>(p, [&](int n) {
    h[n] = x.table(p.initial_state, x.sequence, n);
    decay[n] = x.table(p.decay, 0, n);
  });
  for (int64_t t = 0; t < x.s.count; ++t) {
    const bool keeps = params.states != nullptr && t % kScanChunk == 0;
    const int64_t slot = x.s.slot + t / kScanChunk;
    const C dt = x.template step<kRule>(t).value, u = x.input(p.u, t), drive = dt * u;
    C y = skip * u;
    for_states<C, kMost, kParts>(p, [&](int n) {
      C b[kParts];
      for (int k = 0; k < kParts; ++k) {
        if (keeps) x.row(params.states, slot, p.states, n + k) = h[n + k];
        b[k] = x.weight(p.b, t, n + k);
      }
      Decay<kRule, C>(dt, decay + n, b).move_on(h + n, drive, b);
      for (int k = 0; k < kParts; ++k) y = fma(h[n + k], x.weight(p.c, t, n + k), y);
    });
    if (p.z.data != nullptr) y *= scan_rules::silu(x.input(p.z, t)).value;
    x.put(params.y, t, y);
  }
  for_states<C, kMost>(p, [&](int n) { x.table_at(params.final_state, x.sequence, n) = h[n]; });
}

// Recomputes the states before the steps [t, end) of a chunk, and after the last one, into memory
// (N, kScanChunk + 1, states, D).
constexpr int64_t kKept = kScanChunk + 1;
template <class T, SelectiveRule kRule>
__device__ void recompute_chunk(const SelectiveBackwardParams& params, const Channel<T>& x,
                                compute_t<T>* kept, int64_t t, int64_t end) {
  using C = compute_t<T>;
  constexpr int kParts = kPartsOf<kRule>;
  const Selective& p = x.p;
  if (!x.exists) return;
  const int64_t slot = x.s.slot + t / kScanChunk, rows = kKept * p.states;
  for (int64_t n = 0; n < p.states; n += kParts) {
    C h[kParts], decay[kParts];
    for (int k = 0; k < kParts; ++k) {
      const int64_t row = slot * p.states + n + k;
      h[k] = static_cast<const C*>(params.states)[row * p.channels + x.c];
      decay[k] = x.table(p.decay, 0, n + k);
    }
    const auto keep = [&](int64_t j) {
      for (int k = 0; k < kParts; ++k) x.row(kept, x.sequence, rows, j * p.states + n + k) = h[k];
    };
    for (int64_t j = 0; t + j < end; ++j) {
      keep(j);
      const C dt = x.template step<kRule>(t + j).value;
      C b[kParts];
      for (int k = 0; k < kParts; ++k) b[k] = x.weight(p.b, t + j, n + k);
      Decay<kRule, C>(dt, decay, b).move_on(h, dt * x.input(p.u, t + j), b);
    }
    keep(end - t);
  }
}

// Sums over the channels of a block. `parts` has one number per warp, per B and C, and per state;
// `of_square`, the gradient of |B|^2, one per warp.
template <int kMost, class C>
struct ChannelSums {
  C *parts, *of_square;

  __device__ __forceinline__ void add_square(C x) const {
    x = gpu::warp_reduce(x, [](C a, C b) { return a + b; });
    if (threadIdx.x % 32 == 0) of_square[threadIdx.x / 32] = x;
  }
  __device__ __forceinline__ void add(int of_c, int n, C x) const {
    x = gpu::warp_reduce(x, [](C a, C b) { return a + b; });
    if (threadIdx.x % 32 == 0) parts[(threadIdx.x / 32 * 2 + of_c) * kMost + n] = x;
  }
  template <class T>
  __device__ void store(const Channel<T>& x, const Selective& p, int64_t t, void* to,
                        int of_c) const {
    if (to == nullptr) return;
    const int64_t rows = p.rows.steps * (p.rows.boundaries == nullptr ? p.rows.sequences : 1);
    const int64_t row = x.block * rows + x.s.batch * p.rows.steps + x.s.begin + t;
    for (int64_t n = threadIdx.x; n < p.states; n += kThreads) {
      C sum = 0;
      for (int warp = 0; warp < kWarps; ++warp) sum += parts[(warp * 2 + of_c) * kMost + n];
      if (of_c == 0 && p.rule == kLonghorn) {
        const C twice = 2 * x.weight_of_group(p.b, t, n);
        for (int warp = 0; warp < kWarps; ++warp) sum = fma(twice, of_square[warp], sum);
      }
      static_cast<C*>(to)[(row * p.groups + x.group) * p.states + n] = sum;
    }
  }
};

// State of a thread of the backward for its channel.
template <class T, int kMost, SelectiveRule kRule>
struct ChannelGradient {
  using C = compute_t<T>;
  static constexpr int kParts = kPartsOf<kRule>;
  const SelectiveBackwardParams& params;
  const Selective& p;
  Channel<T> x;
  ChannelSums<kMost, C> sums;
  C* kept;
  C decay[kMost], dh[kMost], da[kMost], skip, dskip = 0, dbias = 0;

  __device__ __forceinline__ ChannelGradient(const SelectiveBackwardParams& all, C* parts,
                                             C* of_square, C* memory)
      : params(all),
        p(all.scan),
        x(all.scan),
        sums{parts, of_square},
        kept(memory),
        skip(x.vector(p.skip)) {
    for_states<C, kMost>(p, [&](int n) {
      decay[n] = x.table(p.decay, 0, n);
      dh[n] = x.table(params.grad_final_state, x.sequence, n);
      da[n] = 0;
      if (p.b.constant && x.exists) partial(selective_row_of_b(p) + n) = 0;
      if (p.c.constant && x.exists) partial(selective_row_of_c(p) + n) = 0;
    });
  }
  __device__ __forceinline__ C& partial(int64_t row) const {
    return x.row(params.partial, x.sequence, selective_rows(p), row);
  }
  // Adds to dB or dC: to the sum over all steps if constant, else to this step's.
  __device__ __forceinline__ void add(bool constant, int of_c, int64_t row, int n, C term) const {
    if (!constant) {
      sums.add(of_c, n, term);
    } else if (x.exists) {
      partial(row + n) += term;
    }
  }

  __device__ __forceinline__ void step(int64_t t) {
    const auto dt = x.template step<kRule>(t);
    const C u = x.input(p.u, t), drive = dt.value * u;
    C dy = x.input(params.grad_y, t), y = skip * u, of_decay = 0, of_input = 0, gate = 0;
    if (p.z.data != nullptr) {
      const auto silu = scan_rules::silu(x.input(p.z, t));
      gate = dy * silu.slope;
      dy *= silu.value;
    }
    for_states<C, kMost, kParts>(p, [&](int n) {
      C before[kParts], b[kParts], of_b[kParts], of_exponent[kParts];
      for (int k = 0; k < kParts; ++k) {
        const int at = n + k;
        const int64_t rows = kKept * p.states, row = t % kScanChunk * p.states + at;
        before[k] = x.exists ? x.row(kept, x.sequence, rows, row) : C(0);
        const C after = x.exists ? x.row(kept, x.sequence, rows, row + p.states) : C(0);
        const C weight = x.weight(p.c, t, at);
        dh[at] = fma(dy, weight, dh[at]);
        y = fma(after, weight, y);
        b[k] = x.weight(p.b, t, at);
        of_input = fma(dh[at], b[k], of_input);
        of_b[k] = dh[at] * drive;
        add(p.c.constant, 1, selective_row_of_c(p), at, dy * after);
      }
      Decay<kRule, C>(dt.value, decay + n, b).back(dh + n, before, of_exponent);
      if constexpr (kRule == kLonghorn) {
        const C of_weight = -of_exponent[0] * b[0];
        of_decay = fma(of_weight, b[0], of_decay);
        of_b[0] = fma(of_weight, 2 * dt.value, of_b[0]);
      }
      for (int k = 0; k < kParts; ++k) {
        add(p.b.constant, 0, selective_row_of_b(p), n + k, of_b[k]);
        if constexpr (kRule == kLonghorn) continue;
        of_decay = fma(of_exponent[k], decay[n + k], of_decay);
        da[n + k] = fma(of_exponent[k], dt.value, da[n + k]);
      }
    });
    const C ddt = fma(of_input, u, of_decay), ddelta = ddt * dt.slope;
    if constexpr (kRule == kLonghorn) sums.add_square(-ddt * dt.value * dt.value);
    x.put(params.du, t, fma(of_input, dt.value, skip * dy));
    x.put(params.ddelta, t, ddelta);
    if (p.z.data != nullptr) x.put(params.dz, t, gate * y);
    dskip = fma(dy, u, dskip);
    dbias += ddelta;
  }

  __device__ __forceinline__ void end() const {
    if (!x.exists) return;
    for_states<C, kMost>(p, [&](int n) {
      x.table_at(params.dinitial_state, x.sequence, n) = dh[n];
      partial(n) = da[n];
    });
    partial(p.states) = dskip;
    partial(p.states + 1) = dbias;
  }
};

template <class T, int kMost, SelectiveRule kRule>
__global__ void __launch_bounds__(kThreads, 1)
    selective_backward_kernel(const __grid_constant__ SelectiveBackwardParams params,
                              compute_t<T>* kept) {
  using C = compute_t<T>;
  GPU_SHARED(C, parts, kWarps * 2 * kMost);
  GPU_SHARED(C, of_square, kWarps);
  ChannelGradient<T, kMost, kRule> g(params, parts, of_square, kept);
  for (int64_t t = round_up(g.x.s.count, kScanChunk) - 1; t >= 0; --t) {
    if (t % kScanChunk == kScanChunk - 1) {
      const int64_t begin = t / kScanChunk * kScanChunk;
      recompute_chunk<T, kRule>(params, g.x, kept, begin, smaller(t + 1, g.x.s.count));
    }
    if (t >= g.x.s.count) continue;
    g.step(t);
    __syncthreads();
    g.sums.store(g.x, g.p, t, params.db, 0);
    g.sums.store(g.x, g.p, t, params.dc, 1);
    __syncthreads();  // the next step reuses the parts
  }
  g.end();
}

// Calls f(Most) for at least the number of states.
template <int kMost, SelectiveRule kRule = SelectiveRule::decay>
struct Most {
  static constexpr int value = kMost;
  static constexpr SelectiveRule rule = kRule;
};
template <class F>
Status with_states(const Selective& p, const F& f) {
  constexpr int kAny = static_cast<int>(kSelectiveStates);
  if (p.items() == 0) return nullptr;
  if (p.rule == kPairs) {
    p.states <= 32 ? f(Most<32, kPairs>{}) : f(Most<kAny, kPairs>{});
  } else if (p.rule == kLonghorn) {
    p.states <= 16 ? f(Most<16, kLonghorn>{}) : f(Most<kAny, kLonghorn>{});
  } else if (p.states <= 16) {
    f(Most<16>{});
  } else if (p.states <= 64) {
    f(Most<64>{});
  } else {
    f(Most<kAny>{});
  }
  return gpu::launch_status();
}

}  // namespace

int64_t selective_backward_elements(const Selective& p) {
  return kKept * p.states * p.rows.sequences * p.channels;
}

Status launch_selective(const SelectiveParams& params, Stream stream) {
  const auto grid = static_cast<unsigned>(params.scan.items());
  return with_states(params.scan, [&](auto most) {
    dispatch(params.scan.dtype, [&]<class T>(T) {
      using Sizes = decltype(most);
      GPU_LAUNCH((selective_forward_kernel<T, Sizes::value, Sizes::rule>), grid, kThreads, 0,
                 stream, params);
    });
  });
}

Status launch_selective_backward(const SelectiveBackwardParams& params, void* memory,
                                 Stream stream) {
  const auto grid = static_cast<unsigned>(params.scan.items());
  return with_states(params.scan, [&](auto most) {
    dispatch(params.scan.dtype, [&]<class T>(T) {
      using Sizes = decltype(most);
      GPU_LAUNCH((selective_backward_kernel<T, Sizes::value, Sizes::rule>), grid, kThreads, 0,
                 stream, params, static_cast<compute_t<T>*>(memory));
    });
  });
}

}  // namespace omniattn
