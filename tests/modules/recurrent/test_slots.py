"""Gated slot attention and ABC: formulas of fla's layers, decoding, errors."""

import pytest
import torch
from torch.nn import functional as nnf

from omniattn.modules import ABCAttention, GatedSlotAttention

DIM, STD = 12, {"init_std": 0.4}
CONFIGS = {
    "gsa": GatedSlotAttention.Config(DIM, 2, num_slots=5, **STD),
    "gsa, convolved": GatedSlotAttention.Config(DIM, 2, conv_size=3, gate="silu", **STD),
    "abc": ABCAttention.Config(DIM, 3, num_slots=5, clamp=0.5, **STD),
    "abc, convolved": ABCAttention.Config(DIM, 3, conv_size=3, gate=None, **STD),
}


def made(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layer = CONFIGS[name].build(dtype=torch.float64)
    return layer, torch.randn(2, 9, DIM, dtype=torch.float64)


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_decoding(name):
    layer, x = made(name)
    state = layer.new_state(2, 9)
    parts = [layer(x[:, a:b], state=state) for a, b in ((0, 3), (3, 4), (4, 5), (5, 9))]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x))


def attended(q, keys, values, scale):
    share = (scale * torch.einsum("bhk,bhkm->bhm", q, keys)).softmax(-1)
    return torch.einsum("bhm,bhmv->bhv", share, values)


def test_gated_slot_attention():
    layer, x = made("gsa")
    q, k, v = (nnf.silu(getattr(layer, f"{n}_proj")(x)).unflatten(-1, (2, -1)) for n in "qkv")
    a = layer.f_proj(x).unflatten(-1, (2, 5)).sigmoid() ** 0.125
    keys, values, out = torch.zeros(2, 2, 6, 5), torch.zeros(2, 2, 5, 6), []
    for t in range(9):
        keys = keys * a[:, t, :, None] + k[:, t, ..., None] * (1 - a[:, t, :, None])
        values = values * a[:, t, ..., None] + (1 - a[:, t, ..., None]) * v[:, t, :, None]
        out.append(attended(q[:, t], keys, values, 1.0))
    o = nnf.silu(torch.stack(out, 1).flatten(-2))
    y = layer.o_proj(nnf.rms_norm(o, (DIM,), layer.o_norm.weight, 1e-5))
    torch.testing.assert_close(layer(x), y)


def test_abc():
    layer, x = made("abc")
    q, k, v = (getattr(layer, f"{n}_proj")(x).unflatten(-1, (3, -1)) for n in "qkv")
    weights = layer.s_proj(x).unflatten(-1, (3, 5)).clamp(-0.5, 0.5).exp()
    total = weights.cumsum(1)
    keys = torch.einsum("bthk,bthm->bthkm", k, weights).cumsum(1) / total[..., None, :]
    values = torch.einsum("bthm,bthv->bthmv", weights, v).cumsum(1) / total[..., None]
    o = torch.stack([attended(q[:, t], keys[:, t], values[:, t], 2**-0.5) for t in range(9)], 1)
    o = nnf.rms_norm(o, (4,), layer.o_norm.weight, 1e-5)
    y = layer.o_proj((o * nnf.silu(layer.g_proj(x)).unflatten(-1, (3, -1))).flatten(-2))
    torch.testing.assert_close(layer(x), y)


def test_errors():
    with pytest.raises(ValueError, match="GatedSlotAttention: num_v_heads must be None"):
        GatedSlotAttention(8, 2, num_v_heads=4)
