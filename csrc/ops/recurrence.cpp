// recurrence.
#include "kernels/recurrence/recurrence.h"

#include <algorithm>
#include <cmath>

#include <string>
#include <tuple>

#include "kernels/sums/sums.h"
#include "ops/registry.h"
#include "ops/sequence_problem.h"
#include "ops/stage.h"
#include "ops/without_last.h"

namespace omniattn::ops::recurrence {
namespace {

// (B, T, H), or (B, T, H, D) with unit last stride, of the given sizes.
struct Steps {
  Tensor tensor;

  Steps(const char* op, const char* name, const Tensor& t, DType dtype, Sizes sizes) : tensor(t) {
    require_tensor(op, name, t, dtype);
    require_sizes(op, name, t, sizes);
    if (t.dim() == 4) tensor = with_unit_last_stride(t);
  }
  StepView view() const {
    return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
  }
};
using OptSteps = std::optional<Steps>;
StepView view_or_null(const OptSteps& steps) { return steps ? steps->view() : StepView{}; }

// Checked arguments of forward and backward.
struct Problem : SequenceProblem {
  int64_t key_heads, value_heads, key_width, value_width;
  Steps q, k, v;
  bool channel_decay;
  OptSteps g, beta, a, b;
  OptSteps min_denominator;
  OptTensor bonus, skip, initial_state;
  double scale;
  bool delta;
  FeatureMap features;
  bool normalize;
  double eps;
  DType o_dtype;

  Problem(const char* op_, const Tensor& q_, const Tensor& k_, const Tensor& v_,
          const OptTensor& g_, const OptTensor& beta_, const OptTensor& bonus_, const OptTensor& a_,
          const OptTensor& b_, const OptTensor& skip_, const OptTensor& min_denominator_,
          const OptTensor& initial_state_, const OptTensor& cu_seqlens, double scale_, bool delta_,
          int64_t features_, bool normalize_, double eps_, bool fp32_output)
      : SequenceProblem(op_, "q", q_, 4, cu_seqlens),
        key_heads(q_.size(2)),
        value_heads(with_dims("v", v_, 4).size(2)),
        key_width(q_.size(3)),
        value_width(v_.size(3)),
        q(op, "q", q_, dtype, q_.sizes()),
        k(op, "k", k_, dtype, q_.sizes()),
        v(op, "v", v_, dtype, {batch, steps, value_heads, value_width}),
        channel_decay(g_.has_value() && g_->dim() == 4),
        scale(scale_),
        delta(delta_),
        features(static_cast<FeatureMap>(features_)),
        normalize(normalize_),
        eps(eps_),
        o_dtype(fp32_output ? acc : dtype) {
    require(key_heads > 0 ? value_heads % key_heads == 0 : value_heads == 0, op,
            "the heads of v must be a multiple of those of q and k, got ", value_heads, " and ",
            key_heads);
    const std::array<int64_t, 4> channels{batch, steps, value_heads, key_width};
    const auto of_heads = [&](OptSteps& to, const char* name, const OptTensor& t, size_t dims) {
      if (t.has_value()) to.emplace(op, name, *t, acc, Sizes(channels.data(), dims));
    };
    of_heads(g, "g", g_, channel_decay ? 4 : 3);
    of_heads(beta, "beta", beta_, 3);
    of_heads(min_denominator, "min_denominator", min_denominator_, 3);
    initial_state = state("initial_state", initial_state_);
    const int updates = beta_.has_value() + bonus_.has_value() + a_.has_value();
    require(updates <= 1, op, "at most one of beta, bonus and a may be given, got ", updates);
    require(!delta || beta_.has_value(), op, "delta needs beta, got None");
    const bool plain = !(delta || bonus_.has_value() || a_.has_value());
    require(!skip_.has_value() || plain, op,
            "skip and any of delta, bonus and a must not be given together");
    require(features_ >= 0 && features_ < kFeatureMapCount, op, "feature_map must be in [0, ",
            kFeatureMapCount, "), got ", features_);
    require(features == FeatureMap::identity || plain, op,
            "feature_map must be 0 with any of delta, bonus and a, got ", features_);
    require(!normalize || (plain && !skip_.has_value()), op,
            "normalize and any of delta, bonus, a and skip must not be given together");
    require(normalize || !min_denominator_.has_value(), op,
            "min_denominator needs normalize, got normalize=false");
    require(eps >= 0 && std::isfinite(eps), op, "eps must be finite and >= 0, got ", eps);
    require(a_.has_value() == b_.has_value(), op, "a and b must be given together");
    require(channel_decay || !(bonus_.has_value() || a_.has_value()), op,
            "g must have 4 dimensions (B, T, H, K) with a bonus or with a and b");
    if (a_.has_value()) {
      a.emplace(op, "a", *a_, dtype, q_.sizes());
      b.emplace(op, "b", *b_, dtype, q_.sizes());
    }
    bonus = dense("bonus", bonus_, {sequences, value_heads, key_width});
    skip = dense("skip", skip_, {sequences, value_heads, value_width});
  }

