// Trains a small language model in C++: token i is followed by 3 i + 1 modulo the vocabulary.
#include <omniattn.h>
#include <torch/torch.h>

#include <iostream>

namespace {

constexpr int64_t kVocabulary = 32, kDim = 32, kHeads = 2, kLength = 16, kBatch = 8;

struct Block : torch::nn::Module {
  torch::Tensor norm = register_parameter("norm", torch::ones(kDim));
  torch::Tensor mlp_norm = register_parameter("mlp_norm", torch::ones(kDim));
  torch::nn::Linear qkv{register_module("qkv", torch::nn::Linear(kDim, 3 * kDim))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(kDim, kDim))};
  torch::nn::Linear up{register_module("up", torch::nn::Linear(kDim, 4 * kDim))};
  torch::nn::Linear down{register_module("down", torch::nn::Linear(2 * kDim, kDim))};
  torch::Tensor cos, sin;

  Block() {
    const int64_t half = kDim / kHeads / 2;
    const auto rates = torch::pow(10000.0, -torch::arange(half) / static_cast<double>(half));
    const auto angles = torch::outer(torch::arange(kLength), rates);
    cos = register_buffer("cos", angles.cos());
    sin = register_buffer("sin", angles.sin());
  }

  torch::Tensor forward(torch::Tensor x) {
    const auto heads = qkv(omniattn::rms_norm(x, norm)).unflatten(-1, {3, kHeads, kDim / kHeads});
    const auto q = omniattn::rotary(heads.select(2, 0), cos, sin);
    const auto k = omniattn::rotary(heads.select(2, 1), cos, sin);
    const auto [o, lse] = omniattn::attention(q, k, heads.select(2, 2), {.causal = true});
    x = x + out(o.flatten(2));
    return x + down(omniattn::swiglu(up(omniattn::rms_norm(x, mlp_norm))));
  }
};

}  // namespace

int main(int, char** paths) {  // the library of kernels
  omniattn::load(paths[1]);
  torch::manual_seed(0);
  torch::nn::Embedding embedding(kVocabulary, kDim);
  Block block;
  torch::nn::Linear head(kDim, kVocabulary);
  std::vector<torch::Tensor> parameters = block.parameters();
  for (const auto& parameter : embedding->parameters()) parameters.push_back(parameter);
  for (const auto& parameter : head->parameters()) parameters.push_back(parameter);
  torch::optim::AdamW optimizer(parameters, 1e-2);
  for (int step = 0; step <= 100; ++step) {
    auto token = torch::randint(kVocabulary, {kBatch});
    std::vector<torch::Tensor> row{token};
    while (row.size() <= kLength) row.push_back((3 * row.back() + 1) % kVocabulary);
    const auto tokens = torch::stack(row, 1);
    const auto logits = head(block.forward(embedding(tokens.slice(1, 0, kLength))));
    const auto loss = omniattn::cross_entropy(logits, tokens.slice(1, 1));
    if (step % 50 == 0) std::cout << "step " << step << " loss " << loss.item<double>() << '\n';
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
  }
}
