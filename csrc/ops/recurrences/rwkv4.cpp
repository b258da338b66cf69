// rwkv4.
#include "kernels/scan/wkv.h"

#include "ops/recurrences/scan.h"
#include "ops/registry.h"
#include "ops/stage.h"

namespace omniattn::ops::rwkv4 {
namespace {

// w, u (C), k, v (B, T, C), states (N, 3, C).
OMNIATTN_FIELDS(Inputs, Tensor w, u, k, v);

// Checked arguments of forward and backward.
struct Problem : ScanProblem {
  int64_t channels;
  ScanInput k, v;
  OptTensor w, u, initial_state;

  Problem(const OpCall& call, const Inputs& in, const SequenceArguments& given)
      : ScanProblem(call.op, "k", in.k, 3, given.cu_seqlens),
        channels(in.k.size(2)),
        k(op, "k", in.k, dtype, in.k.sizes()),
        v(op, "v", in.v, dtype, in.k.sizes()),
        w(dense("w", in.w, {channels})),
        u(dense("u", in.u, {channels})),
        initial_state(state("initial_state", given.initial_state)) {}

  OptTensor state(const char* name, const OptTensor& t) const {
    return dense(name, t, {sequences, 3, channels});
  }
  Wkv params(int64_t most) const {
    return {.dtype = dtype,
            .rows = rows(),
            .channels = channels,
            .block = block(channels, most),
            .w = w->const_data_ptr(),
            .u = u->const_data_ptr(),
            .k = k.view(),
            .v = v.view(),
            .initial_state = data_or_null(initial_state)};
  }
};

int64_t items_of(const Wkv& p) { return p.rows.sequences * ceil_div(p.channels, p.block); }

// A large block lets the forward read long runs of each row; the backward keeps a chunk in L2.
constexpr int64_t kForwardBlock = 512, kBackwardBlock = 128;

// states: at the starts of chunks.
OMNIATTN_FIELDS(Results, Output y, final_state, states);

Results rwkv4(const OpCall& call, const Inputs& in, const SequenceArguments& sequences) {
  const DeviceScope scope(in.k);
  const Problem p(call, in, sequences);
  const Wkv wkv = p.params(kForwardBlock);
  const Output y(true, p.k.tensor.sizes(), p.dtype);
  const Output final_state(true, {p.sequences, 3, p.channels}, p.acc);
  const Output states(call.saves, {scan_slots(wkv.rows), 4, p.channels}, p.acc);
  const WkvParams params{
      .wkv = wkv, .y = y.data(), .final_state = final_state.data(), .states = states.data()};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_wkv(params, stream()));
  } else {
    const WkvKernels& kernels = wkv_kernels(p.dtype);
    run_items(params, items_of(wkv), kernels.bytes(wkv), kernels.forward);
  }
  return {y, final_state, states};
}

// Sum over sequences of one row of `partial` (N, 2, C).
Tensor sum_of(const Problem& p, bool wanted, const Tensor& partial, int64_t row) {
  const Output sum(wanted, {p.channels}, p.acc);
  if (wanted) {
    p.sum_shards(partial, row * p.channels, p.sequences, 2 * p.channels, p.channels, sum.data());
  }
  return sum.tensor();
}

OMNIATTN_FIELDS(Saved, Tensor states; OptTensor grad_y, grad_final_state);
OMNIATTN_FIELDS(Wanted, bool w_grad, u_grad, initial_state_grad);
OMNIATTN_FIELDS(Gradients, Tensor dw, du; Output dk, dv, dinitial_state);

Gradients rwkv4_backward(const OpCall& call, const Inputs& in, const SequenceArguments& sequences,
                         const Saved& saved, const Wanted& wanted) {
  const DeviceScope scope(in.k);
  const Problem p(call, in, sequences);
  const Wkv wkv = p.params(kBackwardBlock);
  const Sizes sizes = in.k.sizes();
  const ScanInput dy(p.op, "grad_y", p.gradient_or_zeros(saved.grad_y, in.k, sizes), p.dtype,
                     sizes);
  const OptTensor grad_final = p.state("grad_final_state", saved.grad_final_state);
  require_dense(p.op, "states", saved.states, p.acc, {scan_slots(wkv.rows), 4, p.channels});
  const Output dk(true, sizes, p.dtype), dv(true, sizes, p.dtype);
  const Output dinitial(wanted.initial_state_grad, {p.sequences, 3, p.channels}, p.acc);
  // Without sequences the sums read one row of zeros.
  Tensor partial = scratch(std::max<int64_t>(1, p.sequences) * 2 * p.channels, p.acc);
  if (p.sequences == 0) torch::stable::fill_(partial, 0);
  const WkvBackwardParams params{.wkv = wkv,
                                 .grad_y = dy.view(),
                                 .grad_final_state = data_or_null(grad_final),
                                 .states = saved.states.const_data_ptr(),
                                 .dk = dk.data(),
                                 .dv = dv.data(),
                                 .partial = partial.mutable_data_ptr(),
                                 .dinitial_state = dinitial.data()};
  if constexpr (kOnCuda) {
    const Tensor memory = scratch(wkv_backward_elements(wkv), p.acc);
    require_launched(p.op, launch_wkv_backward(params, memory.mutable_data_ptr(), stream()));
  } else {
    const WkvKernels& kernels = wkv_kernels(p.dtype);
    run_items(params, items_of(wkv), kernels.backward_bytes(wkv), kernels.backward);
  }
  return {sum_of(p, wanted.w_grad, partial, 0), sum_of(p, wanted.u_grad, partial, 1), dk, dv,
          dinitial};
}

const Registry registry([](Registry& ops) {
  ops.add<rwkv4>("rwkv4", saves_last);
  ops.add<rwkv4_backward>("rwkv4_backward");
});

}  // namespace
}  // namespace omniattn::ops::rwkv4
