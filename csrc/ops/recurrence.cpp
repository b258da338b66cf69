// recurrence: the matrix state of linear attention, gated linear attention and delta rules.
#include "kernels/recurrence/recurrence.h"

#include <tuple>

#include "ops/device.h"
#include "ops/registry.h"
#include "ops/stage.h"

namespace omniattn::ops::recurrence {
namespace {

// Packed sequences: on the CPU the numbers are checked; CUDA would wait for the GPU.
OptTensor as_boundaries(const char* op, const OptTensor& t, int64_t batch, int64_t steps) {
  if (!t.has_value()) return t;
  require_tensor(op, "cu_seqlens", *t, ScalarType::Int);
  require(t->dim() == 1 && t->size(0) >= 1, op, "cu_seqlens must have shape (N + 1,), got ",
          Shape{t->sizes().data(), t->sizes().size()});
  require(batch == 1, op, "packed sequences must have B = 1, got B=", batch);
  const Tensor dense = as_dense(*t);
  if constexpr (!kOnCuda) {
    const int32_t* const at = static_cast<const int32_t*>(dense.const_data_ptr());
    const int64_t last = dense.size(0) - 1;
    require(at[0] == 0 && at[last] == steps, op, "cu_seqlens must go from 0 to T=", steps, ", got ",
            at[0], " to ", at[last]);
    for (int64_t n = 0; n < last; ++n) {
      require(at[n] <= at[n + 1], op, "cu_seqlens must not decrease, got ", at[n], " then ",
              at[n + 1]);
    }
  }
  return dense;
}

// What forward and backward share.
struct Problem {
  const char* op;
  DType dtype, acc;
  int64_t batch, steps, key_heads, value_heads, key_dim, value_dim, sequences;
  Tensor q, k, v;
  OptTensor g, beta, state, boundaries;

  Problem(const char* op_, const Tensor& q_, const Tensor& k_, const Tensor& v_,
          const OptTensor& g_, const OptTensor& beta_, const OptTensor& state_,
          const OptTensor& cu_seqlens)
      : op(op_), dtype(dtype_of(op, "q", q_)), acc(accumulator(dtype)), q(q_), k(k_), v(v_) {
    require(q.dim() == 4, op, "q must have shape (B, T, Hk, K), got ", q.dim(), " dimensions");
    require(v.dim() == 4, op, "v must have shape (B, T, Hv, V), got ", v.dim(), " dimensions");
    batch = q.size(0), steps = q.size(1), key_heads = q.size(2), key_dim = q.size(3);
    value_heads = v.size(2), value_dim = v.size(3);
    require(key_heads > 0 ? value_heads % key_heads == 0 : value_heads == 0, op,
            "Hv must be a multiple of Hk, got Hk=", key_heads, ", Hv=", value_heads);
    q = as_input("q", q, dtype, q.sizes());
    k = as_input("k", k, dtype, q.sizes());
    v = as_input("v", v, dtype, {batch, steps, value_heads, value_dim});
    if (g_.has_value()) {
      g = g_->dim() == 4 ? as_input("g", *g_, acc, {batch, steps, value_heads, key_dim})
                         : as_gate("g", *g_);
    }
    if (beta_.has_value()) beta = as_gate("beta", *beta_);
    boundaries = as_boundaries(op, cu_seqlens, batch, steps);
    sequences = boundaries.has_value() ? boundaries->size(0) - 1 : batch;
    state = as_state("initial_state", state_);
  }

  Tensor as_input(const char* name, const Tensor& t, DType want, Sizes sizes) const {
    require_tensor(op, name, t, want);
    require_sizes(op, name, t, sizes);
    return with_unit_last_stride(t);
  }
  const Tensor& as_gate(const char* name, const Tensor& t) const {
    require_tensor(op, name, t, acc);
    require_sizes(op, name, t, {batch, steps, value_heads});
    return t;
  }
  OptTensor as_state(const char* name, const OptTensor& t) const {
    if (!t.has_value()) return t;
    require_tensor(op, name, *t, acc);
    require_sizes(op, name, *t, {sequences, value_heads, key_dim, value_dim});
    return as_dense(*t);
  }
  Tensor new_states(int64_t count) const {
    return empty_tensor({count, value_heads, key_dim, value_dim}, acc);
  }

