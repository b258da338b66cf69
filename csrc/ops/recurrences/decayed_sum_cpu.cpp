// decayed_sum on the CPU.
#include "ops/recurrences/decayed_sum.h"

#include <vector>

#include "kernels/sums/decayed_sum.h"
#include "ops/recurrences/recurrence.h"
#include "ops/registry.h"
#include "ops/sequence_problem.h"
#include "ops/stage.h"

namespace omniattn::ops::decayed_sum {

Results decayed_sum(const OpCall& call, const Inputs& in, const Options& options) {
  const SequenceProblem p(call.op, "k", in.k, 4, std::nullopt);
  std::vector<Tensor> copies;  // of arguments that kernels cannot read in place
  const auto view = [&](const char* name, const OptTensor& given, DType type, Sizes want) {
    if (!given.has_value()) return StepView{};
    require_tensor(p.op, name, *given, type);
    require_sizes(p.op, name, *given, want);
    const bool fits = given->dim() != 4 || has_unit_last_stride(*given);
    const Tensor& t = fits ? *given : copies.emplace_back(torch::stable::contiguous(*given));
    return StepView{t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
  };
  DecayedSum d{};
  d.dtype = p.dtype;
  d.v_dtype = dtype_of(p.op, "v", in.v) == p.acc ? p.acc : p.dtype;
  d.from_start = options.from_start, d.before_own = options.before_own;
  d.batch = p.batch, d.steps = p.steps;
  d.key_heads = in.k.size(2), d.key_width = in.k.size(3);
  d.value_heads = p.with_dims("v", in.v, 4).size(2), d.value_width = in.v.size(3);
  require(d.key_heads > 0 ? d.value_heads % d.key_heads == 0 : d.value_heads == 0, p.op,
          "the heads of v must be a multiple of those of k, got ", d.value_heads, " and ",
          d.key_heads);
  require(options.feature_map >= 0 && options.feature_map < kFeatureMapCount, p.op,
          "feature_map must be in [0, ", kFeatureMapCount, "), got ", options.feature_map);
  d.features = static_cast<FeatureMap>(options.feature_map);
  const std::array<int64_t, 4> values{d.batch, d.steps, d.value_heads, d.value_width};
  d.k = view("k", in.k, p.dtype, in.k.sizes());
  d.v = view("v", in.v, d.v_dtype, {values.data(), 4});
  d.beta = view("beta", in.beta, p.acc, {values.data(), 3});
  d.gv = view("gv", in.gv, p.acc, {values.data(), 4});
  if (in.g.has_value()) {
    d.channel_decay = p.with_dims("g", *in.g, 4).size(3) != 1;
    const int64_t channels = d.channel_decay ? d.key_width : 1;
    d.g = view("g", in.g, p.acc, {d.batch, d.steps, d.value_heads, channels});
  }
  d.heads = recurrence::parts_of_item(d.batch, d.value_heads,
                                      d.key_width * d.value_width * size_of(p.acc));
  Results r{.sum = {true, {d.batch, d.value_heads, d.key_width, d.value_width}, p.acc},
            .decay = {true, {d.batch, d.value_heads, d.key_width}, p.acc},
            .value_decay = {in.gv.has_value(), {d.batch, d.value_heads, d.value_width}, p.acc}};
  const DecayedSumParams params{.problem = d,
                                .sum = r.sum.data(),
                                .decay = r.decay.data(),
                                .value_decay = r.value_decay.data()};
  const DecayedSumKernels& kernels = decayed_sum_kernels(p.dtype);
  run_items(params, d.items(), kernels.bytes(d), kernels.run);
  return r;
}

namespace {

const Registry registry([](Registry& ops) {
  ops.name("decayed_sum", {{"gated_linear_attention"}});
  ops.implement<decayed_sum>("decayed_sum");
});

}  // namespace
}  // namespace omniattn::ops::decayed_sum
