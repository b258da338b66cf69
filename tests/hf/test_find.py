"""Layers are recognised by what they compute; others stay, and the log says why."""

import copy
import inspect
import logging
from types import MethodType

import pytest
import torch
import transformers as hf
from patched_models import MODELS, messages
from torch import nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4MLP
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkTextInputScaledRMSNorm
from transformers.models.vitdet.modeling_vitdet import VitDetLayerNorm

import omniattn.hf
from omniattn.hf.attention.rotary import rotary_forward
from omniattn.hf.patching.find import FINDERS


def test_layers_that_compute_something_else_are_left_alone():
    class ScaledRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1.01 * nn.functional.rms_norm(x, (8,), self.weight, self.eps)

    class WeightlessRMSNorm(nn.Module):  # FalconMamba's
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.ones(8))
            self.eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.rms_norm(x, x.shape[-1:], None, self.eps)

    class DropoutMLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wi_0, self.wi_1, self.wo = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
            self.dropout = nn.Dropout(0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dropout(self.wo(nn.functional.silu(self.wi_0(x)) * self.wi_1(x)))

    class UpFirstMLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj, self.down_proj = nn.Linear(8, 32), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            up, gate = self.gate_up_proj(x).chunk(2, -1)
            return self.down_proj(nn.functional.silu(gate) * up)

    class AdaptedMLP(UpFirstMLP):
        def forward(self, x: torch.Tensor, layer: int) -> torch.Tensor:
            return layer * super().forward(x)

    class ChannelsLayerNorm(nn.LayerNorm):  # DINOv3's ConvNeXt
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    model = MODELS["llama"][0]()
    model.other_norms = nn.ModuleList([ScaledRMSNorm(), WeightlessRMSNorm(), ChannelsLayerNorm(8)])
    model.other_mlp = DropoutMLP().eval()
    model.more_mlps = nn.ModuleList([UpFirstMLP(), AdaptedMLP()])
    swapped = omniattn.hf.patch(model)
    assert (swapped["norm"], swapped["mlp"]) == (5, 2)
    assert not model.other_mlp.training
    with torch.device("meta"):
        empty = MODELS["llama"][0]()
    with pytest.raises(ValueError, match="meta"):
        omniattn.hf.patch(empty)


def test_parameters_at_their_initial_values_hide_nothing():
    """Weights of one and biases of zero, and activations too small for a clamp."""
    assert FINDERS["norm"](LlamaRMSNorm(24)).__name__ == "rms_norm_llama"
    config = hf.DeepseekV4Config(hidden_size=24, intermediate_size=40, moe_intermediate_size=40)
    layers = [VitDetLayerNorm(24), MuseSparkTextInputScaledRMSNorm(24)]
    for left in map(FINDERS["norm"], layers):
        assert left.reason == "it computes something else"
    left = FINDERS["mlp"](DeepseekV4MLP(config))
    assert left.reason == "it computes something else"


def test_rounding_is_the_layers_own_in_half_precision():
    norm = MODELS["llama"][0]()
    nn.init.normal_(norm.model.norm.weight)
    expected = copy.deepcopy(norm).bfloat16()
    omniattn.hf.patch(norm)
    x = torch.randn(50, 48, dtype=torch.bfloat16)
    different = norm.bfloat16().model.norm(x) != expected.model.norm(x)
    assert different.double().mean() < 2e-3


def test_rotary_calls_say_where_the_heads_are():
    from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTAttention
    from transformers.models.efficientloftr.modeling_efficientloftr import EfficientLoFTRAttention
    from transformers.models.pixtral.modeling_pixtral import PixtralAttention

    theirs = inspect.unwrap(EfficientLoFTRAttention.forward).__globals__["apply_rotary_pos_emb"]
    ours = inspect.unwrap(rotary_forward(EfficientLoFTRAttention)).__globals__[
        "apply_rotary_pos_emb"
    ]
    q, k, angles = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 2, 8), torch.randn(2, 3, 4)
    table = angles.repeat_interleave(2, -1)
    for a, e in zip(
        *(f(q, k, table.cos(), table.sin(), unsqueeze_dim=2) for f in (ours, theirs)), strict=True
    ):
        torch.testing.assert_close(a, e)
    left = rotary_forward(PixtralAttention)  # unsqueeze_dim=0
    assert left.reason == "it calls apply_rotary_pos_emb with arguments that ours does not have"
    left = rotary_forward(DINOv3ViTAttention)  # prefix tokens do not turn
    assert left.reason == "its apply_rotary_pos_emb computes something else"