  static HeadRows rows(const Tensor& t) {
    return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
  }
  static HeadRows rows(const OptTensor& t) { return t.has_value() ? rows(*t) : HeadRows{}; }

  Recurrence params(double scale) const {
    return {.dtype = dtype,
            .decay = !g.has_value()  ? StateDecay::none
                     : g->dim() == 4 ? StateDecay::channel
                                     : StateDecay::head,
            .update = beta.has_value() ? StateUpdate::delta : StateUpdate::plain,
            .batch = batch,
            .steps = steps,
            .key_heads = key_heads,
            .value_heads = value_heads,
            .key_dim = key_dim,
            .value_dim = value_dim,
            .sequences = sequences,
            .scale = scale,
            .q = rows(q),
            .k = rows(k),
            .v = rows(v),
            .g = rows(g),
            .beta = rows(beta),
            .initial_state = data_or_null(state),
            .cu_seqlens = static_cast<const int32_t*>(data_or_null(boundaries))};
  }
};

// On the CPU: a kernel over the heads of all sequences.
template <class Params>
void run_heads(const Params& p, int64_t bytes,
               void (*kernel)(const Params&, void* memory, int64_t begin, int64_t end)) {
  const Recurrence& x = p.problem;
  const int64_t items = x.sequences * x.value_heads;
  const int64_t elements = x.batch * x.steps * x.value_heads * x.key_dim * x.value_dim;
  const int64_t threads = std::min({items, elements / kTaskElements + 1,
                                    static_cast<int64_t>(torch::stable::get_num_threads())});
  const int64_t together =
      std::clamp<int64_t>(items / std::max<int64_t>(threads, 1), 1, kHeadsTogether);
  const ThreadMemory memory(threads, bytes);
  parallel_queue(ceil_div(items, together), threads, [&](int64_t thread, int64_t group) {
    kernel(p, memory.of(thread), group * together, std::min((group + 1) * together, items));
  });
}

std::tuple<Tensor, Tensor, Tensor> run(const Tensor& q, const Tensor& k, const Tensor& v,
                                       const OptTensor& g, const OptTensor& beta,
                                       const OptTensor& initial_state, const OptTensor& cu_seqlens,
                                       double scale, bool keep_states) {
  const DeviceScope scope(q);
  const Problem p("recurrence", q, k, v, g, beta, initial_state, cu_seqlens);
  const Recurrence problem = p.params(scale);
  const Tensor o = empty_tensor(v.sizes(), p.dtype);
  const Tensor final_state = p.new_states(p.sequences);
  const Output states(keep_states, {state_slots(problem), p.value_heads, p.key_dim, p.value_dim},
                      p.acc);
  const RecurrenceParams params{.problem = problem,
                                .o = o.mutable_data_ptr(),
                                .final_state = final_state.mutable_data_ptr(),
                                .states = states.data()};
  const RecurrenceKernels& kernels = recurrence_kernels();
  run_heads(params, kernels.forward_bytes(problem), kernels.forward);
  return {o, final_state, states.tensor()};
}

std::tuple<Tensor, Tensor, Tensor> recurrence(const Tensor& q, const Tensor& k, const Tensor& v,
                                              const OptTensor& g, const OptTensor& beta,
                                              const OptTensor& initial_state,
                                              const OptTensor& cu_seqlens, double scale) {
  return run(q, k, v, g, beta, initial_state, cu_seqlens, scale, true);
}
std::tuple<Tensor, Tensor> recurrence_only(const Tensor& q, const Tensor& k, const Tensor& v,
                                           const OptTensor& g, const OptTensor& beta,
                                           const OptTensor& initial_state,
                                           const OptTensor& cu_seqlens, double scale) {
  const auto [o, final_state, states] =
      run(q, k, v, g, beta, initial_state, cu_seqlens, scale, false);
  return {o, final_state};
}

// The gradient of q or k: where value heads share a key head, from one part for each value head.
class KeyGradient {
 public:
  explicit KeyGradient(const Problem& p)
      : p_(p), sum_(empty_tensor({p.batch, p.steps, p.key_heads, p.key_dim}, p.dtype)) {
    if (p.value_heads > p.key_heads) {
      parts_ = scratch(p.batch * p.steps * p.value_heads * p.key_dim, p.acc);
    }
  }

  void* parts() const { return (parts_.has_value() ? *parts_ : sum_).mutable_data_ptr(); }

