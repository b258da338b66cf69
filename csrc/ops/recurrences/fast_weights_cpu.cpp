// fast_weights and atlas_linear on the CPU.
#include "ops/recurrences/fast_weights.h"

#include "kernels/fast_weights/fast_weights.h"

#include <algorithm>
#include <array>
#include <vector>

#include "ops/registry.h"
#include "ops/sequence_problem.h"
#include "ops/shards.h"
#include "ops/stage.h"
#include "ops/step_view.h"

namespace omniattn::ops::fast_weights {
namespace {

// Checked arguments of forward and backward.
struct Problem : SequenceProblem {
  FastWeights shared{};
  std::vector<Tensor> copies;  // of arguments that kernels cannot read in place

  Problem(const OpCall& call, const Inputs& in, const Options& options)
      : SequenceProblem(call.op, "q", in.q, 4, in.cu_seqlens) {
    FastWeights& p = shared;
    p.dtype = dtype;
    p.sequences = sequences;
    p.steps = steps;
    p.boundaries = packed.rows.q;
    p.heads = in.q.size(2), p.key_width = in.q.size(3);
    p.value_width = with_dims("v", in.v, 4).size(3);
    p.mini_batch = options.mini_batch_size, p.window = 1, p.eps = options.eps;
    p.scale = options.scale;
    p.descent = options.descent, p.bias = options.bias, p.residual = options.residual;
    require(p.mini_batch >= 1, op, "mini_batch_size must be >= 1, got ", p.mini_batch);
    require(!p.residual || p.key_width == p.value_width, op,
            "a residual needs k and v of the same width, got ", p.key_width, " and ",
            p.value_width);
    require(in.w.has_value() == in.b.has_value(), op, "w and b must be given together");
    p.q = view("q", in.q, dtype, in.q.sizes());
    p.k = view("k", in.k, dtype, in.q.sizes());
    p.v = view("v", in.v, dtype, {batch, steps, p.heads, p.value_width});
    p.step = gate("step", in.step), p.keep = gate("keep", in.keep), p.gate = gate("gate", in.gate);
    p.w = kept("w", in.w, {p.heads, p.value_width}),
    p.b = kept("b", in.b, {p.heads, p.value_width});
    p.weights = state("weights", in.weights), p.momentum = state("momentum", in.momentum);
    p.anchor = state("anchor", in.anchor);
    if (in.position.has_value()) {
      require_tensor(op, "position", *in.position, ScalarType::Long);
      require_sizes(op, "position", *in.position, {sequences});
      const Tensor& t = copies.emplace_back(as_dense(*in.position));
      p.positions = static_cast<const int64_t*>(t.const_data_ptr());
    }
    for (int64_t n = 0; n < sequences; ++n) {
      const int64_t position = p.positions == nullptr ? 0 : p.positions[n];
      require(position >= 0, op, "position must be >= 0, got ", position);
      p.longest = std::max(p.longest,
                           p.boundaries == nullptr ? steps : p.boundaries[n + 1] - p.boundaries[n]);
    }
  }

  StepView view(const char* name, const Tensor& given, DType type, Sizes want) {
    return step_view(op, name, given, type, want, copies);
  }
  // Contiguous, in A.
  const void* kept(const char* name, const OptTensor& given, Sizes want) {
    if (!given.has_value()) return nullptr;
    return copies.emplace_back(*dense(name, given, want)).const_data_ptr();
  }
  StepView gate(const char* name, const OptTensor& given) {
    if (!given.has_value()) return {};
    return view(name, *given, acc, {batch, steps, shared.heads});
  }
  std::array<int64_t, 4> state_sizes() const {
    return {sequences, shared.heads, shared.rows(), shared.value_width};
  }
  const void* state(const char* name, const OptTensor& given) {
    const auto want = state_sizes();
    return kept(name, given, {want.data(), want.size()});
  }
};

struct AtlasProblem : Problem {
  AtlasProblem(const OpCall& call, const AtlasInputs& in, const AtlasOptions& options)
      : Problem(call,
                {.q = in.q,
                 .k = in.k,
                 .v = in.v,
                 .step = {},
                 .keep = in.keep,
                 .gate = in.gate,
                 .w = {},
                 .b = {},
                 .weights = in.weights,
                 .momentum = in.momentum,
                 .anchor = in.anchor,
                 .position = in.position,
                 .cu_seqlens = in.cu_seqlens},
                {.mini_batch_size = options.mini_batch_size,
                 .eps = 0,
                 .scale = options.scale,
                 .descent = false,
                 .bias = false,
                 .residual = false}) {
    shared.window = with_dims("step", in.step, 4).size(3);
    require(shared.window >= 1, op, "step must have at least 1 number for each token, got 0");
    shared.step = view("step", in.step, acc, {batch, steps, shared.heads, shared.window});
    shared.share = gate("theta", in.theta);
    shared.keys = held("keys", in.keys, shared.key_width);
    shared.values = held("values", in.values, shared.value_width);
  }

