"""Mamba-3: decoding, parameters, both forms of the norm."""

import pytest
import torch
from torch.nn import functional as nnf

from omniattn.modules import Mamba3

CONFIGS = {
    "one input": Mamba3.Config(12, 8, headdim=6, ngroups=2, init_std=0.3),
    "several": Mamba3.Config(12, 8, headdim=6, is_mimo=True, mimo_rank=3, init_std=0.3),
    "norm": Mamba3.Config(12, 8, headdim=6, is_outproj_norm=True, decay="softplus", init_std=0.3),
    "both": Mamba3.Config(
        12, 6, headdim=4, is_mimo=True, mimo_rank=2, is_outproj_norm=True, rope_fraction=1.0
    ),
}


def made(name):
    torch.manual_seed(0)
    return CONFIGS[name].build(dtype=torch.float64), torch.randn(2, 9, 12, dtype=torch.float64)


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_decoding(name):
    layer, x = made(name)
    state = layer.new_state(2, 9)
    parts = [layer(x[:, a:b], state=state) for a, b in ((0, 3), (3, 4), (4, 5), (5, 9))]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x))


def test_token_by_token():
    """One input with a norm, as in `modules/mamba3.py` of state-spaces/mamba, commit e9594ce1."""
    layer, x = made("norm")
    c = layer.config
    z, v, b, c_, dt, a, trap, angles = layer.in_proj(x).split(c.parts, -1)
    dt = nnf.softplus(dt + layer.dt_bias)
    kept = (-nnf.softplus(a).clamp(min=1e-4) * dt).exp()
    share = trap.sigmoid()

    def normed(t, weight, eps=1e-5):
        return t * torch.rsqrt(t.square().mean(-1, keepdim=True) + eps) * weight

    k = normed(b, layer.B_norm.weight)[:, :, None] + layer.B_bias[:, 0]
    q = normed(c_, layer.C_norm.weight)[:, :, None] + layer.C_bias[:, 0]
    v, z = (t.unflatten(-1, (4, 6)) for t in (v, z))
    theta = (torch.pi * angles[:, :, None].tanh() * dt[..., None]).cumsum(1)
    turn = torch.polar(torch.ones_like(theta), theta)
    turn = torch.cat((turn, torch.ones_like(turn)), -1)
    q, k = (
        torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (4, 2)).contiguous()) * turn)
        for t in (q, k)
    )
    q, k = q.flatten(-2), k.flatten(-2)
    writes = v[..., None] * k[..., None, :]
    h, rows = torch.zeros(2, 4, 6, 8, dtype=x.dtype), []
    for t in range(x.shape[1]):
        if t > 0:
            h = h + ((1 - share[:, t]) * dt[:, t])[..., None, None] * writes[:, t - 1]
        h = kept[:, t, :, None, None] * h
        h = h + (share[:, t] * dt[:, t])[..., None, None] * writes[:, t]
        rows.append((h * q[:, t, :, None]).sum(-1))
    y = torch.stack(rows, 1) + layer.D[:, None] * v
    y = normed(y, layer.norm.weight.unflatten(0, (4, 6))) * nnf.silu(z)
    torch.testing.assert_close(layer(x), layer.out_proj(y.flatten(-2)))


def test_parameters_are_those_of_mamba_ssm():
    shapes = {n: tuple(p.shape) for n, p in made("both")[0].named_parameters()}
    assert shapes == {
        "in_proj.weight": (2 * 24 + 2 * 12 + 3 * 6 + 3, 12),
        **{name: (6,) for name in ("dt_bias", "D")},
        **{name: (6, 2, 6) for name in ("B_bias", "C_bias")},
        **{name: (6, 2, 4) for name in ("mimo_x", "mimo_z", "mimo_o")},
        **{f"{name}_norm.weight": (6,) for name in "BC"},
        "norm.weight": (24,),
        "out_proj.weight": (12, 24),
    }


def test_errors():
    with pytest.raises(ValueError, match="headdim must divide expand"):
        Mamba3(12, headdim=7)
    with pytest.raises(ValueError, match=r"rope_fraction must be 0\.5 or 1"):
        Mamba3(12, headdim=6, rope_fraction=0.3)
    with pytest.raises(ValueError, match="decay must be"):
        Mamba3(12, headdim=6, decay="exp")
