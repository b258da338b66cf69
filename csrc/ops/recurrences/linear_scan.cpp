// linear_scan.
#include "kernels/scan/linear.h"

#include "ops/recurrences/scan.h"
#include "ops/registry.h"
#include "ops/stage.h"

namespace omniattn::ops::linear_scan {
namespace {

// x (B, T, C), g (B, T, C) in the accumulator type, states (N, C).
OMNIATTN_FIELDS(Inputs, Tensor x, g);

// Checked arguments of forward and backward.
struct Problem : ScanProblem {
  int64_t channels;
  ScanInput x, g;
  OptTensor initial_state;

  Problem(const OpCall& call, const Inputs& in, const SequenceArguments& given)
      : ScanProblem(call.op, "x", in.x, 3, given.cu_seqlens),
        channels(in.x.size(2)),
        x(op, "x", in.x, dtype, in.x.sizes()),
        g(op, "g", in.g, acc, in.x.sizes()),
        initial_state(state("initial_state", given.initial_state)) {}

  OptTensor state(const char* name, const OptTensor& t) const {
    return dense(name, t, {sequences, channels});
  }
  LinearScan params(int64_t most) const {
    return {.dtype = dtype,
            .rows = rows(),
            .channels = channels,
            .block = block(channels, most),
            .x = x.view(),
            .g = g.view(),
            .initial_state = data_or_null(initial_state)};
  }
};

int64_t items_of(const LinearScan& p) { return p.rows.sequences * ceil_div(p.channels, p.block); }

// A large block lets the forward read long runs of each row; the backward keeps a chunk in L2.
constexpr int64_t kForwardBlock = 512, kBackwardBlock = 256;

// states: at the starts of chunks.
OMNIATTN_FIELDS(Results, Output y, final_state, states);

Results linear_scan(const OpCall& call, const Inputs& in, const SequenceArguments& sequences) {
  const DeviceScope scope(in.x);
  const Problem p(call, in, sequences);
  const LinearScan scan = p.params(kForwardBlock);
  const Output y(true, p.x.tensor.sizes(), p.dtype);
  const Output final_state(true, {p.sequences, p.channels}, p.acc);
  const Output states(call.saves, {scan_slots(scan.rows), p.channels}, p.acc);
  const LinearScanParams params{
      .scan = scan, .y = y.data(), .final_state = final_state.data(), .states = states.data()};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_linear_scan(params, stream()));
  } else {
    const LinearScanKernels& kernels = linear_scan_kernels(p.dtype);
    run_items(params, items_of(scan), kernels.bytes(scan), kernels.forward);
  }
  return {y, final_state, states};
}

OMNIATTN_FIELDS(Saved, Tensor states; OptTensor grad_y, grad_final_state);
OMNIATTN_FIELDS(Wanted, bool g_grad, initial_state_grad);
OMNIATTN_FIELDS(Gradients, Output dx, dg, dinitial_state);

Gradients linear_scan_backward(const OpCall& call, const Inputs& in,
                               const SequenceArguments& sequences, const Saved& saved,
                               const Wanted& wanted) {
  const DeviceScope scope(in.x);
  const Problem p(call, in, sequences);
  const LinearScan scan = p.params(kBackwardBlock);
  const Sizes sizes = in.x.sizes();
  const ScanInput dy(p.op, "grad_y", p.gradient_or_zeros(saved.grad_y, in.x, sizes), p.dtype,
                     sizes);
  const OptTensor grad_final = p.state("grad_final_state", saved.grad_final_state);
  require_dense(p.op, "states", saved.states, p.acc, {scan_slots(scan.rows), p.channels});
  const Output dx(true, sizes, p.dtype), dg(wanted.g_grad, sizes, p.acc);
  const Output dinitial(wanted.initial_state_grad, {p.sequences, p.channels}, p.acc);
  const LinearScanBackwardParams params{.scan = scan,
                                        .grad_y = dy.view(),
                                        .grad_final_state = data_or_null(grad_final),
                                        .states = saved.states.const_data_ptr(),
                                        .dx = dx.data(),
                                        .dg = dg.data(),
                                        .dinitial_state = dinitial.data()};
  if constexpr (kOnCuda) {
    const Tensor memory = scratch(linear_scan_backward_elements(scan), p.acc);
    require_launched(p.op,
                     launch_linear_scan_backward(params, memory.mutable_data_ptr(), stream()));
  } else {
    const LinearScanKernels& kernels = linear_scan_kernels(p.dtype);
    run_items(params, items_of(scan), kernels.backward_bytes(scan), kernels.backward);
  }
  return {dx, dg, dinitial};
}

const Registry registry([](Registry& ops) {
  ops.add<linear_scan>("linear_scan", saves_last);
  ops.add<linear_scan_backward>("linear_scan_backward");
});

}  // namespace
}  // namespace omniattn::ops::linear_scan
