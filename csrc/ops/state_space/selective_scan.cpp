// selective_scan.
#include "ops/state_space/selective_scan.h"

#include <limits>

#include "kernels/scan/step.h"

#include "ops/registry.h"
#include "ops/stage.h"
#include "runtime/dispatch.h"

namespace omniattn::ops::selective_scan {
namespace {

// True if the scan is a single step that the step kernel supports.
bool is_step(const Problem& p) {
  const bool constant = p.b.constant || p.c.constant;
  return !kOnCuda && p.steps == 1 && !p.paired && !constant && p.packed.rows.q == nullptr;
}
// Runs a single step from the initial state to `state`; both may be the same memory.
void run_step(const Problem& p, void* state, void* y) {
  const auto rows = [](const ScanView& x) { return StepRows{x.data, x.batch}; };
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const StateStep step{.dtype = p.dtype,
                       .softplus = p.softplus,
                       .least = -kInfinity,
                       .largest = kInfinity,
                       .batch = p.batch,
                       .heads = p.channels,
                       .width = 1,
                       .groups = p.groups,
                       .states = p.states,
                       .x = rows(p.u.view()),
                       .dt = rows(p.delta.view()),
                       .z = p.z.has_value() ? rows(p.z->view()) : StepRows{},
                       .b = rows(p.b_view.rows),
                       .c = rows(p.c_view.rows),
                       .decay = data_or_null(p.decay),
                       .skip = data_or_null(p.skip),
                       .bias = data_or_null(p.bias),
                       .rule = p.has_decay() ? StepRule::of_states : StepRule::longhorn,
                       .skip_of_rows = true,
                       .before = data_or_null(p.initial_state),
                       .state = state,
                       .states_first = false,
                       .y = y};
  if constexpr (!kOnCuda) {
    // An exponential costs about as much as four products.
    run_items(step, step_items(step), 4 * kStepHeads * p.states, state_step_kernels(p.dtype).run);
  }
}

// Saves the state before a single step as the scan does: (B, N, D) from (B, D, N).
void save_before_step(const Problem& p, void* states) {
  const int64_t of_entry = p.channels * p.states;
  dispatch_compute(p.acc, [&]<class A>(A) {
    const A* before = static_cast<const A*>(data_or_null(p.initial_state));
    parallel_ranges(p.batch, grain_of(of_entry), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * of_entry; i < end * of_entry; ++i) {
        const int64_t entry = i / of_entry, n = i / p.channels % p.states, d = i % p.channels;
        const int64_t from = (entry * p.channels + d) * p.states + n;
        static_cast<A*>(states)[i] = before == nullptr ? A(0) : before[from];
      }
    });
  });
}

// A block of the forward keeps its tables in L1.
constexpr int64_t kForwardBlock = 256;

// states: at the starts of chunks.
OMNIATTN_FIELDS(Results, Output y, final_state, states);

Results selective_scan(const OpCall& call, const Inputs& in, const SequenceArguments& sequences,
                       const Options& options) {
  const DeviceScope scope(in.u);
  const Problem p(call, in, sequences, options);
  const int64_t of_group = p.groups > 0 ? p.channels / p.groups : 0;
  const Selective scan = p.params(kOnCuda ? kSelectiveThreads : p.block(of_group, kForwardBlock));
  const Output y(true, p.u.tensor.sizes(), p.dtype);
  const Output final_state(true, {p.sequences, p.channels, p.states}, p.acc);
  const Output states(call.saves, {scan_slots(scan.rows), p.states, p.channels}, p.acc);
  if (is_step(p)) {
    run_step(p, final_state.data(), y.data());
    if (call.saves) save_before_step(p, states.data());
    return {y, final_state, states};
  }
  const SelectiveParams params{
      .scan = scan, .y = y.data(), .final_state = final_state.data(), .states = states.data()};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_selective(params, stream()));
  } else {
    const SelectiveKernels& kernels = selective_kernels(p.dtype);
    run_items(params, scan.items(), kernels.bytes(scan), kernels.forward);
  }
  return {y, final_state, states};
}

