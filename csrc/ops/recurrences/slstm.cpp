// slstm.
#include "kernels/scan/slstm.h"

#include "ops/recurrences/scan.h"
#include "ops/registry.h"
#include "ops/stage.h"

namespace omniattn::ops::slstm {
namespace {

// x (B, T, 4, H, D), r (4, H, D, D), states (N, 4, H, D).
OMNIATTN_FIELDS(Inputs, Tensor x, r);
OMNIATTN_FIELDS(Options, bool exp_forget);

// Checked arguments of forward and backward.
struct Problem : ScanProblem {
  int64_t heads, width;
  ScanInput x;
  Tensor r;
  OptTensor initial_state;
  bool exp_forget;

  Problem(const OpCall& call, const Inputs& in, const SequenceArguments& given, Options options)
      : ScanProblem(call.op, "x", in.x, 5, given.cu_seqlens),
        heads(in.x.size(3)),
        width(in.x.size(4)),
        x(op, "x", in.x, dtype, {batch, steps, 4, heads, width}),
        r(in.r),
        initial_state(state("initial_state", given.initial_state)),
        exp_forget(options.exp_forget) {
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

OMNIATTN_FIELDS(Results, Output y, final_state, trace);

Results slstm(const OpCall& call, const Inputs& in, const SequenceArguments& sequences,
              const Options& options) {
  const DeviceScope scope(in.x);
  const Problem p(call, in, sequences, options);
  const Slstm shared = p.params();
  const Output y(true, {p.batch, p.steps, p.heads, p.width}, p.dtype);
  const Output final_state(true, {p.sequences, 4, p.heads, p.width}, p.acc);
  const Output trace(call.saves, {p.batch, p.steps, kSlstmTrace, p.heads, p.width}, p.acc);
  const SlstmParams params{
      .slstm = shared, .y = y.data(), .final_state = final_state.data(), .trace = trace.data()};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_slstm(params, stream()));
  } else if (p.width > 0) {
    const SlstmKernels& kernels = slstm_kernels(p.dtype);
    run_items(params, p.items(), kernels.bytes(shared), kernels.forward);
  }
  return {y, final_state, trace};
}

OMNIATTN_FIELDS(Saved, Tensor trace; OptTensor grad_y, grad_final_state);
OMNIATTN_FIELDS(Wanted, bool r_grad);
OMNIATTN_FIELDS(Gradients, Output dx, dr, dinitial_state);

Gradients slstm_backward(const OpCall& call, const Inputs& in, const SequenceArguments& sequences,
                         const Saved& saved, const Options& options, const Wanted& wanted) {
  const DeviceScope scope(in.x);
  const Problem p(call, in, sequences, options);
  const bool r_grad = wanted.r_grad;
  const std::array<int64_t, 4> sizes{p.batch, p.steps, p.heads, p.width};
  const Sizes of_y{sizes.data(), sizes.size()};
  const ScanInput dy(p.op, "grad_y", p.gradient_or_zeros(saved.grad_y, in.x, of_y), p.dtype, of_y);
  const OptTensor grad_final = p.state("grad_final_state", saved.grad_final_state);
  require_dense(p.op, "trace", saved.trace, p.acc,
                {p.batch, p.steps, kSlstmTrace, p.heads, p.width});
  const Output dx(true, in.x.sizes(), p.dtype);
  const Output dr(r_grad, p.r.sizes(), p.dtype);
  const Output dinitial(true, {p.sequences, 4, p.heads, p.width}, p.acc);
  SlstmBackwardParams params{.slstm = p.params(),
                             .grad_y = dy.view(),
                             .grad_final_state = data_or_null(grad_final),
                             .trace = saved.trace.const_data_ptr(),
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
    const SlstmKernels& kernels = slstm_kernels(p.dtype);
    run_items(params, p.items(), kernels.backward_bytes(params.slstm), kernels.backward);
    if (r_grad) {
      // Summed in A: sum_shards to bf16 expects sums in lane order (runtime/row.h), unlike these.
      Tensor sum = empty_tensor(p.r.sizes(), p.acc);
      sum_kernels(p.acc).sum_shards(p.acc, params.dr, groups, size, size, sum.mutable_data_ptr());
      Tensor to = dr.tensor();
      torch::stable::copy_(to, sum);
    }
  }
  return {dx, dr, dinitial};
}

const Registry registry([](Registry& ops) {
  ops.add<slstm>("slstm", saves_last);
  ops.add<slstm_backward>("slstm_backward");
});

}  // namespace
}  // namespace omniattn::ops::slstm
