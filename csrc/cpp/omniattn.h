// omniattn from C++, without Python: its ops with their gradients, for libtorch.
//
// A program includes this header, links to libtorch and loads the kernels once:
//
//   omniattn::load("libomniattn_cpu.so");  // and, after it, "libomniattn_cuda.so"
//   at::Tensor y = omniattn::rms_norm(x, weight);
//   y.sum().backward();
//
// Functions have the shapes, dtypes and defaults of their namesakes in `omniattn.functional`, where
// they are documented. They have first derivatives; the second raise an error. Errors are
// std::runtime_error or c10::Error, which is a std::exception only. `omniattn::call` runs the other
// ops of the library by their schemas.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace omniattn {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;
using Values = std::vector<c10::IValue>;
using Names = std::map<std::string, std::string>;

// Loads a library of kernels. The CPU library has the schemas of all ops and comes first.
inline void load(const std::string& path) {
  TORCH_CHECK(dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL), "omniattn::load: ", dlerror());
}

namespace detail {

// 1 / sqrt(dim), rounded as in Python.
inline double default_scale(int64_t dim) { return dim > 0 ? std::pow(dim, -0.5) : 1; }

inline bool is_tensor(const c10::IValue& value) { return value.isTensor() || value.isNone(); }
inline Tensor tensor_of(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : Tensor();
}
inline c10::IValue value_of(const Tensor& t) {
  return t.defined() ? c10::IValue(t) : c10::IValue();
}

// An op <name> with its backward <name>_backward, which takes arguments and outputs of the op,
// `grad_<output>`, and `<argument>_grad`, true if that gradient is needed, and returns
// `d<argument>` or `grad_<argument>`.
class Op {
 public:
  // `renamed` maps names of the backward to names of the op; an unnamed output is `y`.
  Op(const std::string& name, const Names& renamed)
      : name_(name), forward_(find(name + "_raw")), backward_(find(name + "_backward")) {
    for (const auto& a : forward_.schema().arguments()) arguments_.push_back(a.name());
    for (const auto& r : forward_.schema().returns()) outputs_.push_back(named(r.name(), {}));
    for (const auto& a : backward_.schema().arguments()) {
      sources_.push_back(source(named(a.name(), renamed), *a.type()));
    }
    for (const auto& r : backward_.schema().returns()) {
      const auto given = named(r.name(), renamed);
      const auto argument = given.substr(given.rfind("grad_", 0) == 0 ? 5 : 1);
      gives_.push_back(place(arguments_, argument).value_or(arguments_.size()));
    }
  }

  // Requires one value for each argument of the schema; undefined tensors become None where it is
  // allowed, as for the bias of a torch::nn::Linear without one.
  Values checked(Values values) const {
    const auto& expected = forward_.schema().arguments();
    TORCH_CHECK(values.size() == expected.size(), "omniattn::call: ", name_, " takes ",
                expected.size(), " arguments, got ", values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      if (!values[i].isTensor() || values[i].toTensor().defined()) continue;
      TORCH_CHECK(expected[i].type()->kind() == c10::TypeKind::OptionalType,
                  "omniattn::call: ", arguments_[i], " of ", name_, " is an undefined tensor");
      values[i] = {};
    }
    return values;
  }

  Tensors run(Values values) const {
    forward_.callBoxed(values);
    Tensors outputs;
    for (const auto& output : values) outputs.push_back(output.toTensor());
    return outputs;
  }

  // Tensors that the backward reads, and a stand-in for each output without a gradient.
  Tensors saved(const Values& arguments, const Tensors& outputs) const {
    Tensors found;
    for (const Source& s : sources_) {
      if (s.kind == Kind::argument && is_tensor(arguments[s.place])) {
        found.push_back(tensor_of(arguments[s.place]));
      } else if (s.kind == Kind::output) {
        found.push_back(outputs[s.place]);
      } else if (s.kind == Kind::gradient && !s.is_optional) {
        found.push_back(at::zeros({}, outputs[s.place].options()).expand_as(outputs[s.place]));
      }
    }
    return found;
  }