OMNIATTN_FIELDS(WrittenState, Written initial_state; bool delta_softplus);

// selective_scan without gradients, on real states that are updated in place.
Tensor selective_scan_inplace(const OpCall& call, const Inputs& in, const WrittenState& written) {
  const auto& [initial_state, softplus] = written;
  const DeviceScope scope(in.u);
  const Problem p(call, in, {initial_state, std::nullopt}, {softplus, false});
  require(initial_state.is_contiguous(), p.op,
          "initial_state must be contiguous to be updated in place");
  const Output y(true, p.u.tensor.sizes(), p.dtype);
  void* const state = initial_state.mutable_data_ptr();
  if (is_step(p)) {
    run_step(p, state, y.data());
    return y.tensor();
  }
  const int64_t of_group = p.groups > 0 ? p.channels / p.groups : 0;
  const SelectiveParams params{
      .scan = p.params(kOnCuda ? kSelectiveThreads : p.block(of_group, kForwardBlock)),
      .y = y.data(),
      .final_state = state,
      .states = nullptr};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_selective(params, stream()));
  } else {
    const SelectiveKernels& kernels = selective_kernels(p.dtype);
    run_items(params, params.scan.items(), kernels.bytes(params.scan), kernels.forward);
  }
  return y.tensor();
}

// Sums the gradients of A, B, C, D and delta_bias over parts.
struct WeightSums {
  const Problem& p;
  const Selective& scan;
  Tensor partial, steps_b, steps_c;
  int64_t blocks;

  WeightSums(const Problem& problem, const Selective& s)
      : p(problem),
        scan(s),
        // Without sequences the sums read one row of zeros.
        partial(scratch(std::max<int64_t>(1, p.sequences) * selective_rows(s) * p.channels, p.acc)),
        steps_b(of_steps(p.b)),
        steps_c(of_steps(p.c)),
        blocks(std::max<int64_t>(1, s.blocks())) {
    if (p.sequences == 0) torch::stable::fill_(partial, 0);
  }
  Tensor of_steps(const WeightInput& w) const {
    if (w.constant) return empty_tensor({0}, p.acc);
    const int64_t parts = std::max<int64_t>(1, scan.blocks());
    Tensor parts_of = scratch(parts * p.batch * p.steps * p.groups * p.states, p.acc);
    if (p.packed.rows.q != nullptr || p.channels == 0) torch::stable::fill_(parts_of, 0);
    return parts_of;
  }
  void* data(const WeightInput& w, const Tensor& t) const {
    return w.constant ? nullptr : t.mutable_data_ptr();
  }

  Tensor sum_of(const Tensor& parts, int64_t first, int64_t shards, int64_t stride,
                Sizes sizes) const {
    const Tensor sum = empty_tensor(sizes, p.acc);
    p.sum_shards(parts, first, shards, stride, sum.numel(), sum.mutable_data_ptr());
    return sum;
  }
  Tensor rows(bool wanted, int64_t first, int64_t count) const {
    if (!wanted) return empty_tensor({0}, p.acc);
    const Tensor sum = sum_of(partial, first * p.channels, p.sequences,
                              selective_rows(scan) * p.channels, {count, p.channels});
    return torch::stable::contiguous(torch::stable::transpose(sum, 0, 1));
  }
  Tensor vector(bool wanted, int64_t row) const {
    if (!wanted) return empty_tensor({0}, p.acc);
    return sum_of(partial, row * p.channels, p.sequences, selective_rows(scan) * p.channels,
                  {p.channels});
  }
  Tensor weights(bool wanted, const WeightInput& w, const Tensor& steps, int64_t row) const {
    if (!wanted) return empty_tensor({0}, w.constant ? p.acc : p.weight_dtype());
    if (w.constant) return rows(true, row, p.states);
    const int64_t size = p.batch * p.steps * p.groups * p.states;
    const Tensor sum = sum_of(steps, 0, blocks, size, {p.batch, p.steps, p.groups, p.states});
    if (p.weight_dtype() == p.acc) return sum;
    Tensor rounded = empty_tensor(sum.sizes(), p.dtype);
    torch::stable::copy_(rounded, sum);
    return rounded;
  }
};

