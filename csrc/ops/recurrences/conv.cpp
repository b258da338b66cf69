// causal_conv1d and dynamic_conv1d. Elsewhere than on the CPU a composition of torch's ops
// implements the latter (python/omniattn/compositions/recurrences/dynamic_conv.py).
#include "kernels/conv/dynamic_conv.h"

#include <cstring>

#include "ops/registry.h"
#include "ops/sequence_problem.h"
#include "ops/sum_over_rows.h"

namespace omniattn::ops::conv {
namespace {

// (B, T, D) with unit stride over the channels: a copy if `t` has another stride.
Tensor as_steps(const char* op, const char* name, const Tensor& t, DType dtype, Sizes sizes) {
  require_tensor(op, name, t, dtype);
  require_sizes(op, name, t, sizes);
  return with_unit_last_stride(t);
}

// (..., K - 1, D) of states, (K, D) of weights: no copy if a previous call returned them.
Tensor channels_last(const Tensor& t) {
  return as_dense(torch::stable::transpose(t, t.dim() - 2, t.dim() - 1));
}

// Inputs x (B, T, D) and states (N, D, K - 1) of forward and backward. N is B, or with cu_seqlens
// (N + 1,) the number of packed sequences.
struct Problem : SequenceProblem {
  int64_t channels, taps = 0;
  Tensor x;
  OptTensor state;
  OptTensor zeros;  // (D), in place of an omitted state and bias

  Problem(const OpCall& call, const Tensor& given, const OptTensor& cu_seqlens)
      : SequenceProblem(call.op, "x", given, 3, cu_seqlens),
        channels(given.size(2)),
        x(as_steps(op, "x", given, dtype, given.sizes())) {}

  void take(int64_t count, const OptTensor& initial_state, bool wants_zeros) {
    taps = count;
    state = checked_state("initial_state", initial_state);
    if (wants_zeros || !state.has_value()) zeros = torch::stable::new_zeros(x, {channels});
  }
  OptTensor checked_state(const char* name, const OptTensor& t) const {
    if (!t.has_value()) return t;
    require_tensor(op, name, *t, dtype);
    require_sizes(op, name, *t, {sequences, channels, taps - 1});
    return channels_last(*t);
  }

  bool past_caches() const { return x.numel() * size_of(dtype) >= kLargeBytes; }
  CausalConv params(bool silu) const {
    return {.dtype = dtype,
            .silu = silu,
            .sequences = sequences,
            .steps = steps,
            .channels = channels,
            .taps = taps,
            .x = x.const_data_ptr(),
            .before = (state.has_value() ? state : zeros)->const_data_ptr(),
            .weight = nullptr,
            .bias = nullptr,
            .x_batch = x.stride(0),
            .x_row = x.stride(1),
            .before_batch = state.has_value() ? (taps - 1) * channels : 0,
            .before_row = state.has_value() ? channels : 0,
            .boundaries = packed.rows.q};
  }
};

// View (..., D, K) of a result (..., K, D); an unwanted result is returned unchanged.
Tensor channels_first(const Output& result) {
  const Tensor t = result.tensor();
  return t.dim() < 2 ? t : torch::stable::transpose(t, t.dim() - 2, t.dim() - 1);
}

// CPU only: copies the last K - 1 rows of the initial state followed by x.
void copy_final_state(const CausalConv& p, void* final_state) {
  const int64_t size = size_of(p.dtype), width = p.channels * size, before = p.taps - 1;
  char* out = static_cast<char*>(final_state);
  for (int64_t n = 0; n < p.sequences; ++n) {
    const ConvSequence s = conv_sequence(p, n);
    const char* const state = static_cast<const char*>(p.before) + n * p.before_batch * size;
    const char* const x =
        static_cast<const char*>(p.x) + (s.batch * p.x_batch + s.row * p.x_row) * size;
    for (int64_t r = s.steps; r < s.steps + before; ++r, out += width) {
      const char* const row =
          r < before ? state + r * p.before_row * size : x + (r - before) * p.x_row * size;
      std::memcpy(out, row, static_cast<size_t>(width));
    }
  }
}

// weight (D, K), bias (D).
OMNIATTN_FIELDS(Inputs, Tensor x, weight; OptTensor bias);
OMNIATTN_FIELDS(Options, bool silu);

struct CausalProblem : Problem {
  Tensor weight;
  OptTensor bias;

  CausalProblem(const OpCall& call, const Inputs& in, const SequenceArguments& given)
      : Problem(call, in.x, given.cu_seqlens) {
    require_tensor(op, "weight", in.weight, dtype);
    const Sizes sizes = in.weight.sizes();
    require(sizes.size() == 2 && sizes[0] == channels && sizes[1] >= 1, op,
            "weight must have shape (D, K) with D=", channels, " and K >= 1, got ",
            Shape{sizes.data(), sizes.size()});
    weight = channels_last(in.weight);
    bias = as_vector(op, "bias", in.bias, dtype, channels);
    take(sizes[1], given.initial_state, !bias.has_value());
  }

