// rwkv4.
#include "kernels/scan/wkv.h"

#include <tuple>

#include "ops/registry.h"
#include "ops/scan.h"
#include "ops/stage.h"
#include "ops/without_last.h"

namespace omniattn::ops::rwkv4 {
namespace {

// Checked arguments of forward and backward.
struct Problem : ScanProblem {
  int64_t channels;
  ScanInput k, v;
  OptTensor w, u, initial_state;

  Problem(const char* op_, const Tensor& w_, const Tensor& u_, const Tensor& k_, const Tensor& v_,
          const OptTensor& initial_state_, const OptTensor& cu_seqlens)
      : ScanProblem(op_, "k", k_, 3, cu_seqlens),
        channels(k_.size(2)),
        k(op, "k", k_, dtype, k_.sizes()),
        v(op, "v", v_, dtype, k_.sizes()),
        w(dense("w", w_, {channels})),
        u(dense("u", u_, {channels})),
        initial_state(state("initial_state", initial_state_)) {}

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

// kSave: true to save states for the backward; `rwkv4_only` does not.
template <bool kSave>
std::tuple<Tensor, Tensor, Tensor> rwkv4(const Tensor& w, const Tensor& u, const Tensor& k,
                                         const Tensor& v, const OptTensor& initial_state,
                                         const OptTensor& cu_seqlens) {
  const DeviceScope scope(k);
  const Problem p("rwkv4", w, u, k, v, initial_state, cu_seqlens);
  const Wkv wkv = p.params(kForwardBlock);
  const Output y(true, p.k.tensor.sizes(), p.dtype);
  const Output final_state(true, {p.sequences, 3, p.channels}, p.acc);
  const Output states(kSave, {scan_slots(wkv.rows), 4, p.channels}, p.acc);
  const WkvParams params{
      .wkv = wkv, .y = y.data(), .final_state = final_state.data(), .states = states.data()};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_wkv(params, stream()));
  } else {
    const WkvKernels& kernels = wkv_kernels();
    run_items(params, items_of(wkv), kernels.bytes(wkv), kernels.forward);
  }
  return {y.tensor(), final_state.tensor(), states.tensor()};
}

// Sum over sequences of one row of `partial` (N, 2, C).
Tensor sum_of(const Problem& p, bool wanted, const Tensor& partial, int64_t row) {
  const Output sum(wanted, {p.channels}, p.acc);
  if (wanted) {
    p.sum_shards(partial, row * p.channels, p.sequences, 2 * p.channels, p.channels, sum.data());
  }
  return sum.tensor();
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> rwkv4_backward(
    const Tensor& w, const Tensor& u, const Tensor& k, const Tensor& v,
    const OptTensor& initial_state, const OptTensor& cu_seqlens, const Tensor& states,
    const OptTensor& grad_y, const OptTensor& grad_final_state, bool w_grad, bool u_grad,
    bool initial_state_grad) {
  const DeviceScope scope(k);
  const Problem p("rwkv4_backward", w, u, k, v, initial_state, cu_seqlens);
  const Wkv wkv = p.params(kBackwardBlock);
  const ScanInput dy(p.op, "grad_y", p.gradient_or_zeros(grad_y, k, k.sizes()), p.dtype, k.sizes());
  const OptTensor grad_final = p.state("grad_final_state", grad_final_state);
  require_dense(p.op, "states", states, p.acc, {scan_slots(wkv.rows), 4, p.channels});
  const Output dk(true, k.sizes(), p.dtype), dv(true, k.sizes(), p.dtype);
  const Output dinitial(initial_state_grad, {p.sequences, 3, p.channels}, p.acc);
  // Without sequences the sums read one row of zeros.
  Tensor partial = scratch(std::max<int64_t>(1, p.sequences) * 2 * p.channels, p.acc);
  if (p.sequences == 0) torch::stable::fill_(partial, 0);
  const WkvBackwardParams params{.wkv = wkv,
                                 .grad_y = dy.view(),
                                 .grad_final_state = data_or_null(grad_final),
                                 .states = states.const_data_ptr(),
                                 .dk = dk.data(),
                                 .dv = dv.data(),
                                 .partial = partial.mutable_data_ptr(),
                                 .dinitial_state = dinitial.data()};
  if constexpr (kOnCuda) {
    const Tensor memory = scratch(wkv_backward_elements(wkv), p.acc);
    require_launched(p.op, launch_wkv_backward(params, memory.mutable_data_ptr(), stream()));
  } else {
    const WkvKernels& kernels = wkv_kernels();
    run_items(params, items_of(wkv), kernels.backward_bytes(wkv), kernels.backward);
  }
  return {sum_of(p, w_grad, partial, 0), sum_of(p, u_grad, partial, 1), dk.tensor(), dv.tensor(),
          dinitial.tensor()};
}

// w, u (C), k, v (B, T, C), states (N, 3, C). The last result of the forward holds the states at
// the starts of chunks.
const Registry registry([](Registry& ops) {
  ops.add<rwkv4<true>, WithoutLast<rwkv4<false>>::run>(
      "rwkv4(Tensor w, Tensor u, Tensor k, Tensor v, Tensor? initial_state, Tensor? cu_seqlens)"
      " -> (Tensor y, Tensor final_state, Tensor states)",
      differentiable);
  ops.add<rwkv4_backward>(
      "rwkv4_backward(Tensor w, Tensor u, Tensor k, Tensor v, Tensor? initial_state,"
      " Tensor? cu_seqlens, Tensor states, Tensor? grad_y, Tensor? grad_final_state, bool w_grad,"
      " bool u_grad, bool initial_state_grad)"
      " -> (Tensor dw, Tensor du, Tensor dk, Tensor dv, Tensor dinitial_state)");
});

}  // namespace
}  // namespace omniattn::ops::rwkv4
