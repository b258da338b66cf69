"""Attention to a memory of a few slots: formulas of fla's layers, decoding, errors."""

import pytest
import torch
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.modules import ABCAttention, CyclicFlowAttention, GatedSlotAttention, Raven

DIM, STD = 12, {"init_std": 0.4}
CONFIGS = {
    "gsa": GatedSlotAttention.Config(DIM, 2, num_slots=5, **STD),
    "gsa, convolved": GatedSlotAttention.Config(DIM, 2, conv_size=3, gate="silu", **STD),
    "raven": Raven.Config(DIM, 2, num_slots=5, top_k=2, **STD),
    "raven, slots": Raven.Config(DIM, 2, decay="slots", router="softmax", top_k=2, **STD),
    "abc": ABCAttention.Config(DIM, 3, num_slots=5, clamp=0.5, **STD),
    "cyfa": CyclicFlowAttention.Config(DIM, 2, num_slots=5, **STD),
    "cyfa, plain": CyclicFlowAttention.Config(DIM, 2, num_slots=3, conv_size=0, gate=None, **STD),
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


@pytest.mark.parametrize("name", ["raven", "raven, slots"])
def test_raven(name):
    """Only the routed slots change; their shares of a sigmoid have the sum 1."""
    layer, x = made(name)
    slots = layer.config.slots
    for norm in (layer.q_norm, layer.k_norm):
        torch.nn.init.normal_(norm.weight)
    q, k, v = (nnf.silu(getattr(layer, f"{n}_proj")(x)).unflatten(-1, (2, -1)) for n in "qkv")
    q = nnf.rms_norm(q, (6,), layer.q_norm.weight, 1e-5)
    k = nnf.rms_norm(k, (6,), layer.k_norm.weight, 1e-5)
    r = layer.r_proj(x).unflatten(-1, (2, slots))
    if name == "raven":
        r = r.sigmoid()
        g = -layer.A_log.exp() * nnf.softplus(layer.a_proj(x) + layer.dt_bias)
        g = g[..., None].expand_as(r)
    else:
        r, g = r.softmax(-1), nnf.logsigmoid(layer.f_proj(x)).unflatten(-1, (2, slots)) / 8
    chosen = r >= r.topk(2, -1).values[..., -1:]
    r = r * chosen
    r = r / (r.sum(-1, keepdim=True) + 1e-9) if name == "raven" else r
    a = (g * r).exp()
    keys, values, out = torch.zeros(2, 2, 6, slots), torch.zeros(2, 2, slots, 6), []
    for t in range(9):
        keys = keys * a[:, t, :, None] + k[:, t, ..., None] * (1 - a[:, t, :, None])
        values = values * a[:, t, ..., None] + (1 - a[:, t, ..., None]) * v[:, t, :, None]
        out.append(attended(q[:, t], keys, values, 1.0))
    o = nnf.silu(torch.stack(out, 1).flatten(-2))
    y = layer.o_proj(nnf.rms_norm(o, (DIM,), layer.o_norm.weight, 1e-5))
    torch.testing.assert_close(layer(x), y)


@pytest.mark.parametrize("name", ["cyfa", "cyfa, plain"])
def test_cyclic_flow_attention(name):
    layer, x = made(name)
    for parameter in (layer.q_norm.weight, layer.k_norm.weight, layer.readout):
        torch.nn.init.normal_(parameter)

    def part(n):
        y = getattr(layer, f"{n}_proj")(x)
        if name == "cyfa":
            weight = getattr(layer, f"{n}_conv1d").weight
            y = nnf.conv1d(nnf.pad(y.mT, (3, 0)), weight, groups=DIM).mT
        y = y.unflatten(-1, (2, 6))
        norm = getattr(layer, f"{n}_norm", None)
        return y if norm is None else nnf.rms_norm(y, (6,), norm.weight, 1e-5)

    g = -layer.A_log.exp() * nnf.softplus(layer.a_proj(x) + layer.dt_bias)
    gates = (layer.d_proj(x).sigmoid(), layer.b_proj(x).sigmoid())
    o, _ = functional.cyclic_flow_attention(*map(part, "qkv"), g, *gates, layer.readout)
    o = nnf.rms_norm(o * layer.config.slots, (6,), layer.o_norm.weight, 1e-5)
    if name == "cyfa":
        o = o * layer.g_proj(x).unflatten(-1, (2, 6)).sigmoid()
    torch.testing.assert_close(layer(x), layer.o_proj(o.flatten(-2)))


def test_parameters_of_cyfa_have_the_shapes_of_fla():
    """Names and shapes of fla's layer with hidden_size=12, head_dim=6, num_heads=2, num_slots=6."""
    layer = CyclicFlowAttention(12, 2, num_slots=5)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes["b_proj.bias"] == shapes["d_proj.bias"] == shapes["A_log"] == (2,)
    assert shapes["g_proj.0.weight"] == (6, 12) and shapes["g_proj.1.bias"] == (12,)
    assert shapes["q_norm.weight"] == shapes["o_norm.weight"] == (6,)
    assert torch.equal(layer.readout, torch.eye(5).expand(2, 5, 5))
    x = torch.randn(1, 4, 12, requires_grad=True)
    layer(x).sum().backward()
    assert layer.d_proj.weight.grad.any()
    with pytest.raises(ValueError, match="CyclicFlowAttention: num_slots must be odd"):
        CyclicFlowAttention(12, 2, num_slots=6)


def test_noise_of_routers():
    """Routers have noise only in training."""
    layer = Raven(DIM, 2, num_slots=5, top_k=2, noise=True)
    x = torch.randn(1, 9, DIM)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_errors():
    with pytest.raises(ValueError, match="Raven: top_k must be at most the number of slots"):
        Raven(8, 2, num_slots=2, top_k=3)
    with pytest.raises(ValueError, match="Raven: decay must be"):
        Raven(8, 2, decay="head")
    with pytest.raises(ValueError, match="GatedSlotAttention: num_v_heads must be None"):
        GatedSlotAttention(8, 2, num_v_heads=4)