  CausalConv params(bool silu) const {
    CausalConv conv = Problem::params(silu);
    conv.weight = weight.const_data_ptr();
    conv.bias = (bias.has_value() ? bias : zeros)->const_data_ptr();
    return conv;
  }
};

OMNIATTN_FIELDS(Results, Output y; Tensor final_state);

// Results in the shapes of weight and states have their channels adjacent in memory.
Results causal_conv1d(const OpCall& call, const Inputs& in, const SequenceArguments& sequences,
                      const Options& options) {
  const DeviceScope scope(in.x);
  const CausalProblem p(call, in, sequences);
  const Output y(true, in.x.sizes(), p.dtype);
  const Output final_state(true, {p.sequences, p.taps - 1, p.channels}, p.dtype);
  const CausalConvParams params{.conv = p.params(options.silu),
                                .y = y.data(),
                                .past_caches = p.past_caches(),
                                .final_state = final_state.data()};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_causal_conv(params, stream()));
  } else {
    run_items(params, conv_rows(params.conv), p.channels, causal_conv_kernels(p.dtype).forward);
    if (p.channels > 0) copy_final_state(params.conv, params.final_state);
  }
  return {y, channels_first(final_state)};
}

OMNIATTN_FIELDS(Incoming, OptTensor grad_y, grad_final_state);
OMNIATTN_FIELDS(Wanted, bool weight_grad, bias_grad, initial_state_grad);
OMNIATTN_FIELDS(Gradients, Output dx; Tensor dweight; Output dbias; Tensor dinitial_state);

Gradients causal_conv1d_backward(const OpCall& call, const Inputs& in,
                                 const SequenceArguments& sequences, const Incoming& grads,
                                 const Options& options, const Wanted& wanted) {
  const DeviceScope scope(in.x);
  const CausalProblem p(call, in, sequences);
  const Sizes sizes = in.x.sizes();
  const Tensor gy =
      as_steps(p.op, "grad_y", p.gradient_or_zeros(grads.grad_y, in.x, sizes), p.dtype, sizes);
  const OptTensor grad_final = p.checked_state("grad_final_state", grads.grad_final_state);
  const Output dx(true, sizes, p.dtype);
  const Output dweight(wanted.weight_grad, {p.taps, p.channels}, p.dtype);
  const Output dbias(wanted.bias_grad && in.bias.has_value(), {p.channels}, p.dtype);
  const Output dstate(wanted.initial_state_grad && sequences.initial_state.has_value(),
                      {p.sequences, p.taps - 1, p.channels}, p.dtype);
  const CausalConvBackwardParams params{.conv = p.params(options.silu),
                                        .grad_y = gy.const_data_ptr(),
                                        .grad_final = data_or_null(grad_final),
                                        .dx = dx.data(),
                                        .past_caches = p.past_caches(),
                                        .dbefore = dstate.data(),
                                        .grad_y_batch = gy.stride(0),
                                        .grad_y_row = gy.stride(1)};
  if constexpr (kOnCuda) {
    const Tensor g = scratch(conv_rows(params.conv) * p.channels, p.acc);
    const bool sums = dweight.data() != nullptr || dbias.data() != nullptr;
    const int64_t shards = sums ? causal_conv_shards(params.conv) : 0;
    const Tensor partial = scratch(shards * (p.taps + 1) * p.channels, p.acc);
    const CausalConvScratch memory{g.mutable_data_ptr(), partial.mutable_data_ptr()};
    require_launched(
        p.op, launch_causal_conv_backward(params, memory, dweight.data(), dbias.data(), stream()));
  } else {
    const auto backward = causal_conv_kernels(p.dtype).backward;
    const int64_t items = conv_rows(params.conv) + p.sequences * (p.taps - 1);
    sum_over_rows(p.dtype, items, p.channels, {dweight, p.taps}, {dbias, 1},
                  [&](void* dw, void* db, int64_t a, int64_t b) {
                    const Tensor memory = scratch((p.taps - 1) * p.channels, p.acc);
                    backward(params, dw, db, memory.mutable_data_ptr(), a, b);
                  });
  }
  return {dx, channels_first(dweight), dbias, channels_first(dstate)};
}

// taps (B, T, H, K).
OMNIATTN_FIELDS(DynamicInputs, Tensor x, taps);
OMNIATTN_FIELDS(DynamicOptions, bool silu, residual);
OMNIATTN_FIELDS(DynamicGradients, Output dx, dtaps; Tensor dinitial_state);

