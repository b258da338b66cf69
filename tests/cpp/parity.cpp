// Runs functions of omniattn.h on tensors of a file, and saves results and gradients:
// parity KERNELS INPUTS OUTPUTS, each a dictionary written by torch.save. Without files, prints the
// errors of calls that are refused.
#include <omniattn.h>
#include <torch/torch.h>

#include <fstream>
#include <functional>
#include <iostream>

using at::Tensor;
using Inputs = std::map<std::string, Tensor>;

namespace {

const std::map<std::string, std::function<Tensor(const Inputs&)>> kFunctions{
    {"linear",
     [](const Inputs& t) { return omniattn::linear(t.at("x"), t.at("weight"), t.at("bias")); }},
    {"linear_without_bias",
     [](const Inputs& t) { return omniattn::linear(t.at("x"), t.at("weight"), Tensor()); }},
    {"relu_squared",
     [](const Inputs& t) {
       return omniattn::gated(t.at("gate"), t.at("up"), omniattn::Activation::relu_squared);
     }},
    {"rms_norm", [](const Inputs& t) { return omniattn::rms_norm(t.at("x"), t.at("weight")); }},
    {"layer_norm",
     [](const Inputs& t) { return omniattn::layer_norm(t.at("x"), t.at("weight"), t.at("bias")); }},
    {"swiglu", [](const Inputs& t) { return omniattn::swiglu(t.at("gate"), t.at("up")); }},
    {"attention",
     [](const Inputs& t) {
       return std::get<0>(omniattn::attention(t.at("q"), t.at("k"), t.at("v"), {.causal = true}));
     }},
    {"window",
     [](const Inputs& t) {
       return std::get<0>(omniattn::attention(t.at("q"), t.at("k"), t.at("v"),
                                              {.window_size = {2, 1}, .scale = 0.3}));
     }},
    {"lse",
     [](const Inputs& t) {
       return std::get<1>(omniattn::attention(t.at("q"), t.at("k"), t.at("v")));
     }},
    {"rotary",
     [](const Inputs& t) { return omniattn::rotary(t.at("q"), t.at("cos"), t.at("sin")); }},
    {"gated_linear_attention",
     [](const Inputs& t) {
       return std::get<0>(
           omniattn::gated_linear_attention(t.at("q"), t.at("k"), t.at("v"), t.at("g")));
     }},
    {"gated_delta_rule",
     [](const Inputs& t) {
       return std::get<0>(omniattn::gated_delta_rule(t.at("q"), t.at("k"), t.at("v"), t.at("g"),
                                                     t.at("beta"), t.at("initial_state")));
     }},
    {"state",
     [](const Inputs& t) {
       return std::get<1>(omniattn::gated_delta_rule(t.at("q"), t.at("k"), t.at("v"), t.at("g"),
                                                     t.at("beta"), t.at("initial_state")));
     }},
    {"causal_conv1d",
     [](const Inputs& t) {
       return omniattn::causal_conv1d(t.at("x"), t.at("weight"), t.at("bias"), true);
     }},
    {"selective_scan",
     [](const Inputs& t) {
       return omniattn::selective_scan(t.at("u"), t.at("delta"), t.at("A"), t.at("B"), t.at("C"),
                                       t.at("D"), t.at("z"), t.at("delta_bias"), true);
     }},
    {"cross_entropy",
     [](const Inputs& t) { return omniattn::cross_entropy(t.at("logits"), t.at("target")); }},
};

std::vector<char> read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void print_errors() {
  const auto x = torch::ones({2, 3}), gradient = torch::ones({2, 3}).requires_grad_();
  const std::function<void()> calls[]{
      [&] { omniattn::rms_norm(Tensor()); },
      [&] { omniattn::linear(gradient, Tensor()); },
      [&] { omniattn::call("norm", {x}); },
      [&] { omniattn::call("nothing", {x}); },
  };
  for (const auto& call : calls) {
    try {
      call();
      std::cout << "no error\n";
    } catch (const c10::Error& error) {
      std::cout << error.what_without_backtrace() << '\n';
    }
  }
}

}  // namespace

int main(int count, char** paths) {
  omniattn::load(paths[1]);
  if (count == 2) {
    print_errors();
    return 0;
  }
  c10::Dict<c10::IValue, c10::IValue> results(c10::StringType::get(), c10::TensorType::get());
  for (const auto& entry : torch::pickle_load(read(paths[2])).toGenericDict()) {
    Inputs inputs;
    for (const auto& tensor : entry.value().toGenericDict()) {
      Tensor t = tensor.value().toTensor().clone();  // entries share some
      const auto name = tensor.key().toStringRef();
      const bool is_fixed = name == "cos" || name == "sin" || !t.is_floating_point();
      inputs[name] = is_fixed ? t : t.set_requires_grad(true);
    }
    const auto name = entry.key().toStringRef();
    const Tensor y = kFunctions.at(name)(inputs);
    (y.square().sum() / 2).backward();
    results.insert(name, y.detach());
    for (const auto& [argument, t] : inputs) {
      if (t.requires_grad()) results.insert(name + " " + argument, t.grad());
    }
  }
  const auto bytes = torch::pickle_save(results);
  std::ofstream(paths[3], std::ios::binary).write(bytes.data(), static_cast<int64_t>(bytes.size()));
}
