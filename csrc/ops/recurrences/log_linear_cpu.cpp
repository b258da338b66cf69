// log_linear_attention on the CPU.
#include "ops/recurrences/log_linear.h"

#include "kernels/recurrence/log_linear.h"

#include <algorithm>
#include <array>
#include <vector>

#include "ops/registry.h"
#include "ops/sequence_problem.h"
#include "ops/shards.h"
#include "ops/stage.h"
#include "ops/step_view.h"

namespace omniattn::ops::log_linear {
namespace {

// Checked arguments of forward and backward.
struct Problem : SequenceProblem {
  LogLinear shared{};
  std::vector<Tensor> copies;  // of arguments that kernels cannot read in place

  Problem(const OpCall& call, const Inputs& in)
      : SequenceProblem(call.op, "q", in.q, 4, in.cu_seqlens) {
    LogLinear& p = shared;
    p.dtype = dtype;
    p.sequences = sequences;
    p.steps = steps;
    p.boundaries = packed.rows.q;
    p.key_heads = in.q.size(2), p.key_width = in.q.size(3);
    p.value_heads = with_dims("v", in.v, 4).size(2), p.value_width = in.v.size(3);
    p.levels = with_dims("level_scales", in.level_scales, 4).size(3);
    require(p.key_heads > 0 ? p.value_heads % p.key_heads == 0 : p.value_heads == 0, op,
            "the heads of v must be a multiple of those of q and k, got ", p.value_heads, " and ",
            p.key_heads);
    p.q = view("q", in.q, dtype, in.q.sizes());
    p.k = view("k", in.k, dtype, in.q.sizes());
    p.v = view("v", in.v, dtype, {batch, steps, p.value_heads, p.value_width});
    p.g = view("g", in.g, acc, {batch, steps, p.value_heads});
    p.scales = view("level_scales", in.level_scales, acc, {batch, steps, p.value_heads, p.levels});
    require(in.initial_state.has_value() == in.position.has_value(), op,
            "initial_state and position must be given together");
    p.initial_state = state("initial_state", in.initial_state);
    if (in.position.has_value()) {
      require_tensor(op, "position", *in.position, ScalarType::Long);
      require_sizes(op, "position", *in.position, {sequences});
      const Tensor& kept = copies.emplace_back(as_dense(*in.position));
      p.positions = static_cast<const int64_t*>(kept.const_data_ptr());
    }
    check_positions();
  }

  StepView view(const char* name, const Tensor& given, DType type, Sizes want) {
    return step_view(op, name, given, type, want, copies);
  }
  std::array<int64_t, 5> state_sizes() const {
    return {sequences, shared.value_heads, shared.levels, shared.key_width, shared.value_width};
  }
  const void* state(const char* name, const OptTensor& given) {
    if (!given.has_value()) return nullptr;
    const auto want = state_sizes();
    return copies.emplace_back(*dense(name, given, {want.data(), want.size()})).const_data_ptr();
  }

 private:
  // Sequences must have levels for their last tokens: otherwise slots would lie beyond the states.
  void check_positions() {
    constexpr int64_t kMost = 62;  // so that positions after the last token are numbers, too
    const int64_t limit = int64_t{1} << std::clamp<int64_t>(shared.levels - 1, 0, kMost);
    for (int64_t n = 0; n < sequences; ++n) {
      const int64_t count =
          shared.boundaries == nullptr ? steps : shared.boundaries[n + 1] - shared.boundaries[n];
      const int64_t position = shared.positions == nullptr ? 0 : shared.positions[n];
      require(position >= 0, op, "position must be >= 0, got ", position);
      require(shared.levels >= 1 && position <= limit - count, op,
              "level_scales must have L >= 1 levels for at most 2^(L-1) tokens, got L=",
              shared.levels, ", position=", position, ", tokens=", count);
      shared.longest = std::max(shared.longest, count);
    }
  }
};

}  // namespace

Results log_linear_attention(const OpCall& call, const Inputs& in) {
  const Problem p(call, in);
  const auto state = p.state_sizes();
  Results r{.y = {true, in.v.sizes(), p.dtype},
            .final_state = {true, {state.data(), state.size()}, p.acc}};
  const LogLinearParams params{
      .problem = p.shared, .o = r.y.data(), .final_state = r.final_state.data()};
  const LogLinearKernels& kernels = log_linear_kernels(p.dtype);
  run_items(params, p.shared.items(), kernels.bytes(p.shared), kernels.forward);
  return r;
}

Gradients log_linear_attention_backward(const OpCall& call, const Incoming& grads, const Inputs& in,
                                        const Wanted& wanted) {
  Problem p(call, in);
  const auto state = p.state_sizes();
  Gradients d{.dq = {true, in.q.sizes(), p.dtype},
              .dk = {true, in.q.sizes(), p.dtype},
              .dv = {true, in.v.sizes(), p.dtype},
              .dg = {true, in.g.sizes(), p.acc},
              .dlevel_scales = {true, in.level_scales.sizes(), p.acc},
              .dinitial_state = {wanted.initial_state_grad, {state.data(), state.size()}, p.acc}};
  const int64_t key_heads = p.shared.key_heads;
  Shards shards(p.dtype, key_heads > 0 ? p.shared.value_heads / key_heads : 1);
  const LogLinearBackwardParams params{
      .problem = p.shared,
      .grad_o = grads.grad_y.has_value() ? p.view("grad_y", *grads.grad_y, p.dtype, in.v.sizes())
                                         : StepView{},
      .grad_final_state = p.state("grad_final_state", grads.grad_final_state),
      .dq = shards.parts_of(d.dq),
      .dk = shards.parts_of(d.dk),
      .dv = d.dv.data(),
      .dg = d.dg.data(),
      .dscales = d.dlevel_scales.data(),
      .dinitial_state = d.dinitial_state.data()};
  const LogLinearBackwardKernels& kernels = log_linear_backward_kernels(p.dtype);
  run_items(params, p.shared.items(), kernels.bytes(p.shared), kernels.backward);
  shards.sum();
  return d;
}

namespace {

const Registry registry([](Registry& ops) {
  ops.implement<log_linear_attention>("log_linear_attention", differentiable);
  ops.implement<log_linear_attention_backward>("log_linear_attention_backward");
});

}  // namespace
}  // namespace omniattn::ops::log_linear
