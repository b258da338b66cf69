// exponential_gates.
#include "kernels/scan/gates.h"

#include "ops/recurrences/scan.h"
#include "ops/registry.h"
#include "ops/stage.h"

namespace omniattn::ops::gates {
namespace {

constexpr int64_t kBlock = 512;

// g, i (B, T, H) in fp32 or fp64, states (N, H).
OMNIATTN_FIELDS(Inputs, Tensor g, i);

// Checked arguments of forward and backward.
struct Problem : ScanProblem {
  int64_t channels;
  ScanInput g, i;
  OptTensor initial_state;

  Problem(const OpCall& call, const Inputs& in, const SequenceArguments& given)
      : ScanProblem(call.op, "g", in.g, 3, given.cu_seqlens),
        channels(in.g.size(2)),
        g(op, "g", in.g, acc, in.g.sizes()),
        i(op, "i", in.i, acc, in.g.sizes()),
        initial_state(dense("initial_state", given.initial_state, {sequences, channels})) {}

  ScanInput like_g(const char* name, const Tensor& t) const {
    return {op, name, t, acc, g.tensor.sizes()};
  }
  ScanInput gradient(const char* name, const OptTensor& t) const {
    return like_g(name, t.has_value() ? *t : torch::stable::new_zeros(g.tensor, g.tensor.sizes()));
  }
  Gates params() const {
    return {.dtype = acc,
            .rows = rows(),
            .channels = channels,
            .block = block(channels, kBlock),
            .g = g.view(),
            .i = i.view(),
            .initial_state = data_or_null(initial_state)};
  }
  int64_t items(const Gates& p) const { return sequences * ceil_div(channels, p.block); }
};

OMNIATTN_FIELDS(Results, Output decay, factor, m, final_state);

Results exponential_gates(const OpCall& call, const Inputs& in,
                          const SequenceArguments& sequences) {
  const DeviceScope scope(in.g);
  const Problem p(call, in, sequences);
  const Gates shared = p.params();
  const Sizes sizes = in.g.sizes();
  const Output decay(true, sizes, p.acc), factor(true, sizes, p.acc), m(true, sizes, p.acc);
  const Output final_state(true, {p.sequences, p.channels}, p.acc);
  const GatesParams params{.gates = shared,
                           .decay = decay.data(),
                           .factor = factor.data(),
                           .m = m.data(),
                           .final_state = final_state.data()};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_gates(params, stream()));
  } else {
    run_items(params, p.items(shared), 0, gates_kernels(p.dtype).forward);
  }
  return {decay, factor, m, final_state};
}

OMNIATTN_FIELDS(Saved, Tensor decay, factor);
OMNIATTN_FIELDS(Incoming, OptTensor grad_decay, grad_factor, grad_m, grad_final_state);
OMNIATTN_FIELDS(Gradients, Output dg, di, dinitial_state);

Gradients exponential_gates_backward(const OpCall& call, const Inputs& in,
                                     const SequenceArguments& sequences, const Saved& saved,
                                     const Incoming& grads) {
  const DeviceScope scope(in.g);
  const Problem p(call, in, sequences);
  const Gates shared = p.params();
  const ScanInput of_decay = p.gradient("grad_decay", grads.grad_decay);
  const ScanInput of_factor = p.gradient("grad_factor", grads.grad_factor);
  const ScanInput of_m = p.gradient("grad_m", grads.grad_m);
  const ScanInput decays = p.like_g("decay", saved.decay);
  const ScanInput factors = p.like_g("factor", saved.factor);
  const OptTensor grad_final =
      p.dense("grad_final_state", grads.grad_final_state, {p.sequences, p.channels});
  const Output dg(true, in.g.sizes(), p.acc), di(true, in.g.sizes(), p.acc);
  const Output dinitial(true, {p.sequences, p.channels}, p.acc);
  const GatesBackwardParams params{.gates = shared,
                                   .decay = decays.view(),
                                   .factor = factors.view(),
                                   .grad_decay = of_decay.view(),
                                   .grad_factor = of_factor.view(),
                                   .grad_m = of_m.view(),
                                   .grad_final_state = data_or_null(grad_final),
                                   .dg = dg.data(),
                                   .di = di.data(),
                                   .dinitial_state = dinitial.data()};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_gates_backward(params, stream()));
  } else {
    run_items(params, p.items(shared), 0, gates_kernels(p.dtype).backward);
  }
  return {dg, di, dinitial};
}

const Registry registry([](Registry& ops) {
  ops.name("exponential_gates", {{"mlstm"}});
  ops.add<exponential_gates>("exponential_gates", differentiable);
  ops.add<exponential_gates_backward>("exponential_gates_backward");
});

}  // namespace
}  // namespace omniattn::ops::gates
