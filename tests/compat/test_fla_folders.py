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
}


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

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))[0]
        y, m = self.mlp_norm(x), self.mlp
        return x + m["down_proj"](nnf.silu(m["gate_proj"](y)) * m["up_proj"](y))


class Theirs(nn.Module):
    """Language model with fla's names."""

    def __init__(self, kind):
        super().__init__()
        layer, options = KINDS[kind]
        self.model = nn.Module()
        self.model.embeddings = nn.Embedding(11, 16)
        layers = (layer(hidden_size=16, norm_eps=1e-6, **options) for _ in range(2))
        self.model.layers = nn.ModuleList(Block(each) for each in layers)
        self.model.norm = Norm()
        self.lm_head = nn.Linear(16, 11, bias=False)

    def forward(self, tokens):
        x = self.model.embeddings(tokens)
        for block in self.model.layers:
            x = block(x)
        return self.lm_head(self.model.norm(x))


def saved(folder, kind, **changes):
    torch.manual_seed(0)
    model = Theirs(kind)
    lower = {"use_lower_bound": False} if kind == "hgrn2" else {}
    config = {"model_type": kind, **SIZES, **KINDS[kind][1], **lower, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(model.state_dict(), folder / "model.safetensors")
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_folders_of_fla_are_its_models(kind, tmp_path):
    theirs, tokens = saved(tmp_path, kind), torch.randint(11, (2, 6))
    ours = from_hf(tmp_path)
    assert not ours.training
    torch.testing.assert_close(ours(tokens), theirs(tokens))


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
    saved(tmp_path, "hgrn2", use_lower_bound=True)
    with pytest.raises(NotImplementedError, match="use_lower_bound must be False"):
        from_hf(tmp_path)
    saved(tmp_path, "gla", intermediate_size=25)
    with pytest.raises(CheckpointError, match=r"of another shape: layers\.0\.mlp"):
        from_hf(tmp_path)
    saved(tmp_path, "gla", num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"weights in .* are missing: layers\.2"):
        from_hf(tmp_path)
