// slstm.
#include "kernels/scan/slstm.h"

#include <tuple>

#include "ops/registry.h"
#include "ops/scan.h"
#include "ops/stage.h"
#include "ops/without_last.h"

namespace omniattn::ops::slstm {
namespace {

// Checked arguments of forward and backward.
struct Problem : ScanProblem {
  int64_t heads, width;
  ScanInput x;
  Tensor r;
  OptTensor initial_state;
  bool exp_forget;

  Problem(const char* op_, const Tensor& x_, const Tensor& r_, const OptTensor& initial_state_,
          const OptTensor& cu_seqlens, bool exp_forget_)
      : ScanProblem(op_, "x", x_, 5, cu_seqlens),
        heads(x_.size(3)),
        width(x_.size(4)),
        x(op, "x", x_, dtype, {batch, steps, 4, heads, width}),
        r(r_),
        initial_state(state("initial_state", initial_state_)),
        exp_forget(exp_forget_) {
    require_tensor(op, "r", r, dtype);
    require_sizes(op, "r", r, {4, heads, width, width});
    r = as_dense(r);
  }

  OptTensor state(const char* name, const OptTensor& t) const {
    return dense(name, t, {sequences, 4, heads, width});
  }
  Slstm params() const {
    return {.dtype = dtype,
            .exp_forget = exp_forget,
            .rows = rows(),
            .heads = heads,
            .width = width,
            .x = x.view(),
            .r = r.const_data_ptr(),
            .initial_state = data_or_null(initial_state)};
  }
  int64_t items() const { return slstm_groups(rows()) * heads; }
};

// kSave: true to save the trace for the backward; `slstm_only` does not.
template <bool kSave>
std::tuple<Tensor, Tensor, Tensor> slstm(const Tensor& x, const Tensor& r,
                                         const OptTensor& initial_state,
                                         const OptTensor& cu_seqlens, bool exp_forget) {
  const DeviceScope scope(x);
  const Problem p("slstm", x, r, initial_state, cu_seqlens, exp_forget);
  const Slstm shared = p.params();
  const Output y(true, {p.batch, p.steps, p.heads, p.width}, p.dtype);
  const Output final_state(true, {p.sequences, 4, p.heads, p.width}, p.acc);
  const Output trace(kSave, {p.batch, p.steps, kSlstmTrace, p.heads, p.width}, p.acc);
  const SlstmParams params{
      .slstm = shared, .y = y.data(), .final_state = final_state.data(), .trace = trace.data()};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_slstm(params, stream()));
  } else if (p.width > 0) {
    const SlstmKernels& kernels = slstm_kernels();
    run_items(params, p.items(), kernels.bytes(shared), kernels.forward);
  }
  return {y.tensor(), final_state.tensor(), trace.tensor()};
}

std::tuple<Tensor, Tensor, Tensor> slstm_backward(const Tensor& x, const Tensor& r,
                                                  const OptTensor& initial_state,
                                                  const OptTensor& cu_seqlens, const Tensor& trace,
                                                  const OptTensor& grad_y,
                                                  const OptTensor& grad_final_state,
                                                  bool exp_forget, bool r_grad) {
  const DeviceScope scope(x);
  const Problem p("slstm_backward", x, r, initial_state, cu_seqlens, exp_forget);
  const std::array<int64_t, 4> sizes{p.batch, p.steps, p.heads, p.width};
  const Sizes of_y{sizes.data(), sizes.size()};
  const ScanInput dy(p.op, "grad_y", p.gradient_or_zeros(grad_y, x, of_y), p.dtype, of_y);
  const OptTensor grad_final = p.state("grad_final_state", grad_final_state);
  require_dense(p.op, "trace", trace, p.acc, {p.batch, p.steps, kSlstmTrace, p.heads, p.width});
  const Output dx(true, x.sizes(), p.dtype);
  const Output dr(r_grad, p.r.sizes(), p.dtype);
  const Output dinitial(true, {p.sequences, 4, p.heads, p.width}, p.acc);
  SlstmBackwardParams params{.slstm = p.params(),
                             .grad_y = dy.view(),
                             .grad_final_state = data_or_null(grad_final),
                             .trace = trace.const_data_ptr(),
                             .dx = dx.data(),
                             .dr = dr.data(),
                             .dinitial_state = dinitial.data()};
  if constexpr (kOnCuda) {
    const Tensor memory = scratch(slstm_backward_elements(params.slstm), p.acc);
    require_launched(p.op, launch_slstm_backward(params, memory.mutable_data_ptr(), stream()));
  } else if (p.width > 0) {
    // Without sequences the sum reads one group of zeros.
    const int64_t groups = slstm_groups(p.rows()), size = 4 * p.heads * p.width * p.width;
    Tensor partial = scratch(r_grad ? std::max<int64_t>(1, groups) * size : 0, p.acc);
    if (groups == 0) torch::stable::fill_(partial, 0);
    if (r_grad) params.dr = partial.mutable_data_ptr();
    const SlstmKernels& kernels = slstm_kernels();
    run_items(params, p.items(), kernels.backward_bytes(params.slstm), kernels.backward);
    if (r_grad) {
      // Summed in A: sum_shards to bf16 expects sums in lane order (runtime/row.h), unlike these.
      Tensor sum = empty_tensor(p.r.sizes(), p.acc);
      sum_kernels().sum_shards(p.acc, params.dr, groups, size, size, sum.mutable_data_ptr());
      Tensor to = dr.tensor();
      torch::stable::copy_(to, sum);
    }
  }
  return {dx.tensor(), dr.tensor(), dinitial.tensor()};
}

// x (B, T, 4, H, D), r (4, H, D, D), states (N, 4, H, D). The last result of the forward is the
// trace.
const Registry registry([](Registry& ops) {
  ops.add<slstm<true>, WithoutLast<slstm<false>>::run>(
      "slstm(Tensor x, Tensor r, Tensor? initial_state, Tensor? cu_seqlens, bool exp_forget)"
      " -> (Tensor y, Tensor final_state, Tensor trace)",
      differentiable);
  ops.add<slstm_backward>(
      "slstm_backward(Tensor x, Tensor r, Tensor? initial_state, Tensor? cu_seqlens, Tensor trace,"
      " Tensor? grad_y, Tensor? grad_final_state, bool exp_forget, bool r_grad)"
      " -> (Tensor dx, Tensor dr, Tensor dinitial_state)");
});

}  // namespace
}  // namespace omniattn::ops::slstm