  // Returns the gradients of the tensors among the arguments, which stand there without values;
  // `needed` tells of each whether its gradient is needed.
  Tensors differentiate(const Values& arguments, const Tensors& saved, const Tensors& grads,
                        const std::vector<bool>& needed) const {
    std::vector<size_t> tensors;  // places of the arguments that are tensors
    std::vector<bool> flags(arguments.size() + 1, false);
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (!arguments[i].isTensor()) continue;
      flags[i] = needed[tensors.size()];
      tensors.push_back(i);
    }
    Values values;
    auto next = saved.begin();
    for (const Source& s : sources_) {
      switch (s.kind) {
        case Kind::argument:
          values.push_back(is_tensor(arguments[s.place]) ? value_of(*next++) : arguments[s.place]);
          break;
        case Kind::output:
          values.push_back(value_of(*next++));
          break;
        case Kind::gradient: {
          const Tensor zeros = s.is_optional ? Tensor() : *next++;
          const Tensor& grad = grads[s.place];
          values.push_back(value_of(grad.defined() || s.is_optional ? grad : zeros.contiguous()));
          break;
        }
        case Kind::flag:
          values.emplace_back(flags[s.place]);
          break;
        case Kind::nothing:
          values.emplace_back();
          break;
        case Kind::none_wanted:
          values.emplace_back(c10::List<int64_t>());
          break;
      }
    }
    backward_.callBoxed(values);
    Tensors found;
    for (const size_t i : tensors) {
      const auto at = std::find(gives_.begin(), gives_.end(), i) - gives_.begin();
      const bool exists = flags[i] && at < static_cast<int64_t>(values.size());
      found.push_back(exists ? values[at].toTensor() : Tensor());
    }
    return found;
  }

  // True if the output has a gradient; the others are values for the backward.
  bool is_differentiable(size_t output) const {
    return std::any_of(sources_.begin(), sources_.end(), [&](const Source& s) {
      return s.kind == Kind::gradient && s.place == output;
    });
  }

 private:
  enum class Kind { argument, output, gradient, flag, nothing, none_wanted };
  struct Source {
    Kind kind;
    size_t place;
    bool is_optional;
  };

  static c10::OperatorHandle find(const std::string& name) {
    const auto found = c10::Dispatcher::singleton().findSchema({"omniattn::" + name, ""});
    TORCH_CHECK(found, "omniattn::call: there is no op ", name,
                ": load its library by omniattn::load, or call it through the dispatcher");
    return *found;
  }

  static std::string named(const std::string& name, const Names& renamed) {
    const auto at = renamed.find(name.empty() ? "y" : name);
    return at != renamed.end() ? at->second : name.empty() ? "y" : name;
  }

  static std::optional<size_t> place(const std::vector<std::string>& names,
                                     const std::string& name) {
    const auto at = std::find(names.begin(), names.end(), name);
    return at == names.end() ? std::nullopt : std::optional<size_t>(at - names.begin());
  }

  Source source(const std::string& name, const c10::Type& type) const {
    const bool is_optional = type.kind() == c10::TypeKind::OptionalType;
    if (const auto at = place(arguments_, name)) return {Kind::argument, *at, is_optional};
    if (const auto at = place(outputs_, name)) return {Kind::output, *at, is_optional};
    if (name.rfind("grad_", 0) == 0) {
      if (const auto at = place(outputs_, name.substr(5))) {
        return {Kind::gradient, *at, is_optional};
      }
    }
    if (name.size() > 5 && name.compare(name.size() - 5, 5, "_grad") == 0) {
      if (const auto at = place(arguments_, name.substr(0, name.size() - 5))) {
        return {Kind::flag, *at, is_optional};
      }
    }
    if (is_optional) return {Kind::nothing, 0, true};
    TORCH_CHECK(name == "wanted", "omniattn::call: ", name_,
                " has no gradient in C++: its backward takes ", name,
                ", which is neither an argument nor an output");
    return {Kind::none_wanted, 0, false};
  }

  std::string name_;
  c10::OperatorHandle forward_, backward_;
  std::vector<std::string> arguments_, outputs_;
  std::vector<size_t> gives_;  // places of the arguments of the returned gradients
  std::vector<Source> sources_;
};

// `arguments` has all arguments of the op, and `tensors` the tensors among them.
struct Differentiable : torch::autograd::Function<Differentiable> {
  static Tensors forward(torch::autograd::AutogradContext* ctx, const Op* op,
                         const Values* arguments, at::TensorList tensors) {
    Tensors outputs = op->run(*arguments);
    Values kept = *arguments;
    for (auto& value : kept) {
      if (value.isTensor()) value = Tensor();  // autograd keeps it
    }
    ctx->saved_data["op"] = reinterpret_cast<int64_t>(op);
    ctx->saved_data["arguments"] = c10::ivalue::Tuple::create(std::move(kept));
    ctx->saved_data["tensors"] = static_cast<int64_t>(tensors.size());
    ctx->save_for_backward(op->saved(*arguments, outputs));
    ctx->set_materialize_grads(false);
    Tensors fixed;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!op->is_differentiable(i)) fixed.push_back(outputs[i]);
    }
    ctx->mark_non_differentiable(fixed);
    return outputs;
  }

  static Tensors backward(torch::autograd::AutogradContext* ctx, const Tensors& grads) {
    TORCH_CHECK(!c10::GradMode::is_enabled(),
                "omniattn: ops have no second derivatives in C++; call backward without "
                "create_graph");
    const auto* op = reinterpret_cast<const Op*>(ctx->saved_data["op"].toInt());
    const Values arguments = ctx->saved_data["arguments"].toTuple()->elements().vec();
    std::vector<bool> needed;
    for (int64_t i = 0; i < ctx->saved_data["tensors"].toInt(); ++i) {
      needed.push_back(ctx->needs_input_grad(i));
    }
    const bool any = std::any_of(grads.begin(), grads.end(), [](auto& g) { return g.defined(); });
    Tensors found(needed.size());
    if (any) found = op->differentiate(arguments, ctx->get_saved_variables(), grads, needed);
    found.insert(found.begin(), 2, Tensor());  // op and arguments
    return found;
  }
};

}  // namespace detail

