"""MoE layers: parity with transformers' blocks, losses, capacity, masks, bias updates."""

import copy
import dataclasses
import pickle

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


def test_default_vectors_move_in_training_and_teach_the_router():
    torch.manual_seed(0)
    config = MoE.Config(8, 6, experts=5, top_k=2, router_grad="default_vector", init_std=0.5)
    layer, x = MoE(config), torch.randn(30, 8)
    plain = MoE(dataclasses.replace(config, router_grad="ste"))
    plain.load_state_dict(layer.state_dict(), strict=False)
    torch.testing.assert_close(layer(x), plain(x))
    assert (layer.experts.default_vectors.abs().sum(-1) > 0).all()
    gradients = []
    for each in (layer, plain):
        each(x).square().sum().backward()
        gradients.append(each.gate.weight.grad)
    assert not torch.allclose(*gradients, rtol=1e-2)
    before = layer.experts.default_vectors.clone()
    layer.eval()(x)
    assert torch.equal(layer.experts.default_vectors, before)
    with pytest.raises(ValueError, match="router_grad must be exact but for"):
        dataclasses.replace(config, router="sigmoid")


def test_switch_is_that_of_transformers_with_its_drops():
    torch.manual_seed(0)
    options = {"num_experts": 6, "expert_capacity": F.expert_capacity(17, 6, 1, 1.25)}
    theirs = SwitchTransformersSparseMLP(
        hf.SwitchTransformersConfig(d_model=24, d_ff=20, **options)
    ).eval()
    config = dataclasses.replace(MoE.Config.switch(24, 20, 6), capacity_at_eval=True)
    ours = MoE(config).eval()
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
    x = torch.randn(1, 17, 24)  # one sequence: theirs have a capacity each
    y, expected = ours(x), theirs(x)
    assert ours.state.dropped > 0
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    for mine, parts in (gates | weights).items():
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parts]
        torch.testing.assert_close(mine.grad, torch.stack(grads).view_as(mine))


def test_balance_loss_is_that_of_transformers():
    config = dataclasses.replace(MoE.Config.mixtral(24, 20, 6, 2), balance_coefficient=1.0)
    layer, x = MoE(config), torch.randn(30, 24)
    layer(x)
    expected = load_balancing_loss_func((layer.gate(x)[0],), 6, 2)
    torch.testing.assert_close(layer.state.balance_loss, expected)
    grad = torch.autograd.grad(layer.state.balance_loss, layer.gate.weight)[0]
    assert grad.abs().sum() > 0


def test_switch_layer_drops_over_capacity_in_training_only():
    torch.manual_seed(0)
    layer, x = MoE(MoE.Config.switch(16, 24, 4)), torch.randn(2, 20, 16)
    layer.gate.weight.data[0] += 1  # expert 0 becomes popular with some
    y = layer(x)
    state = layer.state
    capacity = F.expert_capacity(40, 4, 1, 1.25)
    assert (
        state.counts.sum() == 40 and state.dropped == (state.counts - capacity).clamp(min=0).sum()
    )
    assert state.dropped > 0
    assert torch.equal((y == 0).all(-1), state.experts[..., 0] < 0)
    layer.eval()(x)
    assert layer.state.dropped == 0


def test_padding_goes_to_no_expert():
    torch.manual_seed(0)
    config = dataclasses.replace(
        MoE.Config.deepseek_v3(16, 24, 8, 2, groups=4, top_groups=2), z_coefficient=1.0
    )
    layer, x = MoE(config), torch.randn(2, 9, 16)
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    y = layer(x, mask)
    state = layer.state
    assert state.counts.sum() == 2 * 14
    torch.testing.assert_close(y[~mask], layer.shared_experts(x)[~mask])
    z = F.router_z_loss(layer.gate(x)[0][mask])
    torch.testing.assert_close(state.z_loss, z)
    x[~mask] = 1e3
    torch.testing.assert_close(layer(x, mask)[mask], y[mask])
    torch.testing.assert_close(layer.state.balance_loss, state.balance_loss)
    torch.testing.assert_close(layer.state.entropy, state.entropy)