OMNIATTN_FIELDS(Saved, Tensor states; OptTensor grad_y, grad_final_state);
OMNIATTN_FIELDS(Wanted, bool A_grad, B_grad, C_grad, D_grad, delta_bias_grad);
OMNIATTN_FIELDS(Gradients, Output du, ddelta; Tensor dA, dB, dC, dD; Output dz; Tensor ddelta_bias;
                Output dinitial_state);

Gradients selective_scan_backward(const OpCall& call, const Inputs& in,
                                  const SequenceArguments& sequences, const Saved& saved,
                                  const Options& options, const Wanted& wanted) {
  const DeviceScope scope(in.u);
  const Problem p(call, in, sequences, options);
  const Selective scan = p.params(kOnCuda ? kSelectiveThreads : kBackwardBlock);
  const Sizes sizes = in.u.sizes();
  const ScanInput dy(p.op, "grad_y", p.gradient_or_zeros(saved.grad_y, in.u, sizes), p.dtype,
                     sizes);
  const OptTensor grad_final = p.state("grad_final_state", saved.grad_final_state);
  require_dense(p.op, "states", saved.states, p.acc, {scan_slots(scan.rows), p.states, p.channels});
  const Output du(true, sizes, p.dtype), ddelta(true, sizes, p.dtype);
  const Output dz(in.z.has_value(), sizes, p.dtype);
  const Output dinitial(true, {p.sequences, p.channels, p.states}, p.acc);
  const WeightSums sums(p, scan);
  const SelectiveBackwardParams params{.scan = scan,
                                       .grad_y = dy.view(),
                                       .grad_final_state = data_or_null(grad_final),
                                       .states = saved.states.const_data_ptr(),
                                       .du = du.data(),
                                       .ddelta = ddelta.data(),
                                       .dz = dz.data(),
                                       .db = sums.data(p.b, sums.steps_b),
                                       .dc = sums.data(p.c, sums.steps_c),
                                       .partial = sums.partial.mutable_data_ptr(),
                                       .dinitial_state = dinitial.data()};
  if constexpr (kOnCuda) {
    const Tensor memory = scratch(selective_backward_elements(scan), p.acc);
    require_launched(p.op, launch_selective_backward(params, memory.mutable_data_ptr(), stream()));
  } else {
    const SelectiveBackwardKernels& kernels = selective_backward_kernels(p.dtype);
    run_items(params, scan.items(), kernels.bytes(scan), kernels.backward);
  }
  return {
      .du = du,
      .ddelta = ddelta,
      .dA = sums.rows(wanted.A_grad && p.has_decay(), 0, p.states),
      .dB = sums.weights(wanted.B_grad, p.b, sums.steps_b, selective_row_of_b(scan)),
      .dC = sums.weights(wanted.C_grad, p.c, sums.steps_c, selective_row_of_c(scan)),
      .dD = sums.vector(wanted.D_grad && in.D.has_value(), p.states),
      .dz = dz,
      .ddelta_bias = sums.vector(wanted.delta_bias_grad && in.delta_bias.has_value(), p.states + 1),
      .dinitial_state = dinitial};
}

const Registry registry([](Registry& ops) {
  ops.constant("scan_chunk", kScanChunk);  // of rwkv4, too
  ops.add<selective_scan>("selective_scan", saves_last);
  ops.add<selective_scan_inplace>("selective_scan_");
  ops.add<selective_scan_backward>("selective_scan_backward");
  ops.define<decltype(selective_scan_tangents)>("selective_scan_tangents");
});

}  // namespace
}  // namespace omniattn::ops::selective_scan
