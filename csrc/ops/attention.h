// What the ops of attention share on both devices: the checked arguments of a call, and what a
// device does with them.
#pragma once

#include "kernels/attention/attention.h"

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "ops/sequences.h"
#include "ops/tensor.h"

namespace omniattn::ops::attention {

using Ints = std::vector<int64_t>;
using Floats = std::vector<double>;
using Tensors = std::vector<Tensor>;

// The arguments of any of these ops; masks, scores and their parameters as the schemas say.
struct Arguments {
  const char* op;
  const Tensor &q, &k, &v;
  const Tensors& aux;
  const OptTensor& seed;
  const Ints& mask;
  const Ints& score;
  const Floats& params;
};

// The program of a score_mod and what it points to.
struct DecodedProgram {
  ScoreProgram program;
  std::vector<ProgramStep> steps;
  Floats constants;
};

// The same, checked.
struct Call {
  AttentionProblem problem;  // with a layout: of the longest sequences, as many as there are
  Sequences sequences;
  // Of the results that have the rows of q: (B, Tq, Hq, Dv) and (B, Hq, Tq).
  std::array<int64_t, 4> out_sizes;
  std::array<int64_t, 3> lse_sizes;
  int64_t whole_q = 0, whole_k = 0;  // Tq and Tk of the call that this is a part of, see PartKind
  bool has_layout = false, is_packed = false;
  int64_t bias = -1, table = -1, sinks = -1, head_scale = -1;  // places in aux, -1: none
  int64_t relative_keys = -1, relative_queries = -1;
  int64_t program = -1;                           // of the first table
  std::shared_ptr<const DecodedProgram> decoded;  // what problem.program views
  Tensors kept;                                   // what keeps the problem's memory alive
};
Call check(const Arguments& given);

// The domain of the program of a call.
ProgramDomain program_domain(const Call& call);

// For attention_rules.cpp.

// Strides of a tensor seen as (B, Hq, Tq, Tk) or the like, 0 where it is broadcast.
struct ScoreStrides {
  int64_t b, h, q;
};
ScoreStrides score_strides(const char* op, const char* name, const Tensor& t,
                           std::array<int64_t, 4> want);

// The strides of a bias or its gradient, and its element of the first query and key of the call.
// That of a part has the queries of the whole, or those of the part alone, and so the keys.
struct BiasPlace {
  ScoreStrides strides;
  int64_t first;
};
BiasPlace bias_place(const char* op, const Call& call, const Tensor& bias);

// The tensor of aux that a rule names.
const Tensor& side_tensor(const char* op, const Tensors& aux, int64_t index);

bool starts_with(const Ints& mask, LayoutKind kind);
void decode_mask(const Arguments& given, Call& call);
void decode_score(const Arguments& given, Call& call);
// The program at the end of the score's rules: `at` is the place of its rule.
void decode_program(const Arguments& given, size_t at, Call& call);

// In attention_program.cpp.

bool has_program_table(const Call& call, int64_t index);
// `grad`: zeros of the sizes of aux[index], in the compute type.
void set_program_gradient(const Call& call, int64_t index, const Tensor& grad,
                          ProgramGradients& to);

// In attention_cpu.cpp and attention_cuda.cpp.

// Takes [seed, offset] of dropout, from a tensor on the CPU by read_seed.
void decode_seed(Call& call, const Tensor& seed);
void read_seed(Call& call, const Tensor& seed);

// Neither is called without queries, nor without keys unless there are sinks. The second one has
// `splits` and the parts to set, and adds to zeros in grad_bias, grad_table, grad_sinks and
// grad_head_scale.
void run_forward(AttentionForwardParams f, const Sequences& sequences);
void run_backward(AttentionBackwardParams b, const Sequences& sequences);
void run_weights(AttentionWeightsParams w);
void run_select(AttentionSelectParams x);

inline HeadView view_of(const Tensor& t) {
  return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}
inline MutableHeadView mutable_view_of(const Tensor& t) {
  return {t.mutable_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

}  // namespace omniattn::ops::attention
