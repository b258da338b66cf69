"""Folders of flash-linear-attention's models load without fla, against compat's layers of fla."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as nnf

from omniattn.compat import fla
from omniattn.models import CheckpointError, from_hf

SIZES = dict(hidden_size=16, num_hidden_layers=2, vocab_size=11, intermediate_size=24)
HEADS = dict(num_heads=2, head_dim=4, num_v_heads=4)
GROUPS = dict(num_heads=4, num_kv_heads=2)
#: model_type -> options of the config, layer, options that both have.
KINDS = {
    "gla": (fla.GatedLinearAttention, dict(num_heads=2, use_short_conv=True, conv_size=3)),
    "retnet": (fla.MultiScaleRetention, dict(num_heads=2, expand_v=1.0)),
    "delta_net": (fla.DeltaNet, dict(num_heads=4, use_gate=True, allow_neg_eigval=True)),
    "gated_deltanet": (fla.GatedDeltaNet, dict(**HEADS, expand_v=0.5)),
    "kda": (fla.KimiDeltaAttention, dict(**HEADS, lower_bound=-4.0)),
    "gsa": (fla.GatedSlotAttention, dict(num_heads=2, num_slots=5, use_short_conv=True)),
    "abc": (fla.ABCAttention, dict(num_heads=2, num_slots=5, clamp_min=-1.0, clamp_max=1.0)),
    "raven": (
        fla.Raven,
        dict(num_heads=2, num_slots=5, topk=2, use_rope=True, add_gumbel_noise=False),
    ),
    "lightnet": (fla.LightNetAttention, dict(expand_ratio=8, gate_low_rank_dim=3)),
    "hgrn2": (fla.HGRN2Attention, dict(expand_ratio=8, use_short_conv=True)),
    "hgrn": (fla.HGRNAttention, dict(expand_ratio=1, use_short_conv=True)),
    "comba": (fla.Comba, dict(**HEADS, expand_v=1.5)),
    "gated_deltaproduct": (
        fla.GatedDeltaProduct,
        dict(
            **HEADS, expand_v=1.5, use_forget_gate=True, num_householder=3, allow_neg_eigval=False
        ),
    ),
    "transformer": (
        fla.Attention, dict(**GROUPS, qkv_bias=True, qk_norm=True, window_size=4, rope_theta=500.0)
    ),
    "forgetting_transformer": (
        fla.ForgettingAttention, dict(**GROUPS, qkv_bias=True, use_output_gate=True)
    ),
    "path_attn": (fla.PaTHAttention, dict(**GROUPS)),
    "rwkv6": (
        fla.RWKV6Attention,
        dict(num_heads=2, expand_k=1.0, proj_low_rank_dim=3, gate_low_rank_dim=5),
    ),
    "rwkv7": (fla.RWKV7Attention, dict(head_dim=4, decay_low_rank_dim=3, v_low_rank_dim=5)),
}  # fmt: skip
RWKV = ("rwkv6", "rwkv7")
#: Layers whose norms have their own epsilon, 1e-5.
OWN_EPSILON = ("transformer", "forgetting_transformer", "path_attn")
BOUNDED = ("hgrn", "hgrn2")


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x):
        return nnf.rms_norm(x, (16,), self.weight, 1e-6)


class Block(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.attn_norm, self.attn, self.mlp_norm = Norm(), layer, Norm()
        self.mlp = nn.ModuleDict(
            {n: nn.Linear(*s, bias=False) for n, s in
             (("gate_proj", (16, 24)), ("up_proj", (16, 24)), ("down_proj", (24, 16)))}
        )  # fmt: skip

    def forward(self, x, **bounds):
        x = x + self.attn(self.attn_norm(x), **bounds)[0]
        y, m = self.mlp_norm(x), self.mlp
        return x + m["down_proj"](nnf.silu(m["gate_proj"](y)) * m["up_proj"](y))


class ChannelMix(nn.Module):
    """Feed-forward layer of RWKV: of RWKV-6 with a gate."""

    def __init__(self, gated):
        super().__init__()
        self.value = nn.Linear(24, 16, bias=False)
        if gated:
            self.key, self.receptance = fla.LerpLinear(16, 24), fla.LerpLinear(16, 16)
        else:
            self.x_k, self.key = nn.Parameter(torch.rand(16)), nn.Linear(16, 24, bias=False)

    def forward(self, x):
        delta = fla.token_shift(x)
        if hasattr(self, "receptance"):
            y = self.value(self.key(x, delta).relu() ** 2)
            return self.receptance(x, delta).sigmoid() * y
        return self.value(self.key(x + delta * self.x_k).relu() ** 2)


class RWKVBlock(nn.Module):
    def __init__(self, layer, kind):
        super().__init__()
        if layer.layer_idx == 0:
            self.pre_norm = nn.LayerNorm(16, 1e-6)
        self.attn_norm, self.attn = nn.LayerNorm(16, 1e-6), layer
        self.ffn_norm, self.ffn = nn.LayerNorm(16, 1e-6), ChannelMix(kind == "rwkv6")

    def forward(self, x, shared):
        x = self.pre_norm(x) if hasattr(self, "pre_norm") else x
        y, _, _, *values = self.attn(self.attn_norm(x), **shared)
        if values:
            shared["v_first"] = values[0]
        x = x + y
        return x + self.ffn(self.ffn_norm(x))


class Theirs(nn.Module):
    """Language model with fla's names."""

    def __init__(self, kind):
        super().__init__()
        layer, options = KINDS[kind]
        self.model = nn.Module()
        self.model.embeddings = nn.Embedding(11, 16)
        eps = {} if kind in OWN_EPSILON else {"norm_eps": 1e-6}
        layers = (layer(hidden_size=16, layer_idx=n, **eps, **options) for n in range(2))
        if kind in RWKV:
            self.model.layers = nn.ModuleList(RWKVBlock(each, kind) for each in layers)
            self.model.norm = nn.LayerNorm(16, 1e-6)
        else:
            self.model.layers = nn.ModuleList(Block(each) for each in layers)
            self.model.norm = Norm()
        if kind in BOUNDED:
            self.model.lower_bounds = nn.Parameter(torch.randn(2, 16))
        self.lm_head = nn.Linear(16, 11, bias=False)

    def forward(self, tokens):
        x = self.model.embeddings(tokens)
        shared, bounds = {}, None
        if hasattr(self.model, "lower_bounds"):
            shares = self.model.lower_bounds.softmax(0)
            bounds = shares.cumsum(0) - shares[0]
        for n, block in enumerate(self.model.layers):
            if isinstance(block, RWKVBlock):
                x = block(x, shared)
            else:
                x = block(x) if bounds is None else block(x, lower_bound=bounds[n])
        return self.lm_head(self.model.norm(x))