@pytest.mark.parametrize("router", ["softmax", "sigmoid", "noisy", "llama4", "expert_choice"])
def test_no_tokens_and_none_but_padding(router):
    balance = "deepseek_v3" if router == "sigmoid" else "switch"
    config = MoE.Config(
        12, 16, 6, 2, router=router, capacity_factor=2.0, balance=balance, balance_coefficient=0.1
    )
    layer = MoE(config)
    for tokens in (0, 3):
        x = torch.randn(2, tokens, 12, requires_grad=True)
        y = layer(x, torch.zeros(2, tokens, dtype=torch.bool))
        assert y.shape == x.shape and not y.any()
        assert layer.state.entropy == 0 and layer.state.balance_loss == 0
        (y.sum() + layer.state.balance_loss).backward()


def test_bias_update_evens_out_the_load():
    torch.manual_seed(0)
    layer = MoE(MoE.Config.deepseek_v3(16, 8, 8, 2, groups=1, top_groups=1))
    layer.gate.weight.data.mul_(20)
    layer.gate.weight.data[0] *= 0
    x = torch.randn(200, 16)
    spread = []
    for _ in range(60):
        layer(x)
        spread.append(layer.state.counts.double().std().item())
        layer.update_bias(8e-3)
    assert spread[-1] < 0.3 * spread[0]


def test_bias_update_by_the_counts_of_several_forwards():
    torch.manual_seed(0)
    config = MoE.Config.deepseek_v3(16, 8, 8, 2, groups=1, top_groups=1)
    whole, parts = MoE(config), MoE(config)
    parts.load_state_dict(whole.state_dict())
    x = torch.randn(30, 16)
    whole(x)
    whole.update_bias()
    counts = 0
    for part in x.split(10):
        parts(part)
        counts = counts + parts.state.counts
    parts.update_bias(counts=counts)
    assert torch.equal(parts.gate.e_score_correction_bias, whole.gate.e_score_correction_bias)


@pytest.mark.parametrize("router", ["softmax", "sigmoid", "noisy", "expert_choice"])
def test_every_router_trains(router):
    torch.manual_seed(0)
    config = MoE.Config(12, 16, 6, 2, router=router, capacity_factor=2.0, balance_coefficient=0.1)
    layer = MoE(config).double()
    x = torch.randn(3, 10, 12, dtype=torch.float64)
    target = torch.randn(3, 10, 12, dtype=torch.float64)
    optimizer = torch.optim.Adam(layer.parameters(), 5e-2)
    losses = []
    for _ in range(15):
        loss = (layer(x) - target).square().mean() + layer.state.balance_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_copies_between_forward_and_backward():
    layer = MoE(MoE.Config.mixtral(8, 16, experts=4)).train()
    x = torch.randn(2, 3, 8)
    y = layer(x)
    for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert same.state is None
        torch.testing.assert_close(same(x), y, rtol=0, atol=0)
    (y.sum() + layer.state.balance_loss).backward()


def test_half_precision_and_autocast():
    torch.manual_seed(0)
    layer, x = MoE(MoE.Config.mixtral(16, 24, 4)), torch.randn(2, 5, 16)
    y = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    low = MoE(layer.config, dtype=torch.bfloat16)
    low.load_state_dict(layer.state_dict())
    torch.testing.assert_close(low(x.bfloat16()).float(), y, rtol=0.1, atol=3e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 5}, r"top_k must be in \[1, experts\]"),
        ({"router": "hash"}, "router must be one of softmax"),
        ({"activation": "tanh"}, "activation must be one of swiglu"),
        ({"balance": "gini"}, "balance must be one of switch"),
        ({"router": "expert_choice"}, "needs a capacity_factor"),
        ({"capacity_factor": -1.0}, "capacity_factor must be >= 0"),
    ],
)
def test_bad_config(change, message):
    with pytest.raises(ValueError, match=message):
        MoE.Config(**({"dim": 8, "hidden_dim": 8, "experts": 4, "top_k": 2} | change))


def test_renormalised_top_1_warns():
    with pytest.warns(UserWarning, match="weight 1 to every token"):
        MoE.Config(8, 8, 4, 1)
