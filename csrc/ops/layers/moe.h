// Checked arguments of a mixture of experts, and the functions that run it, defined in moe_cpu.cpp
// and moe_cuda.cpp.
#pragma once

#include "kernels/moe/moe.h"

#include "ops/fields.h"
#include "ops/layers/gemm.h"
#include "ops/tensor.h"
#include "runtime/batch_invariance.h"
#include "semantics/seqlen.h"

namespace omniattn::ops::moe {

// x (N, d), index and weights (N, k), up (E, F or 2F, d), down (E, d, F); index -1: no expert. act:
// Activation; gate: MoeGate; clamp: alpha and limit of gpt-oss, or empty. split_bf16: for fp32 on
// the CPU, see gemm.h. own_kernels: no kernel of torch is wanted.
OMNIATTN_FIELDS(Inputs, Tensor x, index, weights, up; OptTensor up_bias; Tensor down;
                OptTensor down_bias);
OMNIATTN_FIELDS(Form, int64_t act, gate; Floats clamp);
OMNIATTN_FIELDS(Split, int64_t split_bf16; bool own_kernels);

// Weights of all experts, logically (E, out, in): with unit stride along `in`, or along `out`.
struct Experts {
  Tensor tensor;
  int64_t experts, out, in;
  int64_t expert_stride, out_stride, in_stride;
  bool transposed;  // unit stride along `out`

  const void* data() const { return tensor.const_data_ptr(); }
  // The matrix B of the products x W^T (forward) and y W (backward).
  MoeMatrix forward() const {
    return {data(), expert_stride, in_stride, out_stride, is_batch_invariant()};
  }
  MoeMatrix backward() const {
    return {data(), expert_stride, out_stride, in_stride, is_batch_invariant()};
  }
};

// Checked arguments of forward and backward.
struct Problem {
  const char* op;
  DType dtype, compute;
  Rows x;
  int64_t tokens, slots, experts, dim;
  Tensor index, weights;  // contiguous (tokens, slots)
  Experts up, down;
  OptTensor up_bias, down_bias;
  MoeHidden hidden;
  int64_t columns;     // in a row of pre
  int64_t split_bf16;  // number of bf16 pieces for fp32 products (ops/layers/gemm.h)
  bool own_kernels;

  Problem(const OpCall& call, const Inputs& in, const Form& form, const Split& split);

  int64_t pairs() const { return tokens * slots; }
};

// Destinations of gradients; null: not wanted. Weight gradients have the layout of the weights.
struct MoeGradients {
  void *x, *weights, *up, *up_bias, *down, *down_bias;
};

// pre: (tokens slots, columns) for the pre-activations, or null; unused rows become zero.
void run_forward(const Problem& p, void* y, void* pre);
// pre: null to recompute it.
void run_backward(const Problem& p, const Rows& grad_y, const void* pre, const MoeGradients& grads);

}  // namespace omniattn::ops::moe
