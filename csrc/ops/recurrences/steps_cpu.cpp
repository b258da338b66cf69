#include "ops/recurrences/steps.h"

#include <cmath>

#include "kernels/conv/conv.h"
#include "kernels/fast_weights/conjugate_gradients.h"
#include "kernels/scan/step.h"
#include "ops/recurrences/scan.h"
#include "ops/registry.h"
#include "ops/stage.h"

namespace omniattn::ops::steps {
namespace {

void require_step(const SequenceProblem& p, const char* name) {
  require(p.steps == 1, p.op, name,
          " must have T=1 where states are updated in place, got T=", p.steps);
}

// Requires that no two elements of a tensor that is written share memory.
void require_writable(const char* op, const char* name, const Tensor& t) {
  if (t.numel() == 0) return;
  for (int64_t i = 0; i < t.dim(); ++i) {
    require(t.size(i) <= 1 || t.stride(i) != 0, op, name,
            " must not be an expanded tensor to be updated in place");
  }
}

}  // namespace

Tensor causal_conv1d_inplace(const OpCall& call, const Conv& in, const State& state,
                             const ConvOptions& options) {
  const auto& [x, weight, bias] = in;
  const Tensor& initial_state = state.initial_state;
  const DeviceScope scope(x);
  const SequenceProblem p(call.op, "x", x, 3, std::nullopt);
  require_tensor(p.op, "x", x, p.dtype);
  require_step(p, "x");
  const Tensor rows = with_unit_last_stride(x);
  const int64_t channels = x.size(2);
  require_tensor(p.op, "weight", weight, p.dtype);
  require(weight.dim() == 2 && weight.size(0) == channels && weight.size(1) >= 1, p.op,
          "weight must have shape (D, K) with D=", channels, " and K >= 1, got ",
          Shape{weight.sizes().data(), weight.sizes().size()});
  const int64_t taps = weight.size(1);
  const OptTensor vector = as_vector(p.op, "bias", bias, p.dtype, channels);
  require_tensor(p.op, "initial_state", initial_state, p.dtype);
  const Sizes sizes = initial_state.sizes();
  require(sizes.size() == 3 && sizes[0] == p.batch && sizes[1] == channels && sizes[2] >= taps - 1,
          p.op, "initial_state must have shape (", p.batch, ", ", channels,
          ", K - 1 or more), got ", Shape{sizes.data(), sizes.size()});
  require_writable(p.op, "initial_state", initial_state);
  const Tensor y = empty_tensor(x.sizes(), p.dtype);
  const CausalConvStep step{.dtype = p.dtype,
                            .silu = options.silu,
                            .batch = p.batch,
                            .channels = channels,
                            .taps = taps,
                            .kept = sizes[2],
                            .x = rows.const_data_ptr(),
                            .x_batch = rows.stride(0),
                            .before = initial_state.mutable_data_ptr(),
                            .before_batch = initial_state.stride(0),
                            .before_channel = initial_state.stride(1),
                            .before_tap = initial_state.stride(2),
                            .weight = weight.const_data_ptr(),
                            .weight_channel = weight.stride(0),
                            .weight_tap = weight.stride(1),
                            .bias = data_or_null(vector),
                            .y = y.mutable_data_ptr()};
  run_items(step, step.batch, step.channels * taps, causal_conv_step_kernels(step.dtype).run);
  return y;
}

Tensor ssd_inplace(const OpCall& call, const Ssd& in, const State& state,
                   const SsdOptions& options) {
  const auto& [x, dt, A, B, C, D, z, dt_bias] = in;
  const auto [dt_softplus, least, largest] = options;
  const Tensor& initial_state = state.initial_state;
  const DeviceScope scope(x);
  const SequenceProblem p(call.op, "x", x, 4, std::nullopt);
  require_step(p, "x");
  const int64_t heads = x.size(2), width = x.size(3);
  const ScanInput rows(p.op, "x", x, p.dtype, x.sizes());
  const ScanInput steps(p.op, "dt", dt, p.dtype, {p.batch, 1, heads});
  p.with_dims("B", B, 4);
  const int64_t groups = B.size(2), states = B.size(3);
  require(groups > 0 ? heads % groups == 0 : heads == 0, p.op,
          "the heads of x must be a multiple of the groups of B, got ", heads, " and ", groups);
  const ScanInput b(p.op, "B", B, p.dtype, {p.batch, 1, groups, states});
  const ScanInput c(p.op, "C", C, p.dtype, {p.batch, 1, groups, states});
  std::optional<ScanInput> gate;
  if (z.has_value()) gate.emplace(p.op, "z", *z, p.dtype, x.sizes());
  const OptTensor decay = p.dense("A", A, {heads}), bias = p.dense("dt_bias", dt_bias, {heads});
  const bool of_rows = D.has_value() && D->dim() == 2;
  const OptTensor skip = of_rows ? p.dense("D", D, {heads, width}) : p.dense("D", D, {heads});
  require(!std::isnan(least) && !(least > largest), p.op,
          "dt_limit must be (least, largest), got (", least, ", ", largest, ")");
  require_tensor(p.op, "initial_state", initial_state, p.acc);
  require_sizes(p.op, "initial_state", initial_state, {p.batch, heads, width, states});
  const bool dense = initial_state.is_contiguous();
  require(dense || torch::stable::transpose(initial_state, 2, 3).is_contiguous(), p.op,
          "initial_state or its transpose must be contiguous to be updated in place");
  const Tensor y = empty_tensor(x.sizes(), p.dtype);
  const auto view = [](const ScanInput& t) {
    const ScanView v = t.view();
    return StepRows{v.data, v.batch};
  };
  const StateStep step{.dtype = p.dtype,
                       .softplus = dt_softplus,
                       .least = least,
                       .largest = largest,
                       .batch = p.batch,
                       .heads = heads,
                       .width = width,
                       .groups = groups,
                       .states = states,
                       .x = view(rows),
                       .dt = view(steps),
                       .z = gate.has_value() ? view(*gate) : StepRows{},
                       .b = view(b),
                       .c = view(c),
                       .decay = decay->const_data_ptr(),
                       .skip = data_or_null(skip),
                       .bias = data_or_null(bias),
                       .rule = StepRule::of_head,
                       .skip_of_rows = of_rows,
                       .before = initial_state.const_data_ptr(),
                       .state = initial_state.mutable_data_ptr(),
                       .states_first = !dense,
                       .y = y.mutable_data_ptr()};
  run_items(step, step_items(step), width * states, state_step_kernels(step.dtype).run);
  return y;
}

Tensor mesa_step(const OpCall& call, const Mesa& in, const MesaOptions& options) {
  const SequenceProblem p(call.op, "q", in.q, 4, std::nullopt);
  require_tensor(p.op, "q", in.q, p.acc);
  require(p.steps == 1, p.op, "q must have T=1 for a step, got T=", p.steps);
  const int64_t heads = in.q.size(2), width = in.q.size(3);
  const Tensor q = *p.dense("q", in.q, in.q.sizes());
  const Tensor lamb = *p.dense("lamb", in.lamb, in.q.sizes());
  const Tensor state = *p.dense("initial_state", in.initial_state, {p.batch, heads, width, width});
  const Tensor x = empty_tensor(in.q.sizes(), p.acc);
  const ConjugateGradients params{.dtype = p.acc,
                                  .systems = p.batch * heads,
                                  .width = width,
                                  .iterations = options.max_iterations,
                                  .tolerance = options.tolerance,
                                  .state = state.const_data_ptr(),
                                  .lamb = lamb.const_data_ptr(),
                                  .q = q.const_data_ptr(),
                                  .x = x.mutable_data_ptr()};
  run_items(params, params.systems, params.bytes(), conjugate_gradients_kernels(p.acc).solve);
  return x;
}

namespace {

const Registry registry([](Registry& ops) {
  ops.implement<causal_conv1d_inplace>("causal_conv1d_");
  ops.implement<ssd_inplace>("ssd_");
  ops.name("mesa_step", {{"mesa_net"}});
  ops.implement<mesa_step>("mesa_step");
});

}  // namespace
}  // namespace omniattn::ops::steps
