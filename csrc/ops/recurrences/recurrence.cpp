// recurrence.
#include "ops/recurrences/recurrence.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/recurrences/decayed_sum.h"
#include "ops/registry.h"
#include "ops/sequence_problem.h"
#include "ops/shards.h"
#include "ops/stage.h"

namespace omniattn::ops::recurrence {
namespace {

// q, k, a, b (B, T, Hk, K), v (B, T, Hv, V), g (B, T, Hv) or (B, T, Hv, K), beta (B, T, Hv), bonus
// (N, Hv, K), skip (N, Hv, V), min_denominator (B, T, Hv), gv (B, T, Hv, V), states (N, Hv, K, V),
// or V + 1 columns with normalize. fp32_output: o is fp32 for half types.
OMNIATTN_FIELDS(Inputs, Tensor q, k, v; OptTensor g, beta, bonus, a, b, skip, min_denominator, gv);
OMNIATTN_FIELDS(Options, double scale; bool delta; int64_t feature_map; bool normalize; double eps;
                bool fp32_output);

// Checked arguments of forward and backward.
struct Problem : SequenceProblem {
  Recurrence recurrence{};
  Sizes key_sizes;               // of q, k, a and b
  std::array<int64_t, 4> sizes;  // of v
  std::vector<Tensor> copies;    // of arguments that kernels cannot read in place

  Problem(const OpCall& call, const Inputs& in, const SequenceArguments& given, const Options& x)
      : SequenceProblem(call.op, "q", in.q, 4, given.cu_seqlens), key_sizes(in.q.sizes()) {
    Recurrence& r = recurrence;
    r.dtype = dtype;
    r.o_dtype = x.fp32_output ? acc : dtype;
    r.sequences = sequences;
    r.steps = steps;
    r.boundaries = packed.rows.q;
    r.key_heads = in.q.size(2), r.key_width = in.q.size(3);
    r.value_heads = with_dims("v", in.v, 4).size(2), r.value_width = in.v.size(3);
    sizes = {batch, steps, r.value_heads, r.value_width};
    r.scale = x.scale;
    r.eps = x.eps;
    r.delta = x.delta;
    r.normalize = x.normalize;
    r.features = static_cast<FeatureMap>(x.feature_map);
    r.channel_decay = in.g.has_value() && in.g->dim() == 4;
    r.q = view("q", in.q, dtype, key_sizes);
    r.k = view("k", in.k, dtype, key_sizes);
    r.v = view("v", in.v, dtype, value_sizes());
    require(r.key_heads > 0 ? r.value_heads % r.key_heads == 0 : r.value_heads == 0, op,
            "the heads of v must be a multiple of those of q and k, got ", r.value_heads, " and ",
            r.key_heads);
    const std::array<int64_t, 4> channels{batch, steps, r.value_heads, r.key_width};
    const Sizes of_heads(channels.data(), 3);
    r.g = view("g", in.g, acc, r.channel_decay ? Sizes(channels.data(), 4) : of_heads);
    r.beta = view("beta", in.beta, acc, of_heads);
    r.min_denominator = view("min_denominator", in.min_denominator, acc, of_heads);
    r.gv = view("gv", in.gv, acc, value_sizes());
    r.initial_state = state("initial_state", given.initial_state);
    check_options(in, x);
    r.a = view("a", in.a, dtype, key_sizes);
    r.b = view("b", in.b, dtype, key_sizes);
    r.bonus = data("bonus", in.bonus, {sequences, r.value_heads, r.key_width});
    r.skip = data("skip", in.skip, {sequences, r.value_heads, r.value_width});
  }

  Sizes value_sizes() const { return {sizes.data(), sizes.size()}; }
  std::array<int64_t, 4> state_sizes() const {
    return {sequences, recurrence.value_heads, recurrence.key_width, recurrence.state_width()};
  }
  int64_t state_bytes() const {
    return recurrence.key_width * recurrence.value_width * size_of(acc);
  }

  // (B, T, H), or (B, T, H, D) with unit last stride, of the given sizes.
  StepView view(const char* name, const OptTensor& given, DType type, Sizes want) {
    if (!given.has_value()) return {};
    require_tensor(op, name, *given, type);
    require_sizes(op, name, *given, want);
    const bool fits = given->dim() != 4 || has_unit_last_stride(*given);
    const Tensor& t = fits ? *given : copies.emplace_back(torch::stable::contiguous(*given));
    return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
  }
  const void* data(const char* name, const OptTensor& given, Sizes want) {
    if (!given.has_value()) return nullptr;
    return copies.emplace_back(*dense(name, given, want)).const_data_ptr();
  }
  const void* state(const char* name, const OptTensor& given) {
    const auto want = state_sizes();
    return data(name, given, {want.data(), want.size()});
  }

