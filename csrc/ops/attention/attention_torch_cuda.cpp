// Attention by kernels of torch: which calls they take, and their arguments and results. Facts
// about these kernels are from torch's aten/src/ATen/native/transformers/cuda and
// native/cudnn/MHA.cpp.
#include "ops/attention/attention_torch.h"

#include <algorithm>

#include "kernels/torch_paths/torch_paths.h"
#include "ops/device.h"
#include "ops/path.h"
#include "ops/torch_ops.h"

namespace omniattn::ops::attention {
namespace {

// Numbers of keys before and after its own that a query sees; -1: all. False if the mask is not one
// window, aligned to the last key.
struct Window {
  int64_t left = -1, right = -1;
  bool found = true;

  explicit Window(const AttentionProblem& p) {
    if (p.mask.count == 0) return;
    const MaskRule& rule = p.mask.rules[0];
    found = p.mask.count == 1 && rule.kind == MaskKind::window_bottom_right;
    const auto bound = [&](int64_t n) { return n >= p.tk ? -1 : n; };
    if (found) left = bound(rule.a), right = bound(rule.b);
  }
  bool is_full() const { return left < 0 && right < 0; }
  bool is_causal() const { return left < 0 && right == 0; }
};

bool has_whole_16_bytes(const Tensor& t) {
  bool fits = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  for (int64_t i = 0; i + 1 < t.dim(); ++i) fits = fits && (t.size(i) <= 1 || t.stride(i) % 8 == 0);
  return fits;
}

constexpr Condition<Call> kFlash[] = {
    {"kernels of this package are wanted", [](const Call& c) { return !c.own_kernels; }},
    {"q is not bfloat16 or float16", [](const Call& c) { return size_of(c.problem.dtype) == 2; }},
    {"k and v are int8", [](const Call& c) { return !c.problem.is_int8; }},
    {"the sequences are those of a cache",
     [](const Call& c) { return !c.has_layout || c.is_packed; }},
    {"packed queries and keys have different boundaries, or one row each",
     [](const Call& c) { return !c.is_packed || (c.shares_boundaries && c.problem.tq > 1); }},
    {"the call is a part of a longer one",
     [](const Call& c) {
       const Part& part = c.problem.mask.part;
       return part.first_q == 0 && part.first_k == 0 && part.rest_q == 0 && part.rest_k == 0;
     }},
    {"the score has terms, sinks or another normalizer",
     [](const Call& c) { return c.problem.terms == 0; }},
    {"scale is not positive", [](const Call& c) { return c.problem.score.pre > 0; }},
    {"weights are dropped", [](const Call& c) { return c.problem.dropout.threshold == 0; }},
    {"the mask is not one window", [](const Call& c) { return Window(c.problem).found; }},
    {"some queries may see no key",
     [](const Call& c) {
       const AttentionProblem& p = c.problem;
       return Window(p).is_full() || c.is_packed || p.tq <= p.tk;
     }},
    {"q, k and v have not one head size, a multiple of 8 up to 256",
     [](const Call& c) {
       const AttentionProblem& p = c.problem;
       return p.d == p.dv && p.d > 0 && p.d % 8 == 0 && p.d <= 256;
     }},
    {"rows of q, k or v do not start at multiples of 16 bytes",
     [](const Call& c) {
       return std::all_of(c.kept.begin(), c.kept.begin() + 3, has_whole_16_bytes);
     }},
    {"there are more than 65535 sequences or heads",
     [](const Call& c) { return c.problem.batch <= 65535 && c.problem.hq <= 65535; }},
};

// Conditions besides flash's. cuDNN aligns a causal mask to the first key.
constexpr Condition<Call> kCudnn[] = {
    {"the compute capability is not 9 or 10",
     [](const Call&) {
       const int64_t generation = gpu_generation();
       return generation == 9 || generation == 10;
     }},
    {"sequences are packed", [](const Call& c) { return !c.has_layout; }},
    {"the mask is a window",
     [](const Call& c) {
       const Window window(c.problem);
       return window.is_full() || (window.is_causal() && c.problem.tq == c.problem.tk);
     }},
    {"heads have more than 128 numbers", [](const Call& c) { return c.problem.d <= 128; }},
};

double scale_of(const Score& score) { return score.pre * score.chain; }

Tensor heads_first(const Tensor& t) { return torch::stable::transpose(t, 1, 2); }

// Arguments of flash's forward and backward.
struct FlashCall {
  Tensor q, k, v;        // (B, T, H, D), or of packed sequences (total, H, D)
  OptTensor boundaries;  // (N + 1,) int32
  int64_t longest_q, longest_k;
  bool causal;
  double scale;
  std::optional<int64_t> left, right;

