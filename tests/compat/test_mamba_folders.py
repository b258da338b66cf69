"""Folders of mamba-ssm's models load without mamba-ssm, against compat's layers of mamba-ssm."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as nnf

from omniattn.compat import mamba_ssm
from omniattn.models import CheckpointError, from_hf

SIZES = {"d_model": 16, "n_layer": 2, "vocab_size": 11, "pad_vocab_size_multiple": 8}
#: Layer -> options of ssm_cfg.
KINDS = {
    "Mamba1": (mamba_ssm.Mamba, {"d_state": 3, "d_conv": 3, "dt_rank": "auto"}),
    "Mamba2": (mamba_ssm.Mamba2, {"d_state": 4, "headdim": 8, "ngroups": 2}),
    "Mamba3": (mamba_ssm.Mamba3, {"d_state": 4, "headdim": 8, "is_mimo": True, "mimo_rank": 2}),
}


class Theirs(nn.Module):
    """Language model with mamba-ssm's names; 16 rows of embeddings."""

    def __init__(self, kind):
        super().__init__()
        layer, options = KINDS[kind]
        self.backbone = nn.Module()
        self.backbone.embedding = nn.Embedding(16, 16)
        blocks = [nn.ModuleDict({"mixer": layer(16, **options)}) for _ in range(2)]
        for block in blocks:
            block["norm"] = nn.RMSNorm(16, 1e-5)
        self.backbone.layers = nn.ModuleList(blocks)
        self.backbone.norm_f = nn.RMSNorm(16, 1e-5)

    def forward(self, tokens):
        x = self.backbone.embedding(tokens)
        for block in self.backbone.layers:
            x = x + block["mixer"](block["norm"](x))
        return nnf.linear(self.backbone.norm_f(x), self.backbone.embedding.weight)


def saved(folder, kind, ssm=None, **changes):
    torch.manual_seed(0)
    model = Theirs(kind)
    layer = {} if kind == "Mamba1" else {"layer": kind}
    ssm_cfg = layer | KINDS[kind][1] | (ssm or {})
    (folder / "config.json").write_text(json.dumps({**SIZES, "ssm_cfg": ssm_cfg, **changes}))
    weights = model.state_dict()
    torch.save(weights | {"lm_head.weight": weights["backbone.embedding.weight"]},
               folder / "pytorch_model.bin")  # fmt: skip
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_folders_of_mamba_ssm_are_its_models(kind, tmp_path):
    theirs, tokens = saved(tmp_path, kind), torch.randint(11, (2, 6))
    ours = from_hf(tmp_path)
    assert not ours.training
    torch.testing.assert_close(ours(tokens), theirs(tokens))


def test_errors_of_folders_of_mamba_ssm(tmp_path):
    for changes, text in (
        ({"d_intermediate": 32}, "d_intermediate must be 0 .* got d_intermediate=32"),
        ({"ssm": {"norm_before_gate": True}}, "norm_before_gate must be False"),
        ({"ssm": {"layer": "Mamba4"}}, "must be one of Mamba1, Mamba2, Mamba3, got 'Mamba4'"),
        ({"ssm": {"d_stat": 4}}, "ssm_cfg must have options of Mamba2 .* got .*d_stat"),
    ):
        saved(tmp_path, "Mamba2", **changes)
        with pytest.raises(NotImplementedError, match=text):
            from_hf(tmp_path)
    saved(tmp_path, "Mamba2", n_layer=3)
    with pytest.raises(CheckpointError, match=r"weights in .* are missing: layers\.2"):
        from_hf(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match="is damaged"):
        from_hf(tmp_path)
