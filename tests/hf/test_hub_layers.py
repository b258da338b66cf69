"""Layers for the `kernels` package: each computes what the layer of its name computes."""

import importlib
from types import MethodType

import peft
import pytest
import torch
import transformers as hf
from torch import nn

from omniattn.hf import kernel_mapping

LLAMA = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2, "vocab_size": 50}
GPT_OSS = {
    **LLAMA,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
}


def make(path, *arguments):
    module, kind = path.split(".")
    models = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    return getattr(models, kind)(*arguments)


def gpt_oss():
    config = hf.GptOssConfig(**GPT_OSS)
    config._experts_implementation = "eager"
    return make("gpt_oss.GptOssMLP", config)


def router():
    config = hf.Qwen3_5MoeTextConfig(hidden_size=24, num_experts=6, num_experts_per_tok=2)
    return make("qwen3_5_moe.Qwen3_5MoeTopKRouter", config)


#: Name of a layer -> (a module that transformers has by that name, its inputs (3, 5, 24)).
MODULES = {
    "RMSNorm": (lambda: make("llama.LlamaRMSNorm", 24), 1),
    "RMSNormZeroCentered": (lambda: make("qwen3_5.Qwen3_5RMSNorm", 24), 1),
    "RMSNormGated": (lambda: make("qwen3_next.Qwen3NextRMSNormGated", 24), 2),
    "SwiGLUMLP": (lambda: make("llama.LlamaMLP", hf.LlamaConfig(**LLAMA)), 1),
    "MegaBlocksMoeMLP": (gpt_oss, 1),
    "SoftmaxTopKRouter": (router, 1),
}


def outputs_and_gradients(module, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = module(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum(o.sin().sum() for o in outputs if o.is_floating_point())
    return [*outputs, *torch.autograd.grad(loss, [*leaves, *module.parameters()])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "norm", ["qwen3_next.Qwen3NextRMSNormGated", "kimi_linear.KimiLinearRMSNormGated"]
)
def test_gated_norms_go_by_their_activation(norm, dtype):
    module, x = make(norm, 24).to(dtype), torch.randn(2, 200, 24, dtype=dtype)
    nn.init.normal_(module.weight)
    expected = module(*x)
    actual = kernel_mapping()["RMSNormGated"]["cpu"].load().forward(module, *x)
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-4)
    if dtype == torch.bfloat16:
        assert (actual != expected).double().mean() < 2e-3


@pytest.mark.parametrize("name", MODULES)
def test_layer_computes_what_the_module_computes(name):
    torch.manual_seed(0)
    new, count = MODULES[name]
    module, inputs = new(), torch.randn(count, 3, 5, 24).unbind(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    expected = outputs_and_gradients(module, inputs)
    layer = kernel_mapping()[name]["cpu"].load()
    module.forward = MethodType(layer.forward, module)  # as kernelize does
    for a, e in zip(outputs_and_gradients(module, inputs), expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", ["adapter", "hook", "instance"])
def test_projections_that_are_more_than_a_weight_are_called(change):
    module, x = MODULES["SwiGLUMLP"][0](), torch.randn(3, 24)
    if change == "adapter":
        config = peft.LoraConfig(target_modules=["up_proj"], init_lora_weights=False)
        peft.inject_adapter_in_model(config, module)
    elif change == "hook":
        module.up_proj.register_forward_hook(lambda module, inputs, output: 2 * output)
    else:
        module.up_proj.forward = lambda x: nn.Linear.forward(module.up_proj, x) + 1
    expected = module(x)
    actual = kernel_mapping()["SwiGLUMLP"]["cpu"].load().forward(module, x)
    torch.testing.assert_close(actual, expected)


def test_every_layer_is_tested():
    assert set(MODULES) == set(kernel_mapping())


def test_kernelize_takes_the_layers():
    kernels = pytest.importorskip("kernels")

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(new() for new, _ in MODULES.values())

    model = Block()
    for name, part in zip(MODULES, model.parts, strict=True):
        kernels.replace_kernel_forward_from_hub(type(part), name)
    try:
        with kernels.use_kernel_mapping(kernel_mapping()):
            kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu", use_fallback=False)
        for name, part in zip(MODULES, model.parts, strict=True):
            assert part.forward.__func__ is kernel_mapping()[name]["cpu"].load().forward
    finally:
        for part in model.parts:
            del type(part).kernel_layer_name, type(part).kernel_condition