 private:
  void check_options(const Inputs& in, const Options& x) const {
    const int updates = in.beta.has_value() + in.bonus.has_value() + in.a.has_value();
    require(updates <= 1, op, "at most one of beta, bonus and a may be given, got ", updates);
    require(!x.delta || in.beta.has_value(), op, "delta needs beta, got None");
    const bool plain = !(x.delta || in.bonus.has_value() || in.a.has_value());
    require(!in.skip.has_value() || plain, op,
            "skip and any of delta, bonus and a must not be given together");
    require(x.feature_map >= 0 && x.feature_map < kFeatureMapCount, op,
            "feature_map must be in [0, ", kFeatureMapCount, "), got ", x.feature_map);
    require(recurrence.features == FeatureMap::identity || plain, op,
            "feature_map must be 0 with any of delta, bonus and a, got ", x.feature_map);
    require(!x.normalize || (plain && !in.skip.has_value()), op,
            "normalize and any of delta, bonus, a and skip must not be given together");
    const bool raw = !x.normalize && recurrence.features == FeatureMap::identity;
    require(!in.gv.has_value() || (plain && raw), op,
            "gv and any of delta, bonus, a, feature_map and normalize must not be given together");
    require(x.normalize || !in.min_denominator.has_value(), op,
            "min_denominator needs normalize, got normalize=false");
    require(x.eps >= 0 && std::isfinite(x.eps), op, "eps must be finite and >= 0, got ", x.eps);
    require(in.a.has_value() == in.b.has_value(), op, "a and b must be given together");
    require(recurrence.channel_decay || !(in.bonus.has_value() || in.a.has_value()), op,
            "g must have 4 dimensions (B, T, H, K) with a bonus or with a and b");
  }
};

// Kernels for a call; `tiles` is null if the machine has no tiles.
template <class Kernels>
const Kernels& on_tiles_or(const Recurrence& p, const Kernels* tiles, const Kernels& others) {
  return tiles != nullptr && recurrence_on_tiles(p) ? *tiles : others;
}

// states: at the starts of chunks.
OMNIATTN_FIELDS(Results, Output o, final_state, states);

Results recurrence(const OpCall& call, const Inputs& in, const SequenceArguments& sequences,
                   const Options& options) {
  const DeviceScope scope(in.q);
  const Problem p(call, in, sequences, options);
  const Recurrence& shared = p.recurrence;
  const auto state = p.state_sizes();
  Results r{
      .o = {true, p.value_sizes(), shared.o_dtype},
      .final_state = {true, {state.data(), state.size()}, p.acc},
      .states = {call.saves, {recurrence_slots(shared), state[1], state[2], state[3]}, p.acc}};
  const int64_t heads = parts_of_item(p.sequences, shared.value_heads, p.state_bytes());
  const RecurrenceParams params{.recurrence = shared,
                                .heads = heads,
                                .o = r.o.data(),
                                .final_state = r.final_state.data(),
                                .states = r.states.data()};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_on_cuda(params));
  } else {
    const RecurrenceKernels& kernels =
        on_tiles_or(shared, recurrence_tile_kernels(), recurrence_kernels(shared.dtype));
    run_items(params, p.sequences * ceil_div(shared.value_heads, heads),
              kernels.bytes(shared, heads), kernels.forward);
  }
  return r;
}

// Number of parts that the value heads of a key head are split into, if there are few key heads to
// share among threads. It depends on the heads only, so results do not depend on threads.
int64_t shards_of(const Recurrence& p) {
  constexpr int64_t kItems = 16;
  const int64_t group = p.key_heads > 0 ? p.value_heads / p.key_heads : 1;
  if (kOnCuda || p.key_heads >= kItems) return 1;
  for (int64_t n = 1; n < group; ++n) {
    if (group % n == 0 && p.key_heads * n >= kItems) return n;
  }
  return std::max<int64_t>(1, group);
}

OMNIATTN_FIELDS(Incoming, OptTensor grad_o, grad_final_state);
OMNIATTN_FIELDS(Saved, Tensor states);
OMNIATTN_FIELDS(Wanted, bool g_grad, beta_grad, bonus_grad, skip_grad, min_denominator_grad,
                gv_grad, initial_state_grad);