  std::array<int64_t, 4> state_sizes() const {
    return {sequences, value_heads, key_width, value_width + normalize};
  }
  int64_t state_bytes() const { return key_width * value_width * size_of(acc); }
  OptTensor state(const char* name, const OptTensor& t) const {
    const auto sizes = state_sizes();
    return dense(name, t, {sizes.data(), sizes.size()});
  }

  Recurrence params() const {
    return {.dtype = dtype,
            .o_dtype = o_dtype,
            .channel_decay = channel_decay,
            .delta = delta,
            .sequences = sequences,
            .steps = steps,
            .key_heads = key_heads,
            .value_heads = value_heads,
            .key_width = key_width,
            .value_width = value_width,
            .scale = scale,
            .q = q.view(),
            .k = k.view(),
            .v = v.view(),
            .g = view_or_null(g),
            .beta = view_or_null(beta),
            .a = view_or_null(a),
            .b = view_or_null(b),
            .bonus = data_or_null(bonus),
            .skip = data_or_null(skip),
            .features = features,
            .normalize = normalize,
            .min_denominator = view_or_null(min_denominator),
            .eps = eps,
            .initial_state = data_or_null(initial_state),
            .boundaries = packed.rows.q};
  }
};

// Name of the public function in errors; functions with fewer options check their own arguments.
std::string op_of(const OptTensor& beta, const OptTensor& bonus, const OptTensor& a, bool delta,
                  bool normalize) {
  return a.has_value()       ? "dplr_delta_rule"
         : bonus.has_value() ? "rwkv6"
         : delta             ? "gated_delta_rule"
         : normalize         ? "linear_attention"
         : beta.has_value()  ? "ssd"
                             : "gated_linear_attention";
}

// Number of sequence parts, `bytes` each, that an item of a kernel reads at once, of `count` parts:
// as many as balance the threads as well as single parts do. Parts are independent, so results do
// not depend on the number of threads.
int64_t parts_of_item(const Problem& p, int64_t count, int64_t bytes) {
  constexpr int64_t kMost = 8, kMostBytes = int64_t{1} << 19;
  const int64_t threads = torch::stable::get_num_threads();
  const auto rounds = [&](int64_t n) {
    return n * ceil_div(p.sequences * ceil_div(count, n), threads);
  };
  int64_t parts = 1;
  for (int64_t n = 2; n <= std::min(count, kMost) && n * bytes <= kMostBytes; ++n) {
    if (rounds(n) <= rounds(1)) parts = n;
  }
  return parts;
}

// Kernels for a call; `tiles` is null if the machine has no tiles.
template <class Kernels>
const Kernels& on_tiles_or(const Recurrence& p, const Kernels* tiles, const Kernels& others) {
  return tiles != nullptr && recurrence_on_tiles(p) ? *tiles : others;
}

// kSave: true to save states for the backward; `recurrence_only` does not.
template <bool kSave>
std::tuple<Tensor, Tensor, Tensor> recurrence(
    const Tensor& q, const Tensor& k, const Tensor& v, const OptTensor& g, const OptTensor& beta,
    const OptTensor& bonus, const OptTensor& a, const OptTensor& b, const OptTensor& skip,
    const OptTensor& min_denominator, const OptTensor& initial_state, const OptTensor& cu_seqlens,
    double scale, bool delta, int64_t feature_map, bool normalize, double eps, bool fp32_output) {
  const DeviceScope scope(q);
  const std::string op = op_of(beta, bonus, a, delta, normalize);
  const Problem p(op.c_str(), q, k, v, g, beta, bonus, a, b, skip, min_denominator, initial_state,
                  cu_seqlens, scale, delta, feature_map, normalize, eps, fp32_output);
  const auto state = p.state_sizes();
  const Output o(true, p.v.tensor.sizes(), p.o_dtype);
  const Output final_state(true, {state.data(), state.size()}, p.acc);
  const Recurrence shared = p.params();
  const Output states(kSave, {recurrence_slots(shared), state[1], state[2], state[3]}, p.acc);
  const int64_t heads = parts_of_item(p, p.value_heads, p.state_bytes());
  const RecurrenceParams params{.recurrence = shared,
                                .heads = heads,
                                .o = o.data(),
                                .final_state = final_state.data(),
                                .states = states.data()};
  if constexpr (kOnCuda) {
    const Tensor memory =
        scratch(ceil_div(recurrence_bytes(shared), size_of(DType::f64)), DType::f64);
    require_launched(p.op, launch_recurrence(params, memory.mutable_data_ptr(), stream()));
  } else {
    const RecurrenceKernels& kernels =
        on_tiles_or(shared, recurrence_tile_kernels(), recurrence_kernels());
    run_items(params, p.sequences * ceil_div(p.value_heads, heads), kernels.bytes(shared, heads),
              kernels.forward);
  }
  return {o.tensor(), final_state.tensor(), states.tensor()};
}

// Number of parts that the value heads of a key head are split into, if there are few key heads to
// share among threads. It depends on the heads only, so results do not depend on threads.
int64_t shards_of(const Problem& p) {
  constexpr int64_t kItems = 16;
  const int64_t group = p.key_heads > 0 ? p.value_heads / p.key_heads : 1;
  if (kOnCuda || p.key_heads >= kItems) return 1;
  for (int64_t n = 1; n < group; ++n) {
    if (group % n == 0 && p.key_heads * n >= kItems) return n;
  }
  return std::max<int64_t>(1, group);
}

// A gradient (B, T, Hk, K), or its parts, which are summed in the end.
class Sharded {
 public:
  Sharded(const Problem& p, bool wanted, const OptSteps& like, int64_t shards)
      : p_(p), shards_(shards), out_(wanted && like, sizes(like), p.dtype) {
    if (shards == 1 || out_.data() == nullptr) return;
    parts_ = scratch(shards * out_.tensor().numel(), p.acc);
  }
  void* data() const { return parts_.has_value() ? parts_->mutable_data_ptr() : out_.data(); }
  Tensor sum() const {
    Tensor out = out_.tensor();
    if constexpr (!kOnCuda) {
      if (!parts_.has_value()) return out;
      const int64_t count = out.numel(), element = size_of(p_.acc);
      const Tensor sums = p_.dtype == p_.acc ? out : empty_tensor(out.sizes(), p_.acc);
      const auto* const from = static_cast<const char*>(parts_->const_data_ptr());
      char* const to = static_cast<char*>(sums.mutable_data_ptr());
      parallel_ranges(count, kTaskElements, [&](int64_t begin, int64_t end) {
        sum_kernels().sum_shards(p_.acc, from + begin * element, shards_, count, end - begin,
                                 to + begin * element);
      });
      if (p_.dtype != p_.acc) torch::stable::copy_(out, sums);
    }
    return out;
  }

