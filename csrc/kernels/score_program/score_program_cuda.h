// Runs the program of a score_mod (semantics/score_program.h) for one pair.
#pragma once

#include "kernels/attention/attention_tile_cuda.h"

namespace omniattn::gpu {

// Position of a pair, as a program sees it.
struct ProgramPlace {
  int64_t b, h, q, k;
};
__device__ __forceinline__ ProgramPlace program_place(const AttentionProblem& p, const Tile& tile,
                                                      int r, int n) {
  const Sequence& s = tile.sequence;
  const bool cached = p.sequences.k != nullptr && p.sequences.q == nullptr;
  const int64_t first = cached ? s.tk - s.tq : p.first_position;
  return {tile.b, tile.h, first + tile.q + r, p.mask.part.first_k + tile.k + n};
}

template <class A>
class ProgramPair {
 public:
  using I = program_ops::int_of<A>;

  __device__ ProgramPair(const ScoreProgram& program, const ProgramPlace& place)
      : program_(program), place_(place) {}

  // Result of a run on x, which goes into register `in`.
  __device__ A run(const ProgramRun& run, int in, A x) {
    registers_[in] = x;
    take(run.steps, run.count);
    return registers_[run.result];
  }
  __device__ void take(const ProgramStep* steps, int64_t count) {
    for (int64_t n = 0; n < count; ++n) {
      if (steps[n].to >= 0) registers_[steps[n].to] = lane(steps[n]);
    }
  }
  __device__ A number(int n) const { return registers_[n]; }
  __device__ I integer(int n) const { return __builtin_bit_cast(I, registers_[n]); }

 private:
  const ScoreProgram& program_;
  const ProgramPlace place_;
  A registers_[kMaxProgramRegisters];

  __device__ static A lane_of(I x) { return __builtin_bit_cast(A, x); }

  // Converts an element of a table to a lane.
  __device__ static A element(const ProgramTable& t, int64_t at) {
    switch (t.type) {
      case ElementType::f64:
        return static_cast<A>(static_cast<const double*>(t.data)[at]);
      case ElementType::f32:
        return static_cast<const float*>(t.data)[at];
      case ElementType::bf16:
        return gpu::widen(static_cast<const bf16*>(t.data)[at]);
      case ElementType::f16:
        return gpu::widen(static_cast<const f16*>(t.data)[at]);
      case ElementType::i64:
        return lane_of(static_cast<I>(static_cast<const int64_t*>(t.data)[at]));
      case ElementType::i32:
        return lane_of(static_cast<I>(static_cast<const int32_t*>(t.data)[at]));
      case ElementType::u8:
        return lane_of(static_cast<I>(static_cast<const uint8_t*>(t.data)[at]));
    }
    OMNIATTN_UNREACHABLE();
  }