OMNIATTN_FIELDS(Gradients, Output dq, dk, dv, dg, dbeta, dbonus, da, db, dskip, dmin_denominator,
                dgv, dinitial_state);

Gradients outputs(const Problem& p, const Inputs& in, const Wanted& wanted) {
  const auto like = [](bool is_wanted, const OptTensor& x, DType type) {
    return is_wanted && x.has_value() ? Output(true, x->sizes(), type) : Output(false, {}, type);
  };
  const auto state = p.state_sizes();
  return {.dq = {true, p.key_sizes, p.dtype},
          .dk = {true, p.key_sizes, p.dtype},
          .dv = {true, p.value_sizes(), p.dtype},
          .dg = like(wanted.g_grad, in.g, p.acc),
          .dbeta = like(wanted.beta_grad, in.beta, p.acc),
          .dbonus = like(wanted.bonus_grad, in.bonus, p.acc),
          .da = like(true, in.a, p.dtype),
          .db = like(true, in.b, p.dtype),
          .dskip = like(wanted.skip_grad, in.skip, p.acc),
          .dmin_denominator = like(wanted.min_denominator_grad, in.min_denominator, p.acc),
          .dgv = like(wanted.gv_grad, in.gv, p.acc),
          .dinitial_state = {wanted.initial_state_grad, {state.data(), state.size()}, p.acc}};
}

Gradients recurrence_backward(const OpCall& call, const Incoming& grads, const Inputs& in,
                              const SequenceArguments& sequences, const Saved& saved,
                              const Options& options, const Wanted& wanted) {
  const DeviceScope scope(in.q);
  Problem p(call, in, sequences, options);
  const Recurrence& shared = p.recurrence;
  const StepView grad_o = p.view("grad_o", grads.grad_o, shared.o_dtype, p.value_sizes());
  const void* const grad_final = p.state("grad_final_state", grads.grad_final_state);
  const auto state = p.state_sizes();
  require_dense(p.op, "states", saved.states, p.acc,
                {recurrence_slots(shared), state[1], state[2], state[3]});
  Gradients d = outputs(p, in, wanted);
  Shards shards(p.dtype, shards_of(shared));
  const int64_t all_parts = shared.key_heads * shards.count();
  const int64_t group = all_parts > 0 ? shared.value_heads / all_parts : 0;
  const int64_t parts = parts_of_item(p.sequences, all_parts, group * p.state_bytes());
  const RecurrenceBackwardParams params{.recurrence = shared,
                                        .shards = shards.count(),
                                        .parts = parts,
                                        .grad_o = grad_o,
                                        .grad_final_state = grad_final,
                                        .states = saved.states.const_data_ptr(),
                                        .dq = shards.parts_of(d.dq),
                                        .dk = shards.parts_of(d.dk),
                                        .dv = d.dv.data(),
                                        .da = shards.parts_of(d.da),
                                        .db = shards.parts_of(d.db),
                                        .dg = d.dg.data(),
                                        .dgv = d.dgv.data(),
                                        .dbeta = d.dbeta.data(),
                                        .dbonus = d.dbonus.data(),
                                        .dskip = d.dskip.data(),
                                        .dmin_denominator = d.dmin_denominator.data(),
                                        .dinitial_state = d.dinitial_state.data()};
  if constexpr (kOnCuda) {
    require_launched(p.op, launch_on_cuda(params));
  } else {
    const RecurrenceBackwardKernels& kernels = on_tiles_or(
        shared, recurrence_tile_backward_kernels(), recurrence_backward_kernels(shared.dtype));
    run_items(params, p.sequences * ceil_div(all_parts, parts),
              kernels.bytes(shared, shards.count(), parts), kernels.backward);
  }
  shards.sum();
  return d;
}

const Registry registry([](Registry& ops) {
  ops.constant("recurrence_chunk", recurrence_chunk(false));
  ops.constant("recurrence_chunk_of_channel_decay", recurrence_chunk(true));
  ops.name("recurrence", {{"gated_linear_attention"},
                          {"ssd", "beta"},
                          {"linear_attention", "normalize"},
                          {"gated_delta_rule", "delta"},
                          {"rwkv6", "bonus"},
                          {"dplr_delta_rule", "a"},
                          {"rwkv7"},
                          {"delta_rule"},
                          {"kimi_delta_attention"},
                          {"retention"}});
  ops.add<recurrence>("recurrence", saves_last);
  ops.add<recurrence_backward>("recurrence_backward");
  ops.define<decltype(decayed_sum::decayed_sum)>("decayed_sum");
});

}  // namespace
}  // namespace omniattn::ops::recurrence
