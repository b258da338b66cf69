// selective_scan_tangents on the CPU.
#include "kernels/scan/selective_tangents.h"

#include "ops/registry.h"
#include "ops/stage.h"
#include "ops/state_space/selective_scan.h"

namespace omniattn::ops::selective_scan {

TangentResults selective_scan_tangents(const OpCall& call, const PlainInputs& in,
                                       const SequenceArguments& sequences, const MovedInputs& moved,
                                       const MovedGradients& grads) {
  const auto& [u, delta, A, B, C] = in;
  const Problem p(call, {u, delta, A, B, C, {}, {}, {}}, sequences, {false, false});
  require(p.dtype == p.acc, p.op, "u must be in the compute type, got ", name_of(p.dtype));
  require(!p.b.constant && !p.c.constant, p.op, "B and C must have 4 dimensions");
  const Selective scan = p.params(kBackwardBlock);
  const auto rows = [&](const char* name, const Tensor& t, const Tensor& like) {
    return ScanInput(p.op, name, t, p.dtype, like.sizes());
  };
  const ScanInput moved_u = rows("tangent_u", moved.tangent_u, u);
  const ScanInput moved_delta = rows("tangent_delta", moved.tangent_delta, delta);
  const ScanInput moved_b = rows("tangent_B", moved.tangent_B, B);
  const ScanInput moved_c = rows("tangent_C", moved.tangent_C, C);
  const OptTensor moved_decay = p.dense("tangent_A", moved.tangent_A, {p.channels, p.states});
  const OptTensor moved_initial = p.state("tangent_initial_state", moved.tangent_initial_state);
  const bool back = grads.grad_y.has_value();
  std::optional<ScanInput> dy, moved_dy;
  if (back) dy = rows("grad_y", *grads.grad_y, u);
  if (grads.tangent_grad_y.has_value()) moved_dy = rows("tangent_grad_y", *grads.tangent_grad_y, u);
  const OptTensor grad_final = p.state("grad_final_state", grads.grad_final_state);
  const OptTensor moved_grad_final =
      p.state("tangent_grad_final_state", grads.tangent_grad_final_state);
  require(back || !(grads.grad_final_state.has_value() || grads.tangent_grad_y.has_value() ||
                    grads.tangent_grad_final_state.has_value()),
          p.op, "grad_y must be given with other gradients");

  const std::array<int64_t, 5> parts{scan.blocks(), p.batch, p.steps, p.groups, p.states};
  const Sizes of_parts{parts.data(), parts.size()};
  TangentResults y{.tangent_y = {true, u.sizes(), p.dtype},
                   .tangent_final_state = {true, {p.sequences, p.channels, p.states}, p.acc},
                   .tangent_du = {back, u.sizes(), p.dtype},
                   .tangent_ddelta = {back, u.sizes(), p.dtype},
                   .tangent_dA = {back, {p.sequences, p.channels, p.states}, p.acc},
                   .tangent_dB = {back, of_parts, p.acc},
                   .tangent_dC = {back, of_parts, p.acc},
                   .tangent_dinitial_state = {back, {p.sequences, p.channels, p.states}, p.acc}};
  const auto view = [](const std::optional<ScanInput>& x) {
    return x.has_value() ? x->view() : ScanView{};
  };
  const SelectiveTangentParams params{.scan = scan,
                                      .moved_u = moved_u.view(),
                                      .moved_delta = moved_delta.view(),
                                      .moved_b = moved_b.view(),
                                      .moved_c = moved_c.view(),
                                      .moved_decay = data_or_null(moved_decay),
                                      .moved_initial_state = data_or_null(moved_initial),
                                      .grad_y = view(dy),
                                      .moved_grad_y = view(moved_dy),
                                      .grad_final_state = data_or_null(grad_final),
                                      .moved_grad_final_state = data_or_null(moved_grad_final),
                                      .moved_y = y.tangent_y.data(),
                                      .moved_final_state = y.tangent_final_state.data(),
                                      .moved_du = y.tangent_du.data(),
                                      .moved_ddelta = y.tangent_ddelta.data(),
                                      .moved_db = y.tangent_dB.data(),
                                      .moved_dc = y.tangent_dC.data(),
                                      .moved_ddecay = y.tangent_dA.data(),
                                      .moved_dinitial_state = y.tangent_dinitial_state.data()};
  const SelectiveTangentKernels& kernels = selective_tangent_kernels(p.dtype);
  run_items(params, scan.items(), kernels.bytes(params), kernels.tangents);
  return y;
}

namespace {

const Registry registry([](Registry& ops) {
  ops.implement<selective_scan_tangents>("selective_scan_tangents");
});

}  // namespace
}  // namespace omniattn::ops::selective_scan