// Runs an op with all arguments of its schema, and returns all outputs, those for the backward too.
// Lists that the schema calls optional must be given, empty if need be.
inline Tensors call(const std::string& name, const Values& given, const Names& renamed = {}) {
  static std::map<std::string, detail::Op> ops;
  static std::mutex mutex;
  const detail::Op* op;
  {
    const std::lock_guard<std::mutex> guard(mutex);
    op = &ops.try_emplace(name, name, renamed).first->second;
  }
  const Values arguments = op->checked(given);
  Tensors tensors;
  bool needed = false;
  for (const auto& value : arguments) {
    if (!value.isTensor()) continue;
    tensors.push_back(value.toTensor());
    needed = needed || tensors.back().requires_grad();
  }
  if (!needed || !c10::GradMode::is_enabled()) return op->run(arguments);
  return detail::Differentiable::apply(op, &arguments, at::TensorList(tensors));
}

// x weight^T + bias
inline Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias = {}) {
  return call("linear", {x, weight, bias, 0})[0];
}

inline Tensor rms_norm(const Tensor& x, const OptionalTensor& weight = {}, double eps = 1e-6,
                       double offset = 0) {
  return call("norm", {x, weight, OptionalTensor(), false, eps, offset, false}, {{"h", "x"}})[0];
}

inline Tensor layer_norm(const Tensor& x, const OptionalTensor& weight = {},
                         const OptionalTensor& bias = {}, double eps = 1e-5) {
  return call("norm", {x, weight, bias, true, eps, 0.0, false}, {{"h", "x"}})[0];
}

// Functions of the gate of a gated linear unit.
enum class Activation : int64_t {
  identity,
  relu,
  silu,
  gelu,
  gelu_tanh,
  sigmoid,
  quick_gelu,
  relu_squared
};

// activation(gate) * up; without up, gate holds both halves.
inline Tensor gated(const Tensor& gate, const OptionalTensor& up, Activation activation) {
  const c10::List<double> no_clamp;
  return call("glu", {gate, up, static_cast<int64_t>(activation), no_clamp})[0];
}
inline Tensor swiglu(const Tensor& gate, const OptionalTensor& up = {}) {
  return gated(gate, up, Activation::silu);
}

struct AttentionOptions {
  bool causal = false;
  // Keys before and after the diagonal that a query sees, -1 for all.
  std::pair<int64_t, int64_t> window_size = {-1, -1};
  std::optional<double> scale = {};  // 1 / sqrt(D) by default
};

// softmax(scale q k^T + mask) v of q (B, Tq, H, D), k (B, Tk, Hkv, D) and v (B, Tk, Hkv, Dv);
// returns O (B, Tq, H, Dv) and the log-sum-exp of its rows, (B, H, Tq).
inline std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                            const AttentionOptions& options = {}) {
  auto [left, right] = options.window_size;
  TORCH_CHECK(q.dim() == 4, "attention: q must have shape (B, Tq, H, D), got q.shape=", q.sizes());
  TORCH_CHECK(left >= -1 && right >= -1, "attention: window_size must be at least -1, got (", left,
              ", ", right, ")");
  if (options.causal) right = 0;
  c10::List<int64_t> mask, no_score;
  if (left >= 0 || right >= 0) mask = c10::List<int64_t>({0, left, right, -1});  // a window
  const double scale = options.scale.value_or(detail::default_scale(q.size(3)));
  const c10::List<double> params({scale, 0.0});  // without dropout
  const auto found =
      call("attention", {q, k, v, c10::List<Tensor>(), OptionalTensor(), mask, no_score, params});
  return {found[0], found[1]};
}

// Rotates q (B, T, H, D) by the angles of cos and sin (T, R / 2), in pairs of halves or neighbours.
// These tables have no gradient.
inline Tensor rotary(const Tensor& q, const Tensor& cos, const Tensor& sin,
                     bool interleaved = false, bool inverse = false);

namespace detail {

inline Tensor turn(const Tensor& q, const Tensor& cos, const Tensor& sin, bool interleaved,
                   bool inverse) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("omniattn::rope_raw", "");
  Values values{q, OptionalTensor(), cos, sin, OptionalTensor(), 0, interleaved, inverse};
  op.callBoxed(values);
  return values[0].toTensor();
}