struct DynamicProblem : Problem {
  Tensor filters;

  DynamicProblem(const OpCall& call, const DynamicInputs& in, const SequenceArguments& given)
      : Problem(call, in.x, given.cu_seqlens) {
    require_tensor(op, "taps", in.taps, dtype);
    const Sizes sizes = in.taps.sizes();
    const bool fits = sizes.size() == 4 && sizes[0] == batch && sizes[1] == steps && sizes[3] >= 1;
    require(fits && (sizes[2] > 0 ? channels % sizes[2] == 0 : channels == 0), op,
            "taps must have shape (B, T, H, K) with B=", batch, ", T=", steps,
            ", H a divisor of D=", channels, " and K >= 1, got ",
            Shape{sizes.data(), sizes.size()});
    filters = as_dense(in.taps);
    take(sizes[3], given.initial_state, false);
  }

  DynamicConv params(const DynamicOptions& options) const {
    return {.conv = Problem::params(options.silu),
            .heads = filters.size(2),
            .taps = filters.const_data_ptr(),
            .residual = options.residual};
  }
};

// CPU only: calls kernel(p, memory, begin, end) for ranges of rows, each with `bytes` of memory.
template <class Params>
void run_rows(const Params& p, int64_t rows, int64_t bytes,
              void (*kernel)(const Params&, void*, int64_t, int64_t)) {
  parallel_ranges(rows, grain_of(p.problem.conv.channels), [&](int64_t begin, int64_t end) {
    const Tensor memory = scratch(bytes / size_of(p.problem.conv.dtype), p.problem.conv.dtype);
    kernel(p, memory.mutable_data_ptr(), begin, end);
  });
}

Results dynamic_conv1d(const OpCall& call, const DynamicInputs& in,
                       const SequenceArguments& sequences, const DynamicOptions& options) {
  const DynamicProblem p(call, in, sequences);
  const Output y(true, in.x.sizes(), p.dtype);
  const Output final_state(true, {p.sequences, p.taps - 1, p.channels}, p.dtype);
  const DynamicConvParams params{
      .problem = p.params(options), .y = y.data(), .past_caches = p.past_caches()};
  const DynamicConvKernels& kernels = dynamic_conv_kernels(p.dtype);
  run_rows(params, conv_rows(params.problem.conv), kernels.forward_bytes(params.problem),
           kernels.forward);
  if (p.channels > 0) copy_final_state(params.problem.conv, final_state.data());
  return {y, channels_first(final_state)};
}

DynamicGradients dynamic_conv1d_backward(const OpCall& call, const Incoming& grads,
                                         const DynamicInputs& in,
                                         const SequenceArguments& sequences,
                                         const DynamicOptions& options) {
  const DynamicProblem p(call, in, sequences);
  const Sizes sizes = in.x.sizes();
  const Tensor gy =
      as_steps(p.op, "grad_y", p.gradient_or_zeros(grads.grad_y, in.x, sizes), p.dtype, sizes);
  const OptTensor grad_final = p.checked_state("grad_final_state", grads.grad_final_state);
  const Output dx(true, sizes, p.dtype);
  const Output dtaps(true, in.taps.sizes(), p.dtype);
  const Output dstate(sequences.initial_state.has_value(), {p.sequences, p.taps - 1, p.channels},
                      p.dtype);
  const DynamicConvBackwardParams params{.problem = p.params(options),
                                         .grad_y = gy.const_data_ptr(),
                                         .grad_final = data_or_null(grad_final),
                                         .dx = dx.data(),
                                         .dtaps = dtaps.data(),
                                         .dbefore = dstate.data(),
                                         .past_caches = p.past_caches(),
                                         .grad_y_batch = gy.stride(0),
                                         .grad_y_row = gy.stride(1)};
  const CausalConv& conv = params.problem.conv;
  const DynamicConvKernels& kernels = dynamic_conv_kernels(p.dtype);
  run_rows(params, conv_rows(conv) + p.sequences * (p.taps - 1),
           kernels.backward_bytes(params.problem), kernels.backward);
  return {dx, dtaps, channels_first(dstate)};
}

const Registry registry([](Registry& ops) {
  ops.add<causal_conv1d>("causal_conv1d", differentiable);
  ops.add<causal_conv1d_backward>("causal_conv1d_backward");
  ops.define<decltype(dynamic_conv1d)>("dynamic_conv1d", differentiable);
  ops.define<decltype(dynamic_conv1d_backward)>("dynamic_conv1d_backward");
  if constexpr (!kOnCuda) {
    ops.implement<dynamic_conv1d>("dynamic_conv1d", differentiable);
    ops.implement<dynamic_conv1d_backward>("dynamic_conv1d_backward");
  }
});

}  // namespace
}  // namespace omniattn::ops::conv