  explicit FlashCall(const Call& call)
      : q(rows(call, call.kept[0])),
        k(rows(call, call.kept[1])),
        v(rows(call, call.kept[2])),
        longest_q(call.problem.tq),
        longest_k(call.problem.tk),
        scale(scale_of(call.problem.score)) {
    const Window window(call.problem);
    causal = window.is_causal();
    if (!causal && !window.is_full()) left = window.left, right = window.right;
    if (!call.is_packed) return;
    boundaries = torch::stable::new_empty(call.kept[0], {call.problem.batch + 1}, ScalarType::Int);
    auto* const to = static_cast<int32_t*>(boundaries->mutable_data_ptr());
    require_launched("attention", launch_boundaries(call.problem, to, stream()));
  }

  // t as torch takes it, without the batch dimension of packed sequences.
  static Tensor rows(const Call& call, const Tensor& t) {
    return call.is_packed ? torch::stable::squeeze(t, 0) : t;
  }
  // A result of torch, as our op returns it.
  static Tensor result(const Call& call, const Tensor& t) {
    return as_dense(call.is_packed ? torch::stable::unsqueeze(t, 0) : t);
  }
};

}  // namespace

const char* why_not_flash(const Call& call) { return broken(kFlash, call); }

const char* why_not_cudnn(const Call& call) {
  const char* const why = broken(kFlash, call);
  return why != nullptr ? why : broken(kCudnn, call);
}

TorchResults run_flash(const Call& call) {
  const FlashCall x(call);
  const TorchStack found = call_torch_op("aten::_flash_attention_forward", "", x.q, x.k, x.v,
                                         x.boundaries, x.boundaries, x.longest_q, x.longest_k, 0.0,
                                         x.causal, false, std::optional(x.scale), x.left, x.right);
  const Tensor out = take_tensor(found, 0), lse = take_tensor(found, 1);
  for (const size_t unused : {2, 3, 4}) take_tensor(found, unused);
  return {FlashCall::result(call, out), FlashCall::result(call, lse)};
}

// Calls cuDNN's attention through an op of ops/dispatch/torch_kernels.py.
TorchResults run_cudnn(const Call& call) {
  const AttentionProblem& p = call.problem;
  const TorchStack found = call_torch_op(
      "omniattn_torch::cudnn_attention", "", heads_first(call.kept[0]), heads_first(call.kept[1]),
      heads_first(call.kept[2]), Window(p).is_causal(), scale_of(p.score));
  const Tensor out = take_tensor(found, 0), lse = take_tensor(found, 1);  // lse (B, Hq, Tq, 1)
  return {as_dense(heads_first(out)), torch::stable::reshape(lse, call.lse_sizes)};
}

TorchGradients run_flash(const Call& call, const TorchBackward& b) {
  const FlashCall x(call);
  const auto rows = [&](const Tensor& t) { return FlashCall::rows(call, t); };
  const Tensor boundaries = x.boundaries.has_value() ? *x.boundaries : undefined_tensor();
  const Tensor no_seed = torch::stable::new_empty(call.kept[0], {2}, ScalarType::Long);
  const TorchStack found =
      call_torch_op("aten::_flash_attention_backward", "", rows(b.grad_out), x.q, x.k, x.v,
                    rows(b.out), rows(b.lse), boundaries, boundaries, x.longest_q, x.longest_k, 0.0,
                    x.causal, no_seed, no_seed, std::optional(x.scale), x.left, x.right);
  const auto gradient = [&](size_t n) { return FlashCall::result(call, take_tensor(found, n)); };
  return {gradient(0), gradient(1), gradient(2)};
}

}  // namespace omniattn::ops::attention
