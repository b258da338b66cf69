// Runs the program of a score_mod (semantics/score_program.h) over rows of keys.
#pragma once

#include "runtime/cpu_isa.h"
#include "runtime/dtype.h"
#include "semantics/score_program.h"
#include "semantics/seqlen.h"

namespace omniattn {

constexpr int64_t kProgramRow = 128;  // keys of a register

// Memory in which the gradient of a table is accumulated.
struct ProgramGradient {
  void* data;  // in the compute type; null: not wanted
  ProgramPlaces places;
};

// One query of one head against keys [key, key + kProgramRow).
struct ProgramRow {
  const ScoreProgram* program;
  void* registers;                   // kProgramRow elements each, of the compute type
  int64_t b, h, q, key;              // positions in the whole problem
  int64_t keys;                      // number of keys from `key` on
  Range columns;                     // columns to compute, relative to `key`
  const uint64_t* visible;           // words of 64 keys; null: all visible
  const ProgramGradient* gradients;  // gradients of the tables; null: none is wanted
};

// Runs steps. x: the row that first goes into register `in`, and receives the result.
using RunProgram = void (*)(const ProgramRow& row, const ProgramRun& run, int32_t in, void* x);

struct ScoreProgramKernels {
  RunProgram run_float, run_double;  // run_double is null on levels without f64
  // out[i] = sum over n of parts[n * elements + i], in order, for i in [begin, end).
  void (*sum_parts)(DType dtype, const void* parts, int64_t count, int64_t elements, void* out,
                    int64_t begin, int64_t end);
};

OMNIATTN_KERNEL_TABLE(ScoreProgramKernels, score_program_kernels)

}  // namespace omniattn