def test_learned_rotary_tables_get_gradients():
    from transformers.models.lightglue.modeling_lightglue import LightGlueAttention

    theirs = inspect.unwrap(LightGlueAttention.forward).__globals__["apply_rotary_pos_emb"]
    ours = inspect.unwrap(rotary_forward(LightGlueAttention)).__globals__["apply_rotary_pos_emb"]
    q, k, angles = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.randn(2, 3, 4)
    angles.requires_grad_()
    table = angles.repeat_interleave(2, -1)
    results = [torch.cat(f(q, k, table.cos(), table.sin()), 1) for f in (ours, theirs)]
    torch.testing.assert_close(*results)
    weights = torch.randn_like(results[0])
    gradients = [torch.autograd.grad(r, angles, weights, retain_graph=True) for r in results]
    torch.testing.assert_close(*gradients)


SMALL = {"vocab_size": 97, "bos_token_id": 0, "eos_token_id": 0}

OWN_ATTENTION = {
    "GPTNeoSelfAttention": lambda: hf.GPTNeoForCausalLM(
        hf.GPTNeoConfig(
            **SMALL,
            hidden_size=48,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
        )
    ),
    None: lambda: hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=97, hidden_size=48, num_hidden_layers=2, state_size=4)
    ),
}


@pytest.mark.parametrize("kind", OWN_ATTENTION)
def test_models_that_compute_their_attention_say_so(kind, caplog):
    model = OWN_ATTENTION[kind]().eval()
    x = torch.randint(3, 97, (2, 9))
    expected, before = model(x).logits, model.config._attn_implementation
    swapped = omniattn.hf.patch(model)
    assert "attention" not in swapped and {"linear", "norm"} <= swapped.keys()
    reason = "it does not ask transformers' AttentionInterface"
    warning = ("WARNING", f"patch: attention: 2 {kind} unchanged: {reason}")
    assert messages(caplog) == ([warning] if kind else [])
    assert model.config._attn_implementation == before
    torch.testing.assert_close(model(x).logits, expected, rtol=1e-4, atol=1e-5)
    assert "attention" not in omniattn.hf.patch(OWN_ATTENTION[kind](), attention=False)
    assert messages(caplog) == []


def test_layers_left_alone_are_logged(caplog):
    class Scaled(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    caplog.set_level(logging.DEBUG, logger="omniattn")
    model = MODELS["mixtral"][0]()
    model.other = nn.ModuleList([type("ScaledLayerNorm", (Scaled,), {})(8) for _ in range(3)])
    model.lm_head.forward = MethodType(nn.Linear.forward, model.lm_head)
    model.mlp = MODELS["llama"][0]().model.layers[0].mlp
    hook = model.mlp.act_fn.register_forward_hook(lambda *_: None)
    model.model.layers[0].mlp.experts.act_fn = nn.Tanh()
    assert omniattn.hf.patch(model) == {
        "linear": 11, "norm": 5, "rope": 2, "loss": 1, "attention": 2
    }  # fmt: skip
    replaced = "its forward was replaced on the instance, as accelerate and kernelize do"
    tanh = "experts_forward: no kernel for the activation of MixtralExperts (Tanh)"
    hooked = "its activation has a hook, which would not be called"
    assert sorted(messages(caplog)) == [
        ("DEBUG", "patch: norm: 3 ScaledLayerNorm unchanged: it computes something else"),
        (
            "WARNING",
            f"patch: experts: 2 MixtralExperts unchanged: {tanh}; "
            'use experts_implementation="eager"',
        ),
        ("WARNING", f"patch: linear: 1 Linear unchanged: {replaced}"),
        (
            "WARNING",
            "patch: loss: 1 MixtralForCausalLM unchanged: it makes logits: its head is a "
            "torch.nn.modules.linear.Linear with a forward of its own",
        ),
        ("WARNING", f"patch: mlp: 1 LlamaMLP unchanged: {hooked}"),
    ]
    hook.remove()
    omniattn.hf.unpatch(model)
    assert omniattn.hf.patch(model)["mlp"] == 1