def saved(folder, kind, **changes):
    torch.manual_seed(0)
    model = Theirs(kind)
    with torch.no_grad():
        for parameter in model.parameters():  # some are 0 at first
            parameter += 0.1 * torch.randn_like(parameter)
    options = {**SIZES, "norm_eps": 1e-6, **KINDS[kind][1], **changes}
    config = {"model_type": kind, **options}
    if kind == "rwkv7":  # ranks of which the layer has other defaults
        attn = model.model.layers[0].attn
        ranks = {f"{part}_low_rank_dim": getattr(attn, f"{part}_low_rank_dim") for part in "a"}
        config |= ranks | {"gate_low_rank_dim": attn.gate_low_rank_dim}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(model.state_dict(), folder / "model.safetensors")
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_folders_of_fla_are_its_models(kind, tmp_path):
    theirs, tokens = saved(tmp_path, kind), torch.randint(11, (2, 6))
    ours = from_hf(tmp_path)
    assert not ours.training
    torch.testing.assert_close(ours(tokens), theirs(tokens))


class Backbone(nn.Module):
    """Language model of Mamba-3 with fla's names."""

    def __init__(self, **options):
        super().__init__()
        parts = {"embeddings": nn.Embedding(11, 16), "norm_f": Norm()}
        layers = (fla.Mamba3(16, layer_idx=n, norm_eps=1e-6, **options) for n in range(2))
        blocks = (nn.ModuleDict({"norm": Norm(), "mixer": layer}) for layer in layers)
        self.backbone = nn.ModuleDict({**parts, "layers": nn.ModuleList(blocks)})
        self.lm_head = nn.Linear(16, 11, bias=False)

    def forward(self, tokens):
        x = self.backbone["embeddings"](tokens)
        for block in self.backbone["layers"]:
            x = x + block["mixer"](block["norm"](x))[0]
        return self.lm_head(self.backbone["norm_f"](x))


@pytest.mark.parametrize("more", [{}, {"is_mimo": True, "mimo_rank": 2, "is_outproj_norm": True}])
def test_folders_of_mamba_3_are_fla_s_models(more, tmp_path):
    torch.manual_seed(0)
    options = {"state_size": 8, "head_dim": 8, **more}
    theirs, tokens = Backbone(**options), torch.randint(11, (2, 6))
    config = {**SIZES, "norm_eps": 1e-6, "hidden_act": "silu", "model_type": "mamba3", **options}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    torch.testing.assert_close(from_hf(tmp_path)(tokens), theirs(tokens))


def test_errors_of_folders_of_fla(tmp_path):
    saved(tmp_path, "gla", clamp_min=-1.0)
    with pytest.raises(NotImplementedError, match=r"clamp_min must be None .* got clamp_min=-1\.0"):
        from_hf(tmp_path)
    saved(tmp_path, "abc", clamp_min=-2.0)
    with pytest.raises(NotImplementedError, match="clamp_min must be -clamp_max"):
        from_hf(tmp_path)
    saved(tmp_path, "gla", num_kv_heads=1)
    with pytest.raises(NotImplementedError, match="num_kv_heads must be num_heads"):
        from_hf(tmp_path)
    saved(tmp_path, "hgrn2", use_lower_bound=False)
    with pytest.raises(CheckpointError, match=r"unknown: layers\.0\.mixer\.lower_bounds"):
        from_hf(tmp_path)
    saved(tmp_path, "path_attn", use_forget_gate=True)
    with pytest.raises(NotImplementedError, match="use_forget_gate must be False"):
        from_hf(tmp_path)
    saved(tmp_path, "rwkv7", value_dim=[16, 32])
    with pytest.raises(NotImplementedError, match="value_dim must be hidden_size"):
        from_hf(tmp_path)
    saved(tmp_path, "gla", intermediate_size=25)
    with pytest.raises(CheckpointError, match=r"of another shape: layers\.0\.mlp"):
        from_hf(tmp_path)
    saved(tmp_path, "gla", num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"weights in .* are missing: layers\.2"):
        from_hf(tmp_path)
