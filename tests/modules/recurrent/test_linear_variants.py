"""HGRN, HGRN-2, lightning attention, Based and ReBased: formulas, published code, decoding."""

import pytest
import torch
from torch import nn
from torch.nn import functional as nnf

from omniattn.modules import (
    HGRN,
    HGRN2,
    LightNet,
    LightningAttention,
    LinearAttention,
    ReBased,
    Rodimus,
)

DIM, STD = 12, {"init_std": 0.3}
CONFIGS = {
    "hgrn": HGRN.Config(DIM, expand=2, **STD),
    "hgrn, bounded": HGRN.Config(DIM, conv_size=3, lower_bound=0.4, **STD),
    "hgrn2": HGRN2.Config(DIM, 2, num_v_heads=4, **STD),
    "hgrn2, bounded": HGRN2.Config(DIM, 2, conv_size=3, lower_bound=0.4, **STD),
    "lightnet": LightNet.Config(DIM, 3, conv_size=3, gate_rank=4, **STD),
    "rodimus": Rodimus.Config(DIM, 4, gate_rank=3, conv_size=3, **STD),
    "hgrn, channels": HGRN.Config(DIM, channel_bounds=True, **STD),
    "hgrn2, channels": HGRN2.Config(DIM, 2, num_v_heads=4, channel_bounds=True, **STD),
    "lightning": LightningAttention.Config(DIM, 3, layer_idx=1, num_layers=4, **STD),
    "based": LinearAttention.Config(DIM, 3, feature_map="taylor", feature_dim=5, **STD),
    "rebased": ReBased.Config(DIM, 3, feature_dim=5, **STD),
}


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layer = CONFIGS[name].build(dtype=torch.float64)
    for name in ("gamma", "beta"):
        if hasattr(layer, name):
            nn.init.normal_(getattr(layer, name))
    if hasattr(layer, "lower_bounds"):
        nn.init.uniform_(layer.lower_bounds, -0.3, 0.9).clamp_(min=0)
    return layer, torch.randn(2, 9, DIM, dtype=torch.float64)


def heads(layer: nn.Module, name: str, x: torch.Tensor, count: int) -> torch.Tensor:
    y = nnf.linear(x, getattr(layer, f"{name}_proj").weight)
    if getattr(layer.config, "conv_size", 0) > 0:
        weight = getattr(layer, f"{name}_conv1d").weight
        y = nnf.conv1d(nnf.pad(y.mT, (weight.shape[-1] - 1, 0)), weight, groups=y.shape[-1]).mT
    return y.unflatten(-1, (count, -1))


def normed(layer: nn.Module, o: torch.Tensor) -> torch.Tensor:
    o = o.flatten(-2)
    return o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * layer.o_norm.weight


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_decoding(name):
    layer, x = made(name)
    state = layer.new_state(2, 9)
    parts = [layer(x[:, a:b], state=state) for a, b in ((0, 3), (3, 4), (4, 5), (5, 9))]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x))


@pytest.mark.parametrize("name", ["hgrn", "hgrn, bounded", "hgrn, channels"])
def test_hgrn(name):
    layer, x = made(name)
    bound = getattr(layer, "lower_bounds", layer.config.lower_bound)
    i, f = (heads(layer, part, x, 1).squeeze(2) for part in "if")
    kept = bound + (1 - bound) * f.sigmoid()
    h, out = 0, []
    for t in range(x.shape[1]):
        h = kept[:, t] * h + (1 - kept[:, t]) * nnf.silu(i[:, t])
        out.append(h)
    gate = nnf.silu(nnf.linear(x, layer.g_proj.weight))
    o = normed(layer, torch.stack(out, 1)[:, :, None]) * gate
    torch.testing.assert_close(layer(x), nnf.linear(o, layer.o_proj.weight))


