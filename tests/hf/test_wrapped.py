"""Patched models in wrappers, with adapters, sharded, parametrised and quantised."""

import copy

import peft
import pytest
import torch
from patched_models import MODELS, check, messages
from torch import nn
from torch.ao.quantization import quantize_dynamic
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import omniattn.hf

WRAPPERS = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "ddp": nn.parallel.DistributedDataParallel,
    "compiled ddp": lambda model: torch.compile(
        nn.parallel.DistributedDataParallel(model), backend="eager"
    ),
    "dp": nn.DataParallel,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_models(wrapper, one_process):
    check(WRAPPERS[wrapper](MODELS["llama"][0]()))


@pytest.mark.parametrize("wrapper", ["linear", "other"])
def test_what_is_no_model_inside_is_refused(wrapper):
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="must be a PreTrainedModel, got"):
        omniattn.hf.patch(nn.DataParallel(model) if wrapper == "other" else model)


@pytest.mark.parametrize("first", ["adapters", "patch"])
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_act(dora, first):
    """Each linear gets an adapter that starts with a random value; all MLPs are patched."""
    config = peft.LoraConfig(
        target_modules="all-linear", use_dora=dora, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = MODELS["llama"][0]()
    if first == "adapters":
        check(peft.get_peft_model(model, config), linear=1 + 3 * 14)
        return
    x = torch.randint(3, 97, (2, 9))
    plain = model(input_ids=x).logits
    omniattn.hf.patch(model)
    model = peft.get_peft_model(model, config)
    patched = model(input_ids=x).logits
    omniattn.hf.unpatch(model)
    expected = model(input_ids=x).logits
    torch.testing.assert_close(patched, expected, rtol=1e-4, atol=1e-5)
    assert (expected - plain).abs().max() > 0.1


def test_merged_adapters_stay_patched():
    model = peft.get_peft_model(
        MODELS["llama"][0](), peft.LoraConfig(target_modules=["gate_proj"], init_lora_weights=False)
    )
    x = torch.randint(3, 97, (2, 9))
    expected = model(input_ids=x).logits
    omniattn.hf.patch(model)
    merged = model.merge_and_unload()
    assert hasattr(type(merged.model.layers[0].mlp.gate_proj), "omniattn_original")
    torch.testing.assert_close(merged(x).logits, expected, rtol=1e-4, atol=1e-5)


def shard(model: nn.Module, each: bool) -> None:
    """FSDP2 by layer, or by each linear, norm and MLP."""
    for layer in model.model.layers:
        if each:
            inner = [m for m in layer.modules() if type(m).__name__.endswith(("Linear", "RMSNorm"))]
            for module in (*inner, layer.mlp):
                fully_shard(module)
        fully_shard(layer)
    fully_shard(model)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_sharded_models(name, each, one_process):
    make, swapped = MODELS[name]
    model = make()
    late = copy.deepcopy(model)
    x = torch.randint(3, 97, (2, 9))
    expected = model(x, labels=x).logits
    shard(model, each)
    classes = [type(module) for module in model.modules()]
    assert omniattn.hf.patch(model) == swapped
    assert omniattn.hf.patch(late) == swapped
    shard(late, each)
    for sharded in (model, late):
        output = sharded(x, labels=x, skip_logits=False)
        output.loss.backward()
        assert all(p.grad is not None for p in sharded.parameters())
        torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-5)
        omniattn.hf.unpatch(sharded)
        assert torch.equal(sharded(x, labels=x).logits, expected)
    assert [type(module) for module in model.modules()] == classes
    assert [type(m).__mro__[1:] for m in late.modules()] == [c.__mro__[1:] for c in classes]


def test_parametrised_models():
    model = MODELS["llama"][0]()
    omniattn.hf.patch(model)
    nn.utils.parametrizations.weight_norm(model.lm_head)
    omniattn.hf.unpatch(model)
    check(model)
    nn.utils.parametrize.remove_parametrizations(model.lm_head, "weight")
    assert type(model.lm_head) is nn.Linear


def test_weights_of_tensor_parallel_linears_stay(one_process, caplog):
    model = MODELS["llama"][0]()
    plan = {"model.layers.*.self_attn.q_proj": ColwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (1,)), plan)
    check(model, linear=13)
    warning = ("WARNING", "patch: linear: 2 Linear unchanged: its weight is a DTensor")
    assert messages(caplog) == [warning]


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_quantised_models():
    x = torch.randint(3, 97, (2, 9))
    for name, linears in (("llama", 15), ("t5", 19)):
        make, swapped = MODELS[name]
        model = make().eval()
        given = {"input_ids": x, "labels": x}
        quantised = quantize_dynamic(model, {nn.Linear})
        expected = quantised(**given).logits
        assert swapped["linear"] == linears
        without = {key: n for key, n in swapped.items() if key != "linear"}
        assert omniattn.hf.patch(quantised) == without
        torch.testing.assert_close(quantised(**given).logits, expected, rtol=1e-3, atol=1e-3)
        omniattn.hf.unpatch(quantised)
        assert torch.equal(quantised(**given).logits, expected)
        omniattn.hf.patch(model)
        with pytest.raises(RuntimeError, match="unpatch, quantise, and patch again"):
            quantize_dynamic(model, {nn.Linear})
        omniattn.hf.unpatch(model)
        assert torch.equal(quantize_dynamic(model, {nn.Linear})(**given).logits, expected)