 private:
  static Sizes sizes(const OptSteps& like) { return like ? like->tensor.sizes() : Sizes{}; }

  const Problem& p_;
  int64_t shards_;
  Output out_;
  OptTensor parts_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
recurrence_backward(const OptTensor& grad_o, const OptTensor& grad_final_state, const Tensor& q,
                    const Tensor& k, const Tensor& v, const OptTensor& g, const OptTensor& beta,
                    const OptTensor& bonus, const OptTensor& a, const OptTensor& b,
                    const OptTensor& skip, const OptTensor& min_denominator,
                    const OptTensor& initial_state, const OptTensor& cu_seqlens,
                    const Tensor& states, double scale, bool delta, int64_t feature_map,
                    bool normalize, double eps, bool fp32_output, bool g_grad, bool beta_grad,
                    bool bonus_grad, bool skip_grad, bool min_denominator_grad,
                    bool initial_state_grad) {
  const DeviceScope scope(q);
  const std::string op = op_of(beta, bonus, a, delta, normalize) + "_backward";
  const Problem p(op.c_str(), q, k, v, g, beta, bonus, a, b, skip, min_denominator, initial_state,
                  cu_seqlens, scale, delta, feature_map, normalize, eps, fp32_output);
  const Recurrence shared = p.params();
  OptSteps go;
  if (grad_o.has_value()) go.emplace(p.op, "grad_o", *grad_o, p.o_dtype, p.v.tensor.sizes());
  const OptTensor grad_final = p.state("grad_final_state", grad_final_state);
  const auto state = p.state_sizes();
  require_dense(p.op, "states", states, p.acc,
                {recurrence_slots(shared), state[1], state[2], state[3]});
  const auto like = [&](bool wanted, const OptSteps& x, DType type) {
    return Output(wanted && x, x ? x->tensor.sizes() : Sizes{}, type);
  };
  const int64_t shards = shards_of(p);
  const int64_t all_parts = p.key_heads * shards;
  const int64_t group = all_parts > 0 ? p.value_heads / all_parts : 0;
  const int64_t parts = parts_of_item(p, all_parts, group * p.state_bytes());
  const Sharded dq(p, true, p.q, shards), dk(p, true, p.k, shards);
  const Sharded da(p, true, p.a, shards), db(p, true, p.b, shards);
  const Output dv = like(true, p.v, p.dtype);
  const Output dg = like(g_grad, p.g, p.acc), dbeta = like(beta_grad, p.beta, p.acc);
  const Output dmin_denominator = like(min_denominator_grad, p.min_denominator, p.acc);
  const Output dbonus(bonus_grad && p.bonus, {state.data(), state.size() - 1}, p.acc);
  const Output dskip(skip_grad && p.skip, {p.sequences, p.value_heads, p.value_width}, p.acc);
  const Output dinitial(initial_state_grad, {state.data(), state.size()}, p.acc);
  const RecurrenceBackwardParams params{.recurrence = shared,
                                        .shards = shards,
                                        .parts = parts,
                                        .grad_o = view_or_null(go),
                                        .grad_final_state = data_or_null(grad_final),
                                        .states = states.const_data_ptr(),
                                        .dq = dq.data(),
                                        .dk = dk.data(),
                                        .dv = dv.data(),
                                        .da = da.data(),
                                        .db = db.data(),
                                        .dg = dg.data(),
                                        .dbeta = dbeta.data(),
                                        .dbonus = dbonus.data(),
                                        .dskip = dskip.data(),
                                        .dmin_denominator = dmin_denominator.data(),
                                        .dinitial_state = dinitial.data()};
  if constexpr (kOnCuda) {
    const Tensor memory =
        scratch(ceil_div(recurrence_backward_bytes(shared), size_of(DType::f64)), DType::f64);
    require_launched(p.op, launch_recurrence_backward(params, memory.mutable_data_ptr(), stream()));
  } else {
    const RecurrenceBackwardKernels& kernels =
        on_tiles_or(shared, recurrence_tile_backward_kernels(), recurrence_backward_kernels());
    run_items(params, p.sequences * ceil_div(all_parts, parts),
              kernels.bytes(shared, shards, parts), kernels.backward);
  }
  return {dq.sum(),         dk.sum(), dv.tensor(), dg.tensor(),    dbeta.tensor(),
          dbonus.tensor(),  da.sum(), db.sum(),    dskip.tensor(), dmin_denominator.tensor(),
          dinitial.tensor()};
}

// q, k, a, b (B, T, Hk, K), v (B, T, Hv, V), g (B, T, Hv) or (B, T, Hv, K), beta (B, T, Hv), bonus
// (N, Hv, K), skip (N, Hv, V), min_denominator (B, T, Hv), states (N, Hv, K, V), or V + 1 columns
// with normalize. fp32_output: o is fp32 for half types. The last result of the forward holds the
// states at the starts of chunks.
const Registry registry([](Registry& ops) {
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
  ops.add<recurrence<true>, WithoutLast<recurrence<false>>::run>(
      "recurrence(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? bonus, Tensor? a,"
      " Tensor? b, Tensor? skip, Tensor? min_denominator, Tensor? initial_state, Tensor? "
      "cu_seqlens,"
      " float scale, bool delta, int feature_map, bool normalize, float eps, bool fp32_output)"
      " -> (Tensor o, Tensor final_state, Tensor states)",
      differentiable);
  ops.add<recurrence_backward>(
      "recurrence_backward(Tensor? grad_o, Tensor? grad_final_state, Tensor q, Tensor k, Tensor v,"
      " Tensor? g, Tensor? beta, Tensor? bonus, Tensor? a, Tensor? b, Tensor? skip, Tensor? "
      "min_denominator,"
      " Tensor? initial_state, Tensor? cu_seqlens, Tensor states, float scale, bool delta,"
      " int feature_map, bool normalize, float eps, bool fp32_output, bool g_grad, bool beta_grad,"
      " bool bonus_grad, bool skip_grad, bool min_denominator_grad, bool initial_state_grad)"
      " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dbonus, Tensor da,"
      " Tensor db, Tensor dskip, Tensor dmin_denominator, Tensor dinitial_state)");
});

}  // namespace
}  // namespace omniattn::ops::recurrence