struct Turn : torch::autograd::Function<Turn> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& q, const Tensor& cos,
                        const Tensor& sin, bool interleaved, bool inverse) {
    ctx->save_for_backward({cos, sin});
    ctx->saved_data["interleaved"] = interleaved;
    ctx->saved_data["inverse"] = inverse;
    return turn(q, cos, sin, interleaved, inverse);
  }
  static Tensors backward(torch::autograd::AutogradContext* ctx, const Tensors& grads) {
    const auto saved = ctx->get_saved_variables();
    const bool interleaved = ctx->saved_data["interleaved"].toBool();
    const bool inverse = ctx->saved_data["inverse"].toBool();
    return {rotary(grads[0], saved[0], saved[1], interleaved, !inverse), {}, {}, {}, {}};
  }
};

// Runs a recurrence; rank of g: 3 for a decay of a head, 4 for one of a channel.
inline std::tuple<Tensor, Tensor> recurrence(const Tensor& q, const Tensor& k, const Tensor& v,
                                             const OptionalTensor& g, const OptionalTensor& beta,
                                             const OptionalTensor& initial_state,
                                             std::optional<double> scale) {
  TORCH_CHECK(q.dim() == 4, "omniattn: q must have shape (B, T, H, K), got q.shape=", q.sizes());
  const OptionalTensor none;
  const double factor = scale.value_or(default_scale(q.size(3)));
  const auto found =
      call("recurrence", {q, k, v, g, beta, none, none, none, none, none, none, initial_state, none,
                          factor, beta.has_value(), 0, false, 0.0, false});
  return {found[0], found[1]};
}

}  // namespace detail

inline Tensor rotary(const Tensor& q, const Tensor& cos, const Tensor& sin, bool interleaved,
                     bool inverse) {
  TORCH_CHECK(!cos.requires_grad() && !sin.requires_grad(),
              "rotary: cos and sin have no gradient; detach them");
  if (!q.requires_grad() || !c10::GradMode::is_enabled()) {
    return detail::turn(q, cos, sin, interleaved, inverse);
  }
  return detail::Turn::apply(q, cos, sin, interleaved, inverse);
}

// S_t = exp(g_t) S_(t-1) + k_t v_t^T, o_t = scale S_t^T q_t, for g (B, T, H) or (B, T, H, K);
// returns o (B, T, H, V) and the state (B, H, K, V).
inline std::tuple<Tensor, Tensor> gated_linear_attention(const Tensor& q, const Tensor& k,
                                                         const Tensor& v, const Tensor& g,
                                                         const OptionalTensor& initial_state = {},
                                                         std::optional<double> scale = {}) {
  return detail::recurrence(q, k, v, g, {}, initial_state, scale);
}

// The delta rule with decays g (B, T, H) or (B, T, H, K) and strengths beta (B, T, H).
inline std::tuple<Tensor, Tensor> gated_delta_rule(const Tensor& q, const Tensor& k,
                                                   const Tensor& v, const Tensor& g,
                                                   const Tensor& beta,
                                                   const OptionalTensor& initial_state = {},
                                                   std::optional<double> scale = {}) {
  return detail::recurrence(q, k, v, g, beta, initial_state, scale);
}

// Depthwise causal convolution of x (B, T, C) by weight (C, W), then SiLU if `silu`.
inline Tensor causal_conv1d(const Tensor& x, const Tensor& weight, const OptionalTensor& bias = {},
                            bool silu = false) {
  const OptionalTensor none;
  return call("causal_conv1d", {x, weight, bias, none, none, silu})[0];
}

// The selective scan of Mamba-1 over u and delta (B, T, D), with A (D, N), B and C (B, T, N) or (B,
// T, G, N), the skip D (D) and the gate z (B, T, D).
inline Tensor selective_scan(const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B,
                             const Tensor& C, const OptionalTensor& D = {},
                             const OptionalTensor& z = {}, const OptionalTensor& delta_bias = {},
                             bool delta_softplus = false) {
  const OptionalTensor none;
  const auto grouped = [](const Tensor& t) { return t.dim() == 3 ? t.unsqueeze(2) : t; };
  return call("selective_scan", {u, delta, A, grouped(B), grouped(C), D, z, delta_bias, none, none,
                                 delta_softplus, false})[0];
}

// Mean loss of logits (..., V) and targets (...), of which -100 is ignored.
inline Tensor cross_entropy(const Tensor& logits, const Tensor& target) {
  constexpr int64_t kMean = 1;
  const Values arguments{logits, target, OptionalTensor(), -100, 0.0, 0.0, 0.0, 1.0, kMean};
  return call("cross_entropy", arguments, {{"grad", "grad_loss"}, {"y", "dlogits"}})[0];
}

}  // namespace omniattn
