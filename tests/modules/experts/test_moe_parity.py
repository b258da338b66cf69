"""MoE layers compute the same as transformers'."""

import pytest
import torch
import transformers as hf
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.mixtral.modeling_mixtral import (
    MixtralSparseMoeBlock,
    load_balancing_loss_func,
)
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersSparseMLP,
)

import omniattn.functional as F
from omniattn.modules import MoE

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_EAGER = {"experts_implementation": "eager"}
_QWEN = {"hidden_size": 24, "moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 3}


def mixtral():
    config = hf.MixtralConfig(
        hidden_size=24, intermediate_size=20, num_local_experts=6, num_experts_per_tok=2, **_EAGER
    )
    return MixtralSparseMoeBlock(config), MoE.Config.mixtral(24, 20, 6, 2)


def qwen2():
    config = hf.Qwen2MoeConfig(**_QWEN, shared_expert_intermediate_size=28, **_EAGER)
    return Qwen2MoeSparseMoeBlock(config), MoE.Config.qwen2_moe(24, 20, 6, 3, 28)


def qwen3():
    config = hf.Qwen3MoeConfig(**_QWEN, norm_topk_prob=True, **_EAGER)
    return Qwen3MoeSparseMoeBlock(config), MoE.Config.mixtral(24, 20, 6, 3)


_DEEPSEEK = {
    "hidden_size": 24,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
}


def deepseek_v2():
    config = hf.DeepseekV2Config(
        **_DEEPSEEK,
        num_attention_heads=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=16.0,
        **_EAGER,
    )
    ours = MoE.Config.deepseek_v2(24, 20, 8, 3, shared=2, groups=4, top_groups=2)
    return DeepseekV2Moe(config), ours


def deepseek_v3():
    config = hf.DeepseekV3Config(**_DEEPSEEK, routed_scaling_factor=2.5, **_EAGER)
    ours = MoE.Config.deepseek_v3(24, 20, 8, 3, shared=2, groups=4, top_groups=2)
    return DeepseekV3MoE(config), ours


@pytest.mark.parametrize("make", [mixtral, qwen2, qwen3, deepseek_v2, deepseek_v3])
def test_parity_with_transformers(make):
    torch.manual_seed(0)
    theirs, config = make()
    for tensor in (*theirs.parameters(), *theirs.buffers()):
        torch.nn.init.normal_(tensor, std=0.3)
    ours = MoE(config)
    state = {
        n.replace("shared_expert.", "shared_experts."): t for n, t in theirs.state_dict().items()
    }
    ours.load_state_dict(state)
    x = torch.randn(2, 17, 24)
    results = []
    for layer in (theirs, ours):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        parameters = dict(layer.named_parameters())
        names = sorted(parameters, key=lambda n: n.replace("shared_expert.", "shared_experts."))
        leaves = [leaf, *(parameters[n] for n in names)]
        results.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.detach().abs().max().item())


def test_llama4_is_that_of_transformers():
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_local_experts": 6}
    theirs = Llama4TextMoe(hf.Llama4TextConfig(**sizes, num_experts_per_tok=1))
    ours = MoE(MoE.Config.llama4(24, 20, 6))
    for tensor in theirs.parameters():
        torch.nn.init.normal_(tensor, std=0.3)
    names = {"router.weight": "gate.weight"}
    names |= {f"shared_expert.{n}.weight": f"shared_experts.{n}.weight" for n in PROJECTIONS}
    names |= {f"experts.{n}": f"experts.{n}" for n in ("gate_up_proj", "down_proj")}
    stacked = {n: t.mT if n.startswith("experts") else t for n, t in theirs.state_dict().items()}
    ours.load_state_dict({names[n]: t for n, t in stacked.items()})
    x = torch.randn(2, 17, 24)
    results = []
    for layer, order in ((theirs, list(names)), (ours, list(names.values()))):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y = (y[0] if layer is theirs else y).view(2, 17, 24)
        parameters = dict(layer.named_parameters())
        leaves = [leaf, *(parameters[n] for n in order)]
        dx, *grads = torch.autograd.grad(y.square().sum(), leaves)
        if layer is theirs:
            grads = [
                g.mT if n.startswith("experts") else g for n, g in zip(names, grads, strict=True)
            ]
        results.append((y, dx, *grads))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.detach().abs().max().item())


def test_switch_is_that_of_transformers_with_its_drops():
    torch.manual_seed(0)
    capacity = F.expert_capacity(17, 6, 1, 1.25)
    options = {"num_experts": 6, "expert_capacity": capacity}
    config = hf.SwitchTransformersConfig(d_model=24, d_ff=20, **options)
    theirs = SwitchTransformersSparseMLP(config).double().eval()
    theirs.router.dtype = torch.float64
    room = {"capacity_factor": None, "capacity": capacity, "capacity_per_sequence": True}
    ours = MoE(MoE.Config.switch(24, 20, 6, capacity_at_eval=True, **room)).double().eval()
    for tensor in theirs.parameters():
        torch.nn.init.normal_(tensor, std=0.3)
    each = theirs.experts.values()
    gates = {ours.gate.weight: [theirs.router.classifier.weight]}
    weights = {
        ours.experts.gate_up_proj: [e.wi.weight for e in each],
        ours.experts.down_proj: [e.wo.weight for e in each],
    }
    with torch.no_grad():
        for mine, parts in (gates | weights).items():
            mine.copy_(torch.stack(list(parts)).view_as(mine))
    x = torch.randn(3, 17, 24, dtype=torch.float64)
    y, expected = ours(x), theirs(x)
    assert ours.state.dropped > 0
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    for mine, parts in (gates | weights).items():
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parts]
        torch.testing.assert_close(mine.grad, torch.stack(grads).view_as(mine))


def test_balance_loss_is_that_of_transformers():
    config = MoE.Config.mixtral(24, 20, 6, 2, balance_coefficient=1.0)
    layer, x = MoE(config), torch.randn(30, 24)
    layer(x)
    expected = load_balancing_loss_func((layer.gate(x)[0],), 6, 2)
    torch.testing.assert_close(layer.state.balance_loss, expected)
    grad = torch.autograd.grad(layer.state.balance_loss, layer.gate.weight)[0]
    assert grad.abs().sum() > 0
    layer.eval()(x)
    torch.testing.assert_close(layer.state.balance_loss, expected)
    with torch.no_grad():
        layer(x)
    assert layer.state.balance_loss == 0  # inference does not compute it
