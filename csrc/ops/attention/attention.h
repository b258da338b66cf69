// Shared by the attention ops on both devices: the checked arguments of a call, and the functions
// that each device implements.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/attention/attention_params.h"
#include "ops/sequences.h"
#include "ops/tensor.h"

namespace omniattn::ops::attention {

// The last rule in the mask of a call that takes no kernel of torch. It hides nothing.
constexpr int64_t kOwnKernels = 21;

// Arguments of an attention op; attention.cpp describes masks, scores and their parameters.
struct Arguments {
  const char* op;
  const Tensor &q, &k, &v;
  const Tensors& aux;
  const OptTensor& seed;
  const Ints& mask;
  const Ints& score;
  const Floats& params;
  const Tensor *k_scale = nullptr, *v_scale = nullptr;  // factors of rows of k and v, then int8
};

// A decoded score_mod program with the memory that it points to.
struct DecodedProgram {
  ScoreProgram program;
  std::vector<ProgramStep> steps;
  Floats constants;
};

// Checked arguments of a call.
struct Call {
  AttentionProblem problem;  // with a layout: its batch holds all sequences, padded to the longest
  Sequences sequences;
  // Sizes of the results per row of q: (B, Tq, Hq, Dv) and (B, Hq, Tq).
  std::array<int64_t, 4> out_sizes;
  std::array<int64_t, 3> lse_sizes;
  int64_t whole_q = 0, whole_k = 0;  // Tq and Tk of the call that this is a part of, see PartKind
  bool has_layout = false, is_packed = false;
  bool shares_boundaries = false;  // packed queries and keys have the same boundaries
  bool own_kernels = false;        // no kernel of torch is wanted
  int64_t bias = -1, table = -1, sinks = -1, head_scale = -1;  // places in aux, -1: none
  int64_t relative_keys = -1, relative_queries = -1;
  int64_t program = -1;                           // place of its first table in aux
  std::shared_ptr<const DecodedProgram> decoded;  // owns the memory that problem.program views
  Tensors kept;                                   // tensors that keep the problem's memory alive
};
Call check(const Arguments& given);

// Positions at which the program of a call is evaluated.
ProgramDomain program_domain(const Call& call);

// Used by attention_rules.cpp.

// Strides of a tensor seen as (B, Hq, Tq, Tk) or the like, 0 where it is broadcast.
struct ScoreStrides {
  int64_t b, h, q;
};
ScoreStrides score_strides(const char* op, const char* name, const Tensor& t,
                           std::array<int64_t, 4> want);

// Strides of a bias or its gradient, and the element of the call's first query and key. In a part,
// the bias may have the queries of the whole or of the part alone; likewise for the keys.
struct BiasPlace {
  ScoreStrides strides;
  int64_t first;
};
BiasPlace bias_place(const char* op, const Call& call, const Tensor& bias);

// The tensor in aux that a rule refers to.
const Tensor& side_tensor(const char* op, const Tensors& aux, int64_t index);

bool starts_with(const Ints& mask, LayoutKind kind);
void decode_mask(const Arguments& given, Call& call);
void decode_score(const Arguments& given, Call& call);
// Decodes the program at the end of the score's rules; `at` is the index of its rule.
void decode_program(const Arguments& given, size_t at, Call& call);

// Defined in attention_program.cpp.

bool has_program_table(const Call& call, int64_t index);
// `grad` holds zeros, has the sizes of aux[index] and is in the compute type.
void set_program_gradient(const Call& call, int64_t index, const Tensor& grad,
                          ProgramGradients& to);

// Defined in attention_cpu.cpp and attention_cuda.cpp.

// Sets [seed, offset] of dropout; read_seed reads it from a CPU tensor at once.
void decode_seed(Call& call, const Tensor& seed);
void read_seed(Call& call, const Tensor& seed);

// Neither is called without queries, nor without keys unless there are sinks. run_backward sets
// `splits` and the parts itself, and adds to zeros in grad_bias, grad_table, grad_sinks and
// grad_head_scale.
void run_forward(AttentionForwardParams f, const Call& call);
void run_backward(AttentionBackwardParams b, const Call& call);
void run_weights(AttentionWeightsParams w);
void run_select(AttentionSelectParams x);

// Defined in attention_cuda.cpp alone. Results by a kernel of torch, if the first path that takes
// the call is one of torch's.

// out (B, Tq, Hq, Dv) and lse (B, Hq, Tq), contiguous.
struct TorchResults {
  Tensor out, lse;
};
std::optional<TorchResults> run_forward_in_torch(const Call& call);

// Tensors of a backward, whose parameters are `b`.
struct TorchBackward {
  const Tensor &grad_out, &out, &lse;
};
struct TorchGradients {
  Tensor q, k, v;
};
std::optional<TorchGradients> run_backward_in_torch(const Call& call, AttentionBackwardParams& b,
                                                    const TorchBackward& tensors);

// A tensor (B, T, H, D) with unit stride in its last dimension: a copy if the stride differs.
Tensor as_heads(const char* op, const char* name, const Tensor& t, ScalarType type);
inline HeadView view_of(const Tensor& t) {
  return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}
inline MutableHeadView mutable_view_of(const Tensor& t) {
  return {t.mutable_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

}  // namespace omniattn::ops::attention