  std::array<int64_t, 4> held_sizes(int64_t width) const {
    return {sequences, shared.held(), shared.heads, width};
  }
  const void* held(const char* name, const OptTensor& given, int64_t width) {
    const auto want = held_sizes(width);
    return kept(name, given, {want.data(), want.size()});
  }
};

// Arguments of a backward that both ops have; others are null. `v` has the sizes of y.
template <class G, class D>
FastWeightsBackwardParams backward_params(Problem& p, const G& grads, const Tensor& v, const D& d) {
  FastWeightsBackwardParams x{};
  x.problem = p.shared;
  if (grads.grad_y.has_value()) x.grad_o = p.view("grad_y", *grads.grad_y, p.dtype, v.sizes());
  x.grad_weights = p.state("grad_weights_final", grads.grad_weights_final);
  x.grad_momentum = p.state("grad_momentum_final", grads.grad_momentum_final);
  x.grad_anchor = p.state("grad_anchor_final", grads.grad_anchor_final);
  x.dq = d.dq.data(), x.dk = d.dk.data(), x.dv = d.dv.data();
  x.dstep = d.dstep.data(), x.dkeep = d.dkeep.data(), x.dgate = d.dgate.data();
  x.dweights = d.dweights.data(), x.dmomentum = d.dmomentum.data();
  x.danchor = d.danchor.data();
  return x;
}

void run(const FastWeightsParams& params, DType dtype) {
  const FastWeightsKernels& kernels = fast_weights_kernels(dtype);
  run_items(params, params.problem.items(), kernels.bytes(params.problem), kernels.forward);
}
void run(const FastWeightsBackwardParams& params, DType dtype) {
  const FastWeightsBackwardKernels& kernels = fast_weights_backward_kernels(dtype);
  run_items(params, params.problem.items(), kernels.bytes(params.problem), kernels.backward);
}

}  // namespace

Results fast_weights(const OpCall& call, const Inputs& in, const Options& options) {
  const Problem p(call, in, options);
  const auto sizes = p.state_sizes();
  const Sizes state{sizes.data(), sizes.size()};
  Results r{.y = {true, in.v.sizes(), p.dtype},
            .weights_final = {true, state, p.acc},
            .momentum_final = {true, state, p.acc},
            .anchor_final = {true, state, p.acc}};
  const FastWeightsParams params{.problem = p.shared,
                                 .o = r.y.data(),
                                 .final_weights = r.weights_final.data(),
                                 .final_momentum = r.momentum_final.data(),
                                 .final_anchor = r.anchor_final.data(),
                                 .final_keys = nullptr,
                                 .final_values = nullptr};
  run(params, p.dtype);
  return r;
}

Gradients fast_weights_backward(const OpCall& call, const Incoming& grads, const Inputs& in,
                                const Options& options) {
  Problem p(call, in, options);
  const auto sizes = p.state_sizes();
  const Sizes state{sizes.data(), sizes.size()};
  const std::array<int64_t, 3> tokens{p.batch, p.steps, p.shared.heads};
  const Sizes gates{tokens.data(), tokens.size()};
  const std::array<int64_t, 2> norm{p.shared.heads, p.shared.value_width};
  const Sizes of_norm{norm.data(), norm.size()};
  Gradients d{.dq = {true, in.q.sizes(), p.dtype},
              .dk = {true, in.q.sizes(), p.dtype},
              .dv = {true, in.v.sizes(), p.dtype},
              .dstep = {in.step.has_value(), gates, p.acc},
              .dkeep = {in.keep.has_value(), gates, p.acc},
              .dgate = {in.gate.has_value(), gates, p.acc},
              .dw = {in.w.has_value(), of_norm, p.acc},
              .db = {in.b.has_value(), of_norm, p.acc},
              .dweights = {in.weights.has_value(), state, p.acc},
              .dmomentum = {in.momentum.has_value(), state, p.acc},
              .danchor = {in.anchor.has_value(), state, p.acc}};
  Shards shards(p.acc, std::max<int64_t>(p.sequences, 1));
  FastWeightsBackwardParams params = backward_params(p, grads, in.v, d);
  params.dw = shards.parts_of(d.dw), params.db = shards.parts_of(d.db);
  if (p.sequences == 0) {
    for (const Output* each : {&d.dw, &d.db}) {
      Tensor zeros = each->tensor();
      torch::stable::zero_(zeros);
    }
  }
  run(params, p.dtype);
  shards.sum();
  return d;
}

AtlasResults atlas_linear(const OpCall& call, const AtlasInputs& in, const AtlasOptions& options) {
  const AtlasProblem p(call, in, options);
  const auto sizes = p.state_sizes(), keys = p.held_sizes(p.shared.key_width),
             values = p.held_sizes(p.shared.value_width);
  const Sizes state{sizes.data(), sizes.size()};
  AtlasResults r{.y = {true, in.v.sizes(), p.dtype},
                 .weights_final = {true, state, p.acc},
                 .momentum_final = {true, state, p.acc},
                 .anchor_final = {true, state, p.acc},
                 .keys_final = {true, {keys.data(), keys.size()}, p.acc},
                 .values_final = {true, {values.data(), values.size()}, p.acc}};
  run(FastWeightsParams{.problem = p.shared,
                        .o = r.y.data(),
                        .final_weights = r.weights_final.data(),
                        .final_momentum = r.momentum_final.data(),
                        .final_anchor = r.anchor_final.data(),
                        .final_keys = r.keys_final.data(),
                        .final_values = r.values_final.data()},
      p.dtype);
  return r;
}

AtlasGradients atlas_linear_backward(const OpCall& call, const AtlasIncoming& grads,
                                     const AtlasInputs& in, const AtlasOptions& options) {
  AtlasProblem p(call, in, options);
  const FastWeights& shared = p.shared;
  const auto sizes = p.state_sizes(), keys = p.held_sizes(shared.key_width),
             values = p.held_sizes(shared.value_width);
  const Sizes state{sizes.data(), sizes.size()};
  const std::array<int64_t, 3> tokens{p.batch, p.steps, shared.heads};
  const Sizes gates{tokens.data(), tokens.size()};
  // An empty gradient has the dtype of q, as in the composition.
  const auto of = [&](const OptTensor& t, Sizes size) {
    return Output(t.has_value(), size, t.has_value() ? p.acc : p.dtype);
  };
  AtlasGradients d{.dq = {true, in.q.sizes(), p.dtype},
                   .dk = {true, in.q.sizes(), p.dtype},
                   .dv = {true, in.v.sizes(), p.dtype},
                   .dstep = {true, in.step.sizes(), p.acc},
                   .dtheta = of(in.theta, gates),
                   .dkeep = of(in.keep, gates),
                   .dgate = of(in.gate, gates),
                   .dweights = of(in.weights, state),
                   .dmomentum = of(in.momentum, state),
                   .danchor = of(in.anchor, state),
                   .dkeys = of(in.keys, {keys.data(), keys.size()}),
                   .dvalues = of(in.values, {values.data(), values.size()})};
  FastWeightsBackwardParams params = backward_params(p, grads, in.v, d);
  params.grad_keys = p.held("grad_keys_final", grads.grad_keys_final, shared.key_width);
  params.grad_values = p.held("grad_values_final", grads.grad_values_final, shared.value_width);
  params.dshare = d.dtheta.data();
  params.dkeys = d.dkeys.data(), params.dvalues = d.dvalues.data();
  run(params, p.dtype);
  return d;
}

namespace {

const Registry registry([](Registry& ops) {
  ops.name("fast_weights", {{"titans_linear"}, {"ttt_linear", "descent"}});
  ops.name("atlas_orthogonal", {{"atlas_linear"}});  // an op of Python
  ops.implement<fast_weights>("fast_weights", differentiable);
  ops.implement<fast_weights_backward>("fast_weights_backward");
  ops.implement<atlas_linear>("atlas_linear", differentiable);
  ops.implement<atlas_linear_backward>("atlas_linear_backward");
});

}  // namespace
}  // namespace omniattn::ops::fast_weights
