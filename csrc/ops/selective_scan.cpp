// selective_scan.
#include "kernels/scan/selective.h"

#include <limits>
#include <tuple>

#include "kernels/scan/step.h"

#include "ops/registry.h"
#include "ops/scan.h"
#include "ops/stage.h"
#include "ops/without_last.h"

namespace omniattn::ops::selective_scan {
namespace {

// B or C: (B, T, G, N) in the dtype of u, or of A if states are paired; or constant, (D, N) in A.
struct WeightInput {
  Tensor tensor;
  bool constant;

  WeightInput(const char* op, const char* name, const Tensor& t)
      : tensor(t), constant(t.dim() == 2) {
    require(constant || t.dim() == 4, op, name, " must have 2 or 4 dimensions, got ", t.dim());
  }
  SelectiveWeights view(const char* op, const char* name, DType dtype, DType acc, Sizes varying,
                        Sizes fixed) {
    if (!constant) {
      const ScanInput input(op, name, tensor, dtype, varying);
      tensor = input.tensor;
      return {input.view(), false};
    }
    require_tensor(op, name, tensor, acc);
    require_sizes(op, name, tensor, fixed);
    tensor = as_dense(tensor);
    return {{tensor.const_data_ptr(), 0, 0}, true};
  }
};

// Checked arguments of forward and backward.
struct Problem : ScanProblem {
  int64_t channels, states, groups;
  ScanInput u, delta;
  std::optional<ScanInput> z;
  OptTensor decay, skip, bias, initial_state;
  WeightInput b, c;
  SelectiveWeights b_view, c_view;
  bool softplus, paired;

  Problem(const char* op_, const Tensor& u_, const Tensor& delta_, const Tensor& A, const Tensor& B,
          const Tensor& C, const OptTensor& D, const OptTensor& z_, const OptTensor& delta_bias,
          const OptTensor& initial_state_, const OptTensor& cu_seqlens, bool delta_softplus,
          bool paired_)
      : ScanProblem(op_, "u", u_, 3, cu_seqlens),
        channels(u_.size(2)),
        states(A.dim() == 2 ? A.size(1) : 0),
        u(op, "u", u_, dtype, u_.sizes()),
        delta(op, "delta", delta_, dtype, u_.sizes()),
        decay(dense("A", A, {channels, states})),
        skip(dense("D", D, {channels})),
        bias(dense("delta_bias", delta_bias, {channels})),
        initial_state(state("initial_state", initial_state_)),
        b(op, "B", B),
        c(op, "C", C),
        softplus(delta_softplus),
        paired(paired_) {
    require(!paired || states % 2 == 0, op, "A must have two numbers of each pair of states, got ",
            states, " of each channel");
    if (z_.has_value()) z.emplace(op, "z", *z_, dtype, u_.sizes());
    groups = !b.constant ? B.size(2) : !c.constant ? C.size(2) : 1;
    require(groups > 0 ? channels % groups == 0 : channels == 0, op,
            "the channels of u must be a multiple of the groups of B and C, got ", channels,
            " and ", groups);
    require(!kOnCuda || states <= kSelectiveStates, op, "A must have at most ", kSelectiveStates,
            " states on CUDA, got ", states);
    const std::array<int64_t, 4> varying{batch, steps, groups, states};
    const std::array<int64_t, 2> fixed{channels, states};
    const Sizes of_steps{varying.data(), varying.size()}, of_all{fixed.data(), fixed.size()};
    b_view = b.view(op, "B", weight_dtype(), acc, of_steps, of_all);
    c_view = c.view(op, "C", weight_dtype(), acc, of_steps, of_all);
  }

  // The dtype of B and C that vary over time.
  DType weight_dtype() const { return paired ? acc : dtype; }

  OptTensor state(const char* name, const OptTensor& t) const {
    return dense(name, t, {sequences, channels, states});
  }
  Selective params(int64_t block_) const {
    return {.dtype = dtype,
            .softplus = softplus,
            .paired = paired,
            .rows = rows(),
            .channels = channels,
            .groups = groups,
            .states = states,
            .block = block_,
            .u = u.view(),
            .delta = delta.view(),
            .z = z.has_value() ? z->view() : ScanView{},
            .decay = decay->const_data_ptr(),
            .b = b_view,
            .c = c_view,
            .skip = data_or_null(skip),
            .bias = data_or_null(bias),
            .initial_state = data_or_null(initial_state)};
  }
};

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
                       .decay = p.decay->const_data_ptr(),
                       .skip = data_or_null(p.skip),
                       .bias = data_or_null(p.bias),
                       .decay_of_states = true,
                       .skip_of_rows = true,
                       .before = data_or_null(p.initial_state),
                       .state = state,
                       .states_first = false,
                       .y = y};
  if constexpr (!kOnCuda) {
    // An exponential costs about as much as four products.
    run_items(step, step_items(step), 4 * kStepHeads * p.states, state_step_kernels().run);
  }
}

// A block of the forward keeps its tables in L1. The backward adds sums over channels later, so its
// block must be the same for any number of threads.
constexpr int64_t kForwardBlock = 256, kBackwardBlock = 128;