@pytest.mark.parametrize("name", ["hgrn2", "hgrn2, bounded", "hgrn2, channels"])
def test_hgrn2(name):
    layer, x = made(name)
    c = layer.config
    q, f, v = (heads(layer, n, x, h) for n, h in (("q", 2), ("k", 2), ("v", c.v_heads)))
    bound = c.lower_bound
    if c.channel_bounds:
        bound = layer.lower_bounds.view(f.shape[2:])
    kept = bound + (1 - bound) * f.sigmoid()
    q, kept = (t.repeat_interleave(c.v_heads // 2, 2) for t in (nnf.silu(q), kept))
    s, out = 0, []
    for t in range(x.shape[1]):
        s = kept[:, t, ..., None] * s + (1 - kept[:, t, ..., None]) * v[:, t, :, None]
        out.append((s * q[:, t, ..., None]).sum(-2) * c.k_size**-0.5)
    expected = nnf.linear(normed(layer, torch.stack(out, 1)), layer.o_proj.weight)
    torch.testing.assert_close(layer(x), expected)


def test_large_gates_of_hgrn2():
    """Keys and decays stay exact where 1 - sigmoid would be 0."""
    layer, x = made("hgrn2")
    with torch.no_grad():
        layer.k_proj.weight.mul_(1e3)
    assert layer(x).isfinite().all()


@pytest.mark.slow
def test_lightning_attention_of_transformers():
    module = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    config = module.MiniMaxConfig(
        hidden_size=DIM, num_attention_heads=3, num_hidden_layers=4, rms_norm_eps=1e-5, block_size=4
    )
    theirs = module.MiniMaxLightningAttention(config, 1).double()
    layer, x = made("lightning")
    nn.init.normal_(layer.o_norm.weight)
    rows = [getattr(layer, f"{n}_proj").weight.unflatten(0, (3, -1)) for n in "qkv"]
    with torch.no_grad():
        theirs.qkv_proj.weight.copy_(torch.cat(rows, 1).flatten(0, 1))
        theirs.output_gate.weight.copy_(layer.g_proj.weight)
        theirs.out_proj.weight.copy_(layer.o_proj.weight)
        theirs.norm.weight.copy_(layer.o_norm.weight)
        theirs.norm.variance_epsilon = 1e-5
    torch.testing.assert_close(layer(x), theirs(x, None, None)[0], rtol=1e-6, atol=1e-6)


def test_lightning_attention():
    """Token by token, with the rates of the second of four layers."""
    layer, x = made("lightning")
    q, k, v = (nnf.silu(heads(layer, n, x, 3)) for n in "qkv")
    rates = [2 ** (-8 * h / 3) * (1 - 1 / (3 + 1e-5) + 1e-5) for h in (1, 2, 3)]
    kept = torch.tensor(rates, dtype=x.dtype).neg().exp()[:, None, None]
    s, out = 0, []
    for t in range(x.shape[1]):
        s = kept * s + k[:, t, ..., None] * v[:, t, :, None]
        out.append((s * q[:, t, ..., None]).sum(-2))
    y = normed(layer, torch.stack(out, 1)) * layer.g_proj(x).sigmoid()
    torch.testing.assert_close(layer(x), nnf.linear(y, layer.o_proj.weight))


def test_rodimus():
    layer, x = made("rodimus")
    nn.init.normal_(layer.residual_weight)
    h, z = layer.up_proj(x), layer.gate_proj(x)
    conv = layer.short_conv
    u = nnf.conv1d(nnf.pad(h.mT, (2, 0)), conv.weight, conv.bias, groups=h.shape[-1]).mT
    u = nnf.silu(u)
    g, tau = nnf.softplus(layer.g_gate_proj(u)), layer.tau_gate_proj(u).sigmoid()
    k = layer.k_proj(u)
    k = k / k.norm(dim=-1, keepdim=True) * g**tau
    v, q, kept = h * layer.i_gate_proj(h).sigmoid(), layer.q_proj(u) / 2, (-g * tau).exp()
    s, out = 0, []
    for t in range(x.shape[1]):
        s = kept[:, t, :, None] * s + k[:, t, :, None] * v[:, t, None]
        out.append((s * q[:, t, :, None]).sum(-2))
    o = (torch.stack(out, 1) + layer.residual_weight * u) * nnf.silu(z)
    o = nnf.rms_norm(o, (24,), layer.activation_norm.weight, 1e-5)
    torch.testing.assert_close(layer(x), layer.down_proj(o))


def test_lightnet():
    layer, x = made("lightnet")
    q, k, v = (heads(layer, n, x, 3) for n in "qkv")
    shares = k.exp() / k.exp().cumsum(1)
    kept = k.exp().cumsum(1)
    kept = torch.cat((torch.zeros_like(kept[:, :1]), kept[:, :-1] / kept[:, 1:]), 1)
    s, out = 0, []
    for t in range(x.shape[1]):
        s = kept[:, t, ..., None] * s + shares[:, t, ..., None] * v[:, t, :, None]
        out.append((s * nnf.silu(q[:, t])[..., None]).sum(-2) / 2)
    y = normed(layer, torch.stack(out, 1)) * nnf.silu(layer.g_proj(x))
    torch.testing.assert_close(layer(x), nnf.linear(y, layer.o_proj.weight))


@pytest.mark.parametrize("name", ["based", "rebased"])
def test_kernels_of_second_order(name):
    layer, x = made(name)
    q, k, v = (heads(layer, n, x, 3) for n in "qkv")
    if name == "rebased":
        q, k = (nnf.layer_norm(t, (5,), layer.gamma, layer.beta) for t in (q, k))
    u = torch.einsum("bihd,bjhd->bhij", q, k) * 5**-0.5
    weight = (u.square() if name == "rebased" else 1 + u + u.square() / 2).tril()
    o = torch.einsum("bhij,bjhv->bihv", weight / weight.sum(-1, keepdim=True), v)
    torch.testing.assert_close(layer(x), nnf.linear(o.flatten(-2), layer.o_proj.weight))


def test_errors():
    with pytest.raises(ValueError, match=r"HGRN: lower_bound must be in \[0, 1\)"):
        HGRN(8, lower_bound=1.0)
    with pytest.raises(ValueError, match="HGRN2: lower_bound must be 0 with channel_bounds=True"):
        HGRN2(8, 2, lower_bound=0.5, channel_bounds=True)
    with pytest.raises(ValueError, match=r"HGRN: lower_bound must be a finite number >= 0"):
        HGRN(8, lower_bound=-0.1)
    with pytest.raises(ValueError, match=r"HGRN2: lower_bound must be in \[0, 1\)"):
        HGRN2(8, 2, lower_bound=1.0)
    with pytest.raises(ValueError, match="LightningAttention: layer_idx must be in"):
        LightningAttention(8, 2, layer_idx=2, num_layers=2)