  // Adds the parts, on the CPU.
  Tensor sum(const Recurrence& problem) const {
    if (!parts_.has_value()) return sum_;
    const auto add = recurrence_kernels().add_heads;
    parallel_ranges(p_.batch * p_.steps * p_.key_heads,
                    grain_of(p_.value_heads / p_.key_heads * p_.key_dim),
                    [&](int64_t begin, int64_t end) {
                      add(problem, parts_->const_data_ptr(), sum_.mutable_data_ptr(), begin, end);
                    });
    return sum_;
  }

 private:
  const Problem& p_;
  Tensor sum_;
  OptTensor parts_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> recurrence_backward(
    const Tensor& q, const Tensor& k, const Tensor& v, const OptTensor& g, const OptTensor& beta,
    const OptTensor& initial_state, const OptTensor& cu_seqlens, const Tensor& states,
    const OptTensor& grad_o, const OptTensor& grad_final_state, double scale, bool g_grad,
    bool beta_grad, bool initial_state_grad) {
  const DeviceScope scope(q);
  const Problem p("recurrence_backward", q, k, v, g, beta, initial_state, cu_seqlens);
  const Recurrence problem = p.params(scale);
  const Tensor go = grad_o.has_value() ? p.as_input("grad_o", *grad_o, p.dtype, v.sizes())
                                       : torch::stable::new_zeros(v, v.sizes());
  const OptTensor grad_final = p.as_state("grad_final_state", grad_final_state);
  require_dense(p.op, "states", states, p.acc,
                {state_slots(problem), p.value_heads, p.key_dim, p.value_dim});
  const KeyGradient dq(p), dk(p);
  const Tensor dv = empty_tensor(v.sizes(), p.dtype);
  const bool per_channel = problem.decay == StateDecay::channel;
  const Output dg(g_grad && g.has_value(), per_channel ? g->sizes() : v.sizes().slice(0, 3), p.acc);
  const Output dbeta(beta_grad && beta.has_value(), v.sizes().slice(0, 3), p.acc);
  const Output dstate(initial_state_grad && initial_state.has_value(),
                      {p.sequences, p.value_heads, p.key_dim, p.value_dim}, p.acc);
  const RecurrenceBackwardParams params{.problem = problem,
                                        .grad_o = Problem::rows(go),
                                        .grad_final = data_or_null(grad_final),
                                        .states = states.const_data_ptr(),
                                        .dq = dq.parts(),
                                        .dk = dk.parts(),
                                        .dv = dv.mutable_data_ptr(),
                                        .dg = dg.data(),
                                        .dbeta = dbeta.data(),
                                        .dstate = dstate.data()};
  const RecurrenceKernels& kernels = recurrence_kernels();
  run_heads(params, kernels.backward_bytes(problem), kernels.backward);
  return {dq.sum(problem), dk.sum(problem), dv, dg.tensor(), dbeta.tensor(), dstate.tensor()};
}

// q, k (B, T, Hk, K), v (B, T, Hv, V), g (B, T, Hv) or (B, T, Hv, K), beta (B, T, Hv); states
// (N, Hv, K, V) with N = B, or with cu_seqlens (N + 1) the number of its sequences.
const Registry registry([](Registry& ops) {
#define OMNIATTN_INPUTS                                                                    \
  "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? initial_state, Tensor? " \
  "cu_seqlens"
  ops.define("recurrence(" OMNIATTN_INPUTS
             ", float scale) -> (Tensor o, Tensor final_state, Tensor states)",
             differentiable);
  ops.define("recurrence_only(" OMNIATTN_INPUTS ", float scale) -> (Tensor o, Tensor final_state)");
  ops.define("recurrence_backward(" OMNIATTN_INPUTS
             ", Tensor states, Tensor? grad_o, Tensor? grad_final_state, float scale, bool g_grad,"
             " bool beta_grad, bool initial_state_grad)"
             " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta,"
             " Tensor dinitial_state)");
#undef OMNIATTN_INPUTS
  if constexpr (!kOnCuda) {  // CUDA has no kernels yet
    ops.implement<recurrence>("recurrence", differentiable);
    ops.implement<recurrence_only>("recurrence_only");
    ops.implement<recurrence_backward>("recurrence_backward");
  }
});

}  // namespace
}  // namespace omniattn::ops::recurrence