// kSave: true to save states for the backward; `selective_scan_only` does not.
template <bool kSave>
std::tuple<Tensor, Tensor, Tensor> selective_scan(
    const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B, const Tensor& C,
    const OptTensor& D, const OptTensor& z, const OptTensor& delta_bias,
    const OptTensor& initial_state, const OptTensor& cu_seqlens, bool delta_softplus, bool paired) {
  const DeviceScope scope(u);
  const Problem p("selective_scan", u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens,
                  delta_softplus, paired);
  const int64_t of_group = p.groups > 0 ? p.channels / p.groups : 0;
  const Selective scan = p.params(kOnCuda ? kSelectiveThreads : p.block(of_group, kForwardBlock));
  const Output y(true, p.u.tensor.sizes(), p.dtype);
  const Output final_state(true, {p.sequences, p.channels, p.states}, p.acc);
  const Output states(kSave, {scan_slots(scan.rows), p.states, p.channels}, p.acc);
  if (!kSave && is_step(p)) {
    run_step(p, final_state.data(), y.data());
    return {y.tensor(), final_state.tensor(), states.tensor()};
  }
  const SelectiveParams params{
      .scan = scan, .y = y.data(), .final_state = final_state.data(), .states = states.data()};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_selective(params, stream()));
  } else {
    const SelectiveKernels& kernels = selective_kernels();
    run_items(params, scan.items(), kernels.bytes(scan), kernels.forward);
  }
  return {y.tensor(), final_state.tensor(), states.tensor()};
}

// selective_scan without gradients, on real states that are updated in place.
Tensor selective_scan_inplace(const Tensor& u, const Tensor& delta, const Tensor& A,
                              const Tensor& B, const Tensor& C, const OptTensor& D,
                              const OptTensor& z, const OptTensor& delta_bias, Tensor initial_state,
                              bool delta_softplus) {
  const DeviceScope scope(u);
  const Problem p("selective_scan", u, delta, A, B, C, D, z, delta_bias, initial_state,
                  std::nullopt, delta_softplus, false);
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
    const SelectiveKernels& kernels = selective_kernels();
    run_items(params, params.scan.items(), kernels.bytes(params.scan), kernels.forward);
  }
  return y.tensor();
}

using Gradients =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

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

Gradients selective_scan_backward(const Tensor& u, const Tensor& delta, const Tensor& A,
                                  const Tensor& B, const Tensor& C, const OptTensor& D,
                                  const OptTensor& z, const OptTensor& delta_bias,
                                  const OptTensor& initial_state, const OptTensor& cu_seqlens,
                                  const Tensor& states, const OptTensor& grad_y,
                                  const OptTensor& grad_final_state, bool delta_softplus,
                                  bool paired, bool A_grad, bool B_grad, bool C_grad, bool D_grad,
                                  bool delta_bias_grad) {
  const DeviceScope scope(u);
  const Problem p("selective_scan_backward", u, delta, A, B, C, D, z, delta_bias, initial_state,
                  cu_seqlens, delta_softplus, paired);
  const Selective scan = p.params(kOnCuda ? kSelectiveThreads : kBackwardBlock);
  const ScanInput dy(p.op, "grad_y", p.gradient_or_zeros(grad_y, u, u.sizes()), p.dtype, u.sizes());
  const OptTensor grad_final = p.state("grad_final_state", grad_final_state);
  require_dense(p.op, "states", states, p.acc, {scan_slots(scan.rows), p.states, p.channels});
  const Output du(true, u.sizes(), p.dtype), ddelta(true, u.sizes(), p.dtype);
  const Output dz(z.has_value(), u.sizes(), p.dtype);
  const Output dinitial(true, {p.sequences, p.channels, p.states}, p.acc);
  const WeightSums sums(p, scan);
  const SelectiveBackwardParams params{.scan = scan,
                                       .grad_y = dy.view(),
                                       .grad_final_state = data_or_null(grad_final),
                                       .states = states.const_data_ptr(),
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
    const SelectiveBackwardKernels& kernels = selective_backward_kernels();
    run_items(params, scan.items(), kernels.bytes(scan), kernels.backward);
  }
  return {du.tensor(),
          ddelta.tensor(),
          sums.rows(A_grad, 0, p.states),
          sums.weights(B_grad, p.b, sums.steps_b, selective_row_of_b(scan)),
          sums.weights(C_grad, p.c, sums.steps_c, selective_row_of_c(scan)),
          sums.vector(D_grad && D.has_value(), p.states),
          dz.tensor(),
          sums.vector(delta_bias_grad && delta_bias.has_value(), p.states + 1),
          dinitial.tensor()};
}

// u, delta, z (B, T, D), A (D, N), B, C (B, T, G, N) or (D, N), D, delta_bias (D), states (N, D,
// N). If paired, A, B, C and states alternate real and imaginary parts (kernels/scan/selective.h).
// The last result of the forward holds the states at the starts of chunks.
const Registry registry([](Registry& ops) {
  ops.add<selective_scan<true>, WithoutLast<selective_scan<false>>::run>(
      "selective_scan(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z,"
      " Tensor? delta_bias, Tensor? initial_state, Tensor? cu_seqlens, bool delta_softplus,"
      " bool paired)"
      " -> (Tensor y, Tensor final_state, Tensor states)",
      differentiable);
  ops.add<selective_scan_inplace>(
      "selective_scan_(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z,"
      " Tensor? delta_bias, Tensor(a!) initial_state, bool delta_softplus) -> Tensor");
  ops.add<selective_scan_backward>(
      "selective_scan_backward(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D,"
      " Tensor? z, Tensor? delta_bias, Tensor? initial_state, Tensor? cu_seqlens, Tensor states,"
      " Tensor? grad_y, Tensor? grad_final_state, bool delta_softplus, bool paired, bool A_grad,"
      " bool B_grad, bool C_grad, bool D_grad, bool delta_bias_grad)"
      " -> (Tensor du, Tensor ddelta, Tensor dA, Tensor dB, Tensor dC, Tensor dD, Tensor dz,"
      " Tensor ddelta_bias, Tensor dinitial_state)");
});

}  // namespace
}  // namespace omniattn::ops::selective_scan
