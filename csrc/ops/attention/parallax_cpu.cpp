// parallax_attention on the CPU.
#include "kernels/parallax/parallax.h"

#include <algorithm>
#include <vector>

#include "ops/attention/parallax.h"
#include "ops/registry.h"
#include "ops/sequence_problem.h"
#include "ops/shards.h"
#include "ops/stage.h"
#include "ops/step_view.h"

namespace omniattn::ops::parallax {
namespace {

// Checked arguments of forward and backward.
struct Problem : SequenceProblem {
  Parallax shared{};
  std::vector<int64_t> out_sizes;
  std::vector<Tensor> copies;  // of arguments that kernels cannot read in place

  Problem(const OpCall& call, const Inputs& in, const Options& options)
      : SequenceProblem(call.op, "q", in.q, 4, in.cu_seqlens) {
    Parallax& p = shared;
    p.dtype = dtype, p.sequences = sequences, p.queries = steps;
    p.keys = with_dims("k", in.k, 4).size(1);
    p.heads = in.q.size(2), p.key_heads = in.k.size(2);
    p.width = in.q.size(3), p.value_width = with_dims("v", in.v, 4).size(3);
    p.left = options.left, p.right = options.right, p.scale = options.scale;
    require(p.key_heads > 0 ? p.heads % p.key_heads == 0 : p.heads == 0, op,
            "Hq must be a multiple of Hkv, got Hq=", p.heads, ", Hkv=", p.key_heads);
    out_sizes = {batch, steps, p.heads, p.value_width};
    p.q = view("q", in.q, in.q.sizes());
    p.r = view("r", in.r, in.q.sizes());
    p.k = view("k", in.k, {batch, p.keys, p.key_heads, p.width});
    p.v = view("v", in.v, {batch, p.keys, p.key_heads, p.value_width});
    p.longest = p.queries, p.longest_keys = p.keys;
    p.boundaries = packed.rows.q;
    if (p.boundaries == nullptr) return;
    require(p.keys == p.queries, op, "k must have Tq=", p.queries, " rows with cu_seqlens, got ",
            p.keys);
    p.longest = 0;
    for (int64_t n = 0; n < sequences; ++n) {
      p.longest = std::max(p.longest, p.boundaries[n + 1] - p.boundaries[n]);
    }
    p.longest_keys = p.longest;
  }

  StepView view(const char* name, const Tensor& given, Sizes want) {
    return step_view(op, name, given, dtype, want, copies);
  }
};

}  // namespace

Results parallax_attention(const OpCall& call, const Inputs& in, const Options& options) {
  const Problem p(call, in, options);
  Results r{.out = {true, {p.out_sizes.data(), p.out_sizes.size()}, p.dtype}};
  const ParallaxParams params{.problem = p.shared, .o = r.out.data()};
  const ParallaxKernels& kernels = parallax_kernels(p.dtype);
  run_items(params, p.shared.items(), kernels.bytes(p.shared), kernels.forward);
  return r;
}

Gradients parallax_attention_backward(const OpCall& call, const Incoming& grads, const Inputs& in,
                                      const Options& options) {
  Problem p(call, in, options);
  Gradients d{.dq = {true, in.q.sizes(), p.dtype},
              .dr = {true, in.q.sizes(), p.dtype},
              .dk = {true, in.k.sizes(), p.dtype},
              .dv = {true, in.v.sizes(), p.dtype}};
  const Sizes sizes{p.out_sizes.data(), p.out_sizes.size()};
  for (const Output* each : {&d.dk, &d.dv}) {
    Tensor zeros = each->tensor();
    if (p.shared.heads == 0) torch::stable::zero_(zeros);
  }
  Shards shards(p.dtype, p.shared.group());
  const ParallaxBackwardParams params{.problem = p.shared,
                                      .grad_o = grads.grad_out.has_value()
                                                    ? p.view("grad_out", *grads.grad_out, sizes)
                                                    : StepView{},
                                      .dq = d.dq.data(),
                                      .dr = d.dr.data(),
                                      .dk = shards.parts_of(d.dk),
                                      .dv = shards.parts_of(d.dv)};
  const ParallaxBackwardKernels& kernels = parallax_backward_kernels(p.dtype);
  run_items(params, p.shared.backward_items(), kernels.bytes(p.shared), kernels.backward);
  shards.sum();
  return d;
}

namespace {

const Registry registry([](Registry& ops) {
  ops.implement<parallax_attention>("parallax_attention", differentiable);
  ops.implement<parallax_attention_backward>("parallax_attention_backward");
});

}  // namespace
}  // namespace omniattn::ops::parallax
