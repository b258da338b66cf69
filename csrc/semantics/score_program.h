// A score_mod as a program: instructions over registers, each of which holds one value for every
// key of a row. encoding/score_program.py defines the same in plain torch.
//
// A lane is a number of the compute type A or an integer of the same size (int32 for float, int64
// for double; integers wrap). Truth values are integers 0 and 1. A program reads the score of its
// row, constants and tables:
//
//   grid      (B | 1, Hq | 1, Q | 1, Tk | 1)  the element of b, h, q and k
//   distance  (B | 1, Hq | 1, 1, Q + Tk - 1)  the element of b, h and k - q
//   gathered  up to 4 dimensions              the element that an index names
//
// Queries are numbered first_q, ..., first_q + Q - 1 (see ProgramDomain). Values that depend on b,
// h and one of q, k and k - q alone are precomputed by torch as tables.
#pragma once

#include <math.h>  // with the float overloads in the global namespace

#include <cstdint>

#include "semantics/macros.h"

namespace omniattn {

constexpr int64_t kMaxProgramTables = 16;
constexpr int64_t kMaxProgramRegisters = 64;
constexpr int64_t kMaxProgramSteps = 32768;
constexpr int64_t kMaxProgramDims = 4;
constexpr int64_t kProgramStepInts = 5;  // op, to, a, b, c

// name, number in the encoded form, registers read, and the result in each lane. a and b have type
// A, or the integer type I, whose unsigned counterpart is U.
#define OMNIATTN_PROGRAM_FLOAT_OPS(op)                                                   \
  op(neg, 0, 1, -a) op(abs, 1, 1, a < 0 ? -a : a) op(sign, 2, 1, A((a > 0) - (a < 0)))   \
      op(add, 3, 2, a + b) op(sub, 4, 2, a - b) op(mul, 5, 2, a* b) op(div, 6, 2, a / b) \
          op(min, 7, 2, a != a || a < b ? a : b) op(max, 8, 2, a != a || a > b ? a : b)
// Functions that runtime/vec.h has for vectors.
#define OMNIATTN_PROGRAM_VECTOR_OPS(op)                                                           \
  op(exp, 10, 1, exp(a)) op(log, 11, 1, log(a)) op(sqrt, 12, 1, sqrt(a)) op(tanh, 13, 1, tanh(a)) \
      op(sigmoid, 14, 1, sigmoid(a)) op(floor, 15, 1, floor(a)) op(round, 16, 1, round(a))
#define OMNIATTN_PROGRAM_LANE_OPS(op)                                                             \
  op(trunc, 20, 1, trunc(a)) op(sin, 21, 1, sin(a)) op(cos, 22, 1, cos(a)) op(erf, 23, 1, erf(a)) \
      op(log1p, 24, 1, log1p(a)) op(expm1, 25, 1, expm1(a)) op(pow, 26, 2, pow(a, b))
#define OMNIATTN_PROGRAM_COMPARISONS(op) \
  op(less, 30, 2, a < b) op(less_equal, 31, 2, a <= b) op(equal, 32, 2, a == b)
#define OMNIATTN_PROGRAM_INT_OPS(op)                                                          \
  op(int_add, 40, 2, I(U(a) + U(b))) op(int_sub, 41, 2, I(U(a) - U(b)))                       \
      op(int_mul, 42, 2, I(U(a) * U(b))) op(int_min, 43, 2, a < b ? a : b)                    \
          op(int_max, 44, 2, a > b ? a : b) op(int_and, 45, 2, a& b) op(int_or, 46, 2, a | b) \
              op(int_xor, 47, 2, a ^ b) op(int_less, 48, 2, a < b)                            \
                  op(int_less_equal, 49, 2, a <= b) op(int_equal, 50, 2, a == b)              \
                      op(int_floor_div, 51, 2, I(floor_div(a, b)))                            \
                          op(int_mod, 52, 2, I(floor_mod(a, b)))
#define OMNIATTN_PROGRAM_OTHER_OPS(op)                                                     \
  op(where, 60, 3, )        /* a ? b : c, for lanes of any kind */                         \
      op(to_float, 61, 1, ) /* converts an integer */                                      \
      op(to_int, 62, 1, )   /* truncates and saturates; 0 for NaN */                       \
      op(number, 63, 0, )   /* constant a */                                               \
      op(integer, 64, 0, )  /* constant a */                                               \
      op(read, 65, 0, )     /* element of table a, a grid or distances */                  \
      op(place, 66, 2, )    /* place a (0 if it is no register) plus that of index b in    \
                               dimension c % 4 of table c / 4; a negative index counts     \
                               from the end */                                             \
      op(gather, 67, 1, )   /* element of table b at place a; NaN (integers: 0) outside */ \
      op(give, 68, 1, )     /* adds a to the gradient of table b, which `read` reads */    \
      op(give_at, 69, 2, )  /* give at place b of table c, which `gather` reads */
#define OMNIATTN_PROGRAM_OPS(op)  \
  OMNIATTN_PROGRAM_FLOAT_OPS(op)  \
  OMNIATTN_PROGRAM_VECTOR_OPS(op) \
  OMNIATTN_PROGRAM_LANE_OPS(op)   \
  OMNIATTN_PROGRAM_COMPARISONS(op) OMNIATTN_PROGRAM_INT_OPS(op) OMNIATTN_PROGRAM_OTHER_OPS(op)

enum class ProgramOp : int16_t {
#define OMNIATTN_OP(name, number, reads, value) name = number,
  OMNIATTN_PROGRAM_OPS(OMNIATTN_OP)
#undef OMNIATTN_OP
};

OMNIATTN_FN bool is_program_op(int64_t code) {
#define OMNIATTN_OP(name, number, reads, value) || code == number
  return false OMNIATTN_PROGRAM_OPS(OMNIATTN_OP);
#undef OMNIATTN_OP
}

// Number of registers that an op reads.
OMNIATTN_FN int32_t program_reads(ProgramOp op) {
  switch (op) {
#define OMNIATTN_OP(name, number, reads, value) \
  case ProgramOp::name:                         \
    return reads;
    OMNIATTN_PROGRAM_OPS(OMNIATTN_OP)
#undef OMNIATTN_OP
  }
  OMNIATTN_UNREACHABLE();
}

struct ProgramStep {
  ProgramOp op;
  int16_t to, a, b, c;
};

enum class ProgramTableKind : int32_t { grid, distance, gathered };
// Types of a table's elements; the floating-point ones are those of DType.
enum class ElementType : int32_t { f64, f32, bf16, f16, i64, i32, u8 };

// Offsets of the elements of b, h, q and k.
struct ProgramPlaces {
  int64_t origin, stride_b, stride_h, stride_q, stride_k;
  OMNIATTN_FN int64_t at(int64_t b, int64_t h, int64_t q, int64_t k) const {
    return origin + b * stride_b + h * stride_h + q * stride_q + k * stride_k;
  }
};

struct ProgramTable {
  const void* data;
  ProgramTableKind kind;
  ElementType type;
  ProgramPlaces places;                  // for tables read by position
  int64_t dims, sizes[kMaxProgramDims];  // for gathered tables, which are contiguous
};

// A sequence of steps, and the register that holds its result.
struct ProgramRun {
  const ProgramStep* steps;
  int64_t count;
  int32_t result;
};

// Register 0 holds the score. The backward first computes the value as the forward does. From its
// registers, and the gradient of the value in register 1, it computes the gradient of the score.
struct ScoreProgram {
  ProgramRun forward, value, gradient;
  int32_t forward_registers, backward_registers;
  int64_t table_count;
  ProgramTable tables[kMaxProgramTables];
  int64_t constant_count;
  const double* constants;
};

// Positions at which a program may be evaluated: queries from first_q on and keys from 0 on.
// Queries of caches have positions among the keys, so a query may precede key 0.
struct ProgramDomain {
  int64_t first_q, queries, keys;
};

OMNIATTN_FN ProgramPlaces program_places(ProgramTableKind kind, const ProgramDomain& domain,
                                         const int64_t (&sizes)[4], const int64_t (&strides)[4]) {
  const auto stride = [&](int64_t i) OMNIATTN_LAMBDA { return sizes[i] == 1 ? 0 : strides[i]; };
  if (kind == ProgramTableKind::distance) {
    const int64_t last_q = domain.first_q + domain.queries - 1;
    return {last_q * stride(3), stride(0), stride(1), -stride(3), stride(3)};
  }
  return {-domain.first_q * stride(2), stride(0), stride(1), stride(2), stride(3)};
}

// The ops, on one lane.
namespace program_ops {

template <class A>
struct IntOf;
template <>
struct IntOf<float> {
  using Type = int32_t;
  using Unsigned = uint32_t;
};
template <>
struct IntOf<double> {
  using Type = int64_t;
  using Unsigned = uint64_t;
};
template <class A>
using int_of = typename IntOf<A>::Type;

template <class A>
OMNIATTN_FN A round(A x) {
  return rint(x);
}
template <class A>
OMNIATTN_FN A sigmoid(A x) {
  return A(1) / (A(1) + exp(-x));
}

// Floor of a / b; 0 if b is 0.
OMNIATTN_FN int64_t floor_div(int64_t a, int64_t b) {
  if (b == 0) return 0;
  if (b == -1) return static_cast<int64_t>(-static_cast<uint64_t>(a));
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}
OMNIATTN_FN int64_t floor_mod(int64_t a, int64_t b) {
  if (b == 0 || b == -1) return 0;
  const int64_t rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

template <class A>
OMNIATTN_FN int_of<A> to_int(A x) {
  constexpr A kLimit = sizeof(A) == 4 ? A(0x7fffff80) : A(0x7ffffffffffffc00);
  const A inside = x < -kLimit ? -kLimit : x > kLimit ? kLimit : x;
  return x == x ? static_cast<int_of<A>>(inside) : int_of<A>(0);
}

// place + offset of `index` in a dimension of `size` with this stride. A negative index counts from
// the end. Negative if `place` is or if the index is out of range.
OMNIATTN_FN int64_t place_of(int64_t place, int64_t index, int64_t size, int64_t stride) {
  const int64_t inside = index < 0 ? index + size : index;
  return place < 0 || inside < 0 || inside >= size ? -1 : place + inside * stride;
}
OMNIATTN_FN int64_t stride_of(const ProgramTable& table, int64_t dim) {
  int64_t stride = 1;
  for (int64_t i = dim + 1; i < table.dims; ++i) stride *= table.sizes[i];
  return stride;
}
OMNIATTN_FN int64_t elements_of(const ProgramTable& table) {
  return table.dims == 0 ? 1 : table.sizes[0] * stride_of(table, 0);
}

}  // namespace program_ops
}  // namespace omniattn
