// The checked arguments of selective_scan, and its tangents, which selective_scan_tangents_cpu.cpp
// defines. Only the CPU has a kernel for these: elsewhere Python evaluates the definition in
// chunks.
#pragma once

#include "kernels/scan/selective.h"
#include "ops/recurrences/scan.h"

namespace omniattn::ops::selective_scan {

// B or C: (B, T, G, N) in the dtype of u, or of A if states are paired; or constant, (D, N) in A.
struct WeightInput {
  Tensor tensor;
  bool constant;

  WeightInput(const char* op, const char* name, const Tensor& t)
      : tensor(t), constant(t.dim() == 2) {
    require(constant || t.dim() == 4, op, name, " must have 2 or 4 dimensions, got ", t.dim());
  }
  SelectiveWeights view(const char* op, const char* name, DType dtype, DType acc, Sizes varying,
                        Sizes fixed) {
    if (!constant) {
      const ScanInput input(op, name, tensor, dtype, varying);
      tensor = input.tensor;
      return {input.view(), false};
    }
    require_tensor(op, name, tensor, acc);
    require_sizes(op, name, tensor, fixed);
    tensor = as_dense(tensor);
    return {{tensor.const_data_ptr(), 0, 0}, true};
  }
};

// u, delta, z (B, T, D), A (D, N), B, C (B, T, G, N) or (D, N), D, delta_bias (D), states (N, D,
// N). If paired, A, B, C and states alternate real and imaginary parts (kernels/scan/selective.h).
// Without A the rule is Longhorn's, with B and C of each token.
OMNIATTN_FIELDS(Inputs, Tensor u, delta; OptTensor A; Tensor B, C; OptTensor D, z, delta_bias);
OMNIATTN_FIELDS(Options, bool delta_softplus, paired);

// Checked arguments of forward and backward.
struct Problem : ScanProblem {
  int64_t channels, states, groups;
  ScanInput u, delta;
  std::optional<ScanInput> z;
  OptTensor decay, skip, bias, initial_state;
  WeightInput b, c;
  SelectiveWeights b_view, c_view;
  bool softplus, paired;

  Problem(const OpCall& call, const Inputs& in, const SequenceArguments& given, Options options)
      : ScanProblem(call.op, "u", in.u, 3, given.cu_seqlens),
        channels(in.u.size(2)),
        states(states_of(in)),
        u(op, "u", in.u, dtype, in.u.sizes()),
        delta(op, "delta", in.delta, dtype, in.u.sizes()),
        decay(in.A.has_value() ? dense("A", in.A, {channels, states}) : OptTensor{}),
        skip(dense("D", in.D, {channels})),
        bias(dense("delta_bias", in.delta_bias, {channels})),
        initial_state(state("initial_state", given.initial_state)),
        b(op, "B", in.B),
        c(op, "C", in.C),
        softplus(options.delta_softplus),
        paired(options.paired) {
    require(
        in.A.has_value() || (!b.constant && !c.constant && !softplus && !paired), op,
        "without A, B and C must have 4 dimensions, and delta_softplus and paired must be false");
    require(!paired || states % 2 == 0, op, "A must have two numbers of each pair of states, got ",
            states, " of each channel");
    if (in.z.has_value()) z.emplace(op, "z", *in.z, dtype, in.u.sizes());
    groups = !b.constant ? in.B.size(2) : !c.constant ? in.C.size(2) : 1;
    require(groups > 0 ? channels % groups == 0 : channels == 0, op,
            "the channels of u must be a multiple of the groups of B and C, got ", channels,
            " and ", groups);
    require(!kOnCuda || states <= kSelectiveStates, op, "A must have at most ", kSelectiveStates,
            " states on CUDA, got ", states);
    const std::array<int64_t, 4> varying{batch, steps, groups, states};
    const std::array<int64_t, 2> fixed{channels, states};
    const Sizes of_steps{varying.data(), varying.size()}, of_all{fixed.data(), fixed.size()};
    b_view = b.view(op, "B", weight_dtype(), acc, of_steps, of_all);
    c_view = c.view(op, "C", weight_dtype(), acc, of_steps, of_all);
  }

  static int64_t states_of(const Inputs& in) {
    if (!in.A.has_value()) return in.B.size(in.B.dim() - 1);
    return in.A->dim() == 2 ? in.A->size(1) : 0;
  }
  bool has_decay() const { return decay.has_value(); }
  // The dtype of B and C that vary over time.
  DType weight_dtype() const { return paired ? acc : dtype; }

  OptTensor state(const char* name, const OptTensor& t) const {
    return dense(name, t, {sequences, channels, states});
  }
  Selective params(int64_t block_) const {
    return {.dtype = dtype,
            .softplus = softplus,
            .rule = paired        ? SelectiveRule::pairs
                    : has_decay() ? SelectiveRule::decay
                                  : SelectiveRule::longhorn,
            .rows = rows(),
            .channels = channels,
            .groups = groups,
            .states = states,
            .block = block_,
            .u = u.view(),
            .delta = delta.view(),
            .z = z.has_value() ? z->view() : ScanView{},
            .decay = data_or_null(decay),
            .b = b_view,
            .c = c_view,
            .skip = data_or_null(skip),
            .bias = data_or_null(bias),
            .initial_state = data_or_null(initial_state)};
  }
};

// Sums over channels are added later, so the block of a backward is the same for any number of
// threads.
constexpr int64_t kBackwardBlock = 128;

// A scan with real states, B and C (B, T, G, N), and all tensors in A.
OMNIATTN_FIELDS(PlainInputs, Tensor u, delta, A, B, C);
// Tangents of the inputs. That of the initial state may be None: 0.
OMNIATTN_FIELDS(MovedInputs, Tensor tangent_u, tangent_delta, tangent_A, tangent_B, tangent_C;
                OptTensor tangent_initial_state);
// Gradients of the outputs, and tangents of them; None: 0. No gradient is wanted without grad_y.
OMNIATTN_FIELDS(MovedGradients, OptTensor grad_y, grad_final_state, tangent_grad_y,
                tangent_grad_final_state);
// Tangents of the outputs, and of the gradients if they are wanted. That of dA is to be summed over
// sequences (S, D, N), and those of dB and dC over parts (P, B, T, G, N).
OMNIATTN_FIELDS(TangentResults, Output tangent_y, tangent_final_state, tangent_du, tangent_ddelta,
                tangent_dA, tangent_dB, tangent_dC, tangent_dinitial_state);

TangentResults selective_scan_tangents(const OpCall& call, const PlainInputs& in,
                                       const SequenceArguments& sequences, const MovedInputs& moved,
                                       const MovedGradients& grads);

}  // namespace omniattn::ops::selective_scan
