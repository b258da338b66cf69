// exponential_gates.
#include "kernels/scan/gates.h"

#include <tuple>

#include "ops/registry.h"
#include "ops/scan.h"
#include "ops/stage.h"

namespace omniattn::ops::gates {
namespace {

constexpr int64_t kBlock = 512;

// Checked arguments of forward and backward.
struct Problem : ScanProblem {
  int64_t channels;
  ScanInput g, i;
  OptTensor initial_state;

  Problem(const char* op_, const Tensor& g_, const Tensor& i_, const OptTensor& initial_state_,
          const OptTensor& cu_seqlens)
      : ScanProblem(op_, "g", g_, 3, cu_seqlens),
        channels(g_.size(2)),
        g(op, "g", g_, acc, g_.sizes()),
        i(op, "i", i_, acc, g_.sizes()),
        initial_state(dense("initial_state", initial_state_, {sequences, channels})) {}

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

std::tuple<Tensor, Tensor, Tensor, Tensor> exponential_gates(const Tensor& g, const Tensor& i,
                                                             const OptTensor& initial_state,
                                                             const OptTensor& cu_seqlens) {
  const DeviceScope scope(g);
  const Problem p("mlstm", g, i, initial_state, cu_seqlens);
  const Gates shared = p.params();
  const Output decay(true, g.sizes(), p.acc), factor(true, g.sizes(), p.acc);
  const Output m(true, g.sizes(), p.acc);
  const Output final_state(true, {p.sequences, p.channels}, p.acc);
  const GatesParams params{.gates = shared,
                           .decay = decay.data(),
                           .factor = factor.data(),
                           .m = m.data(),
                           .final_state = final_state.data()};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_gates(params, stream()));
  } else {
    run_items(params, p.items(shared), 0, gates_kernels().forward);
  }
  return {decay.tensor(), factor.tensor(), m.tensor(), final_state.tensor()};
}

std::tuple<Tensor, Tensor, Tensor> exponential_gates_backward(
    const Tensor& g, const Tensor& i, const OptTensor& initial_state, const OptTensor& cu_seqlens,
    const Tensor& decay, const Tensor& factor, const OptTensor& grad_decay,
    const OptTensor& grad_factor, const OptTensor& grad_m, const OptTensor& grad_final_state) {
  const DeviceScope scope(g);
  const Problem p("mlstm_backward", g, i, initial_state, cu_seqlens);
  const Gates shared = p.params();
  const ScanInput of_decay = p.gradient("grad_decay", grad_decay);
  const ScanInput of_factor = p.gradient("grad_factor", grad_factor);
  const ScanInput of_m = p.gradient("grad_m", grad_m);
  const ScanInput decays = p.like_g("decay", decay), factors = p.like_g("factor", factor);
  const OptTensor grad_final =
      p.dense("grad_final_state", grad_final_state, {p.sequences, p.channels});
  const Output dg(true, g.sizes(), p.acc), di(true, g.sizes(), p.acc);
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
    run_items(params, p.items(shared), 0, gates_kernels().backward);
  }
  return {dg.tensor(), di.tensor(), dinitial.tensor()};
}

// g, i (B, T, H) in fp32 or fp64, states (N, H).
const Registry registry([](Registry& ops) {
  ops.add<exponential_gates>(
      "exponential_gates(Tensor g, Tensor i, Tensor? initial_state, Tensor? cu_seqlens)"
      " -> (Tensor decay, Tensor factor, Tensor m, Tensor final_state)",
      differentiable);
  ops.add<exponential_gates_backward>(
      "exponential_gates_backward(Tensor g, Tensor i, Tensor? initial_state, Tensor? cu_seqlens,"
      " Tensor decay, Tensor factor, Tensor? grad_decay, Tensor? grad_factor, Tensor? grad_m,"
      " Tensor? grad_final_state)"
      " -> (Tensor dg, Tensor di, Tensor dinitial_state)");
});

}  // namespace
}  // namespace omniattn::ops::gates