  __device__ A lane(const ProgramStep& s) const;
  __device__ A other(const ProgramStep& s) const;
};

template <class A>
__device__ A ProgramPair<A>::lane(const ProgramStep& s) const {
  using namespace program_ops;
  using U = typename IntOf<A>::Unsigned;
  const int32_t count = program_reads(s.op);
  const bool reads_a = count > 0 && s.a >= 0, reads_b = count > 1;
  const A x = reads_a ? registers_[s.a] : A(0), y = reads_b ? registers_[s.b] : A(0);
  const I m = __builtin_bit_cast(I, x), n = __builtin_bit_cast(I, y);
  switch (s.op) {
#define OMNIATTN_OP(name, number, reads, value) \
  case ProgramOp::name: {                       \
    [[maybe_unused]] const A a = x, b = y;      \
    return static_cast<A>(value);               \
  }
    OMNIATTN_PROGRAM_FLOAT_OPS(OMNIATTN_OP)
    OMNIATTN_PROGRAM_VECTOR_OPS(OMNIATTN_OP)
    OMNIATTN_PROGRAM_LANE_OPS(OMNIATTN_OP)
#undef OMNIATTN_OP
#define OMNIATTN_OP(name, number, reads, value) \
  case ProgramOp::name: {                       \
    const A a = x, b = y;                       \
    return lane_of(static_cast<I>(value));      \
  }
    OMNIATTN_PROGRAM_COMPARISONS(OMNIATTN_OP)
#undef OMNIATTN_OP
#define OMNIATTN_OP(name, number, reads, value) \
  case ProgramOp::name: {                       \
    const I a = m, b = n;                       \
    return lane_of(static_cast<I>(value));      \
  }
    OMNIATTN_PROGRAM_INT_OPS(OMNIATTN_OP)
#undef OMNIATTN_OP
    default:
      return other(s);
  }
}

template <class A>
__device__ A ProgramPair<A>::other(const ProgramStep& s) const {
  using namespace program_ops;
  switch (s.op) {
    case ProgramOp::where:
      return integer(s.a) != 0 ? number(s.b) : number(s.c);
    case ProgramOp::to_float:
      return static_cast<A>(integer(s.a));
    case ProgramOp::to_int:
      return lane_of(to_int(number(s.a)));
    case ProgramOp::number:
      return static_cast<A>(program_.constants[s.a]);
    case ProgramOp::integer:
      return lane_of(static_cast<I>(program_.constants[s.a]));
    case ProgramOp::read: {
      const ProgramTable& t = program_.tables[s.a];
      return element(t, t.places.at(place_.b, place_.h, place_.q, place_.k));
    }
    case ProgramOp::place: {
      const ProgramTable& t = program_.tables[s.c / kMaxProgramDims];
      const int64_t dim = s.c % kMaxProgramDims, before = s.a < 0 ? 0 : integer(s.a);
      return lane_of(
          static_cast<I>(place_of(before, integer(s.b), t.sizes[dim], stride_of(t, dim))));
    }
    case ProgramOp::gather: {
      const ProgramTable& t = program_.tables[s.b];
      const int64_t at = integer(s.a);
      if (at >= 0 && at < elements_of(t)) return element(t, at);
      return t.type <= ElementType::f16 ? static_cast<A>(__builtin_nan("")) : lane_of(I(0));
    }
    case ProgramOp::give:
    case ProgramOp::give_at:
      return A(0);  // adding to a gradient gives no lane
    default:
      OMNIATTN_UNREACHABLE();
  }
}

// Out-of-line calls: a program takes more registers than the kernels have left.

template <class A>
GPU_NOINLINE A program_value(const AttentionProblem& p, const ProgramPlace& place, A score) {
  return ProgramPair<A>(*p.program, place).run(p.program->forward, 0, score);
}

// logit_of, followed by the program.
template <class A>
__device__ __forceinline__ A score_of(const AttentionProblem& p, const Tile& tile, int r, int n,
                                      A dot, bool sees) {
  const A logit = logit_of(p, tile, r, n, dot, sees).value;
  if (p.program == nullptr || !sees) return logit;
  return program_value(p, program_place(p, tile, r, n), logit);
}

// The numerator (e^x - 1) e^-shift of a weight of softpick and its derivative, see
// attention_softpick.h.
template <class A>
__device__ __forceinline__ ValueAndSlope<A> shifted_power(A x, A shift) {
  shift = max(A(-87), shift);  // e^-shift stays finite
  const A e = exp(x - shift), one = exp(-shift);
  const bool cancels = abs(x) < A(0.35);
  return {cancels ? one * expm1(x) : e - one, e};
}

// Weight and gradient of a pair whose weights are softpick's.
template <class A>
__device__ __forceinline__ ValueAndSlope<A> pick(A x, A z, A dp, const RowStats<A>& stats) {
  const auto power = shifted_power(x, stats.shift);
  A grad = x;  // NaN and 0 stay
  if (x > A(0)) grad = z * dp - stats.delta;
  if (x < A(0)) grad = stats.delta;
  const A weight = x < A(0) ? A(0) : power.value;
  return {stats.factor * weight * z, stats.factor * power.slope * grad};
}

// Weight of a pair with the logit `value`, and the gradient of that logit.
template <class A>
__device__ __forceinline__ ValueAndSlope<A> weigh(const AttentionProblem& p, A value, A z, A dp,
                                                  const RowStats<A>& stats) {
  if (is_softpick(p.score)) return pick(value, z, dp, stats);
  if (!is_softmax(p.score)) {
    const auto weight = weight_at(p.score, value);
    return {weight.value * z, weight.slope * z * dp};
  }
  const A e = stats.factor * exp2(exponent_factor<A>(p.score) * (value - stats.shift));
  return {e * z, e * (z * dp - stats.delta)};
}

template <class A>
GPU_NOINLINE PairGradient<A> program_gradient(const AttentionProblem& p, const ProgramPlace& place,
                                              Logit<A> logit, A z, A dp, RowStats<A> stats) {
  ProgramPair<A> pair(*p.program, place);
  const auto weight = weigh(p, pair.run(p.program->value, 0, logit.value), z, dp, stats);
  const A grad = pair.run(p.program->gradient, 1, weight.slope);
  return {weight.value, grad, grad * logit.slope};
}

// Gradients of a pair with any score, including a program.
template <class A>
__device__ __forceinline__ PairGradient<A> pair_gradient(const AttentionProblem& p,
                                                         const Tile& tile, int r, int n, bool sees,
                                                         A z, A dot, A dp,
                                                         const RowStats<A>& stats) {
  if (!sees) return {0, 0, 0};  // a hidden key may hold anything
  const Logit<A> logit = logit_of(p, tile, r, n, dot, true);
  if (p.program != nullptr) {
    return program_gradient(p, program_place(p, tile, r, n), logit, z, dp, stats);
  }
  const auto weight = weigh(p, logit.value, z, dp, stats);
  return {weight.value, weight.slope, weight.slope * logit.slope};
}

}  // namespace omniattn::gpu
