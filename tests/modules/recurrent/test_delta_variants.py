"""Layers of delta rules with several keys a token: formulas, decoding, padding."""

import pytest
import torch
from torch import nn
from torch.nn import functional as nnf

from omniattn.modules import (
    Comba,
    GatedDeltaNet2,
    GatedDeltaProduct,
    PrecondGatedDeltaNet,
    PrecondKDA,
)

DIM, STD = 12, {"init_std": 0.3}
CONFIGS = {
    "product": GatedDeltaProduct.Config(DIM, 2, num_v_heads=4, num_householder=3, **STD),
    "comba": Comba.Config(DIM, 2, num_v_heads=4, **STD),
    "comba, decayed": Comba.Config(
        DIM, 2, inner_decay=False, correction_factor=0.02, erase_decayed=True, **STD
    ),
    "comba, plain": Comba.Config(DIM, 2, correction_factor=None, gate=None, conv_size=0, **STD),
    "precond": PrecondGatedDeltaNet.Config(DIM, 2, num_v_heads=4, allow_neg_eigval=True, **STD),
    "precond kda": PrecondKDA.Config(DIM, 2, num_v_heads=4, lower_bound=-2.0, **STD),
    "gates": GatedDeltaNet2.Config(DIM, 2, num_v_heads=4, allow_neg_eigval=True, **STD),
}


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layer = CONFIGS[name].build(dtype=torch.float64)
    return layer, torch.randn(2, 7, DIM, dtype=torch.float64)


def part(layer: nn.Module, name: str, x: torch.Tensor, count: int) -> torch.Tensor:
    """silu(conv(x W)) of each of `count` heads, by torch's own convolution."""
    y = nnf.linear(x, getattr(layer, f"{name}_proj").weight)
    if layer.config.conv_size > 0:
        weight = getattr(layer, f"{name}_conv1d").weight
        y = nnf.conv1d(nnf.pad(y.mT, (3, 0)), weight, groups=y.shape[-1]).mT
    return nnf.silu(y).unflatten(-1, (count, -1))


def unit(t: torch.Tensor) -> torch.Tensor:
    return t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)


def preconditioner(layer: nn.Module, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Factors (B, T, Hv, K) of written keys k (B, T, H, K)."""
    c = layer.config
    gate = layer.a_proj if isinstance(layer, PrecondKDA) else layer.a_atk_proj
    g = -layer.A_log_atk.exp() * nnf.softplus(gate(x) + layer.dt_bias_atk)
    beta = layer.b_atk_proj(x).sigmoid()
    a, steps = 0.0, []
    for t in range(x.shape[1]):
        row = k[:, t].repeat_interleave(beta.shape[-1] // c.num_heads, 1)
        a = g[:, t, :, None].exp() * a + beta[:, t, :, None] * row**2
        r = torch.log(a + c.squash_eps) - layer.log_atk_scale[:, None]
        steps.append(c.squash_x ** (-r / (1 + r.abs())))
    return torch.stack(steps, 1).repeat_interleave(c.v_heads // beta.shape[-1], 2)


def formula(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Token by token and head by head."""
    c = layer.config
    n, group = c.updates, c.v_heads // c.num_heads
    q = part(layer, "q", x, c.num_heads)
    k, v = part(layer, "k", x, n * c.num_heads), part(layer, "v", x, n * c.v_heads)
    k, v = k.unflatten(2, (n, -1)), v.unflatten(2, (n, -1))
    erased, beta = k, None
    if isinstance(layer, GatedDeltaNet2):
        step = nnf.softplus(layer.f_proj(x) + layer.dt_bias).unflatten(-1, (c.num_heads, -1))
        g = -layer.A_log.exp()[:, None] * step
        b = 2 * layer.b_proj(x).sigmoid().unflatten(-1, (c.num_heads, -1))
        w = layer.w_proj(x).sigmoid().unflatten(-1, (c.v_heads, -1))
    elif isinstance(layer, PrecondKDA):
        step = (layer.f_proj(x) + layer.dt_bias).unflatten(-1, (c.v_heads, -1))
        g = (c.lower_bound * (layer.A_log.exp()[:, None] * step).sigmoid())[..., None]
        beta = layer.b_proj(x).sigmoid().repeat_interleave(group, -1)[:, :, None]
    else:
        g = -layer.A_log.exp() * nnf.softplus(layer.a_proj(x) + layer.dt_bias)
        beta = layer.b_proj(x).sigmoid().unflatten(-1, (n, -1))
    if isinstance(layer, (GatedDeltaProduct, PrecondGatedDeltaNet)):
        beta = 2 * beta
    if isinstance(layer, Comba):
        if c.inner_decay:
            erased = erased * layer.decay.sigmoid()[:, None]
        if c.correction_factor is not None:
            q = q - layer.D[:, None] * erased[:, :, 0]
    q, k, erased = unit(q), unit(k), unit(erased)
    factors = torch.ones(c.v_heads, c.k_size).expand(*x.shape[:2], -1, -1)
    if hasattr(layer, "log_atk_scale"):
        factors = preconditioner(layer, x, k[:, :, 0])
    out = torch.zeros(*x.shape[:2], c.v_heads, c.v_size, dtype=x.dtype)
    for row in range(len(x)):
        for h in range(c.v_heads):
            s, key = torch.zeros(c.k_size, c.v_size, dtype=x.dtype), h // group
            for t in range(x.shape[1]):
                before = s
                if isinstance(layer, GatedDeltaNet2):
                    s = g[row, t, key, :, None].exp() * s
                    u = w[row, t, h] * v[row, t, 0, h] - s.T @ (b[row, t, key] * k[row, t, 0, key])
                    s = s + torch.outer(k[row, t, 0, key], u)
                else:
                    s = g[row, t, h].exp() * s
                    for j in range(n):
                        decays = not isinstance(layer, Comba) or c.erase_decayed
                        u = v[row, t, j, h] - (s if decays else before).T @ erased[row, t, j, key]
                        written = factors[row, t, h] * k[row, t, j, key]
                        s = s + beta[row, t, j, h] * torch.outer(written, u)
                out[row, t, h] = s.T @ q[row, t, key] * c.k_size**-0.5
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + 1e-5)
    if c.gate is not None:
        act = nnf.silu if c.gate == "silu" else torch.sigmoid
        out = out * act(layer.g_proj(x).unflatten(-1, (c.v_heads, -1)))
    return nnf.linear(out.flatten(-2), layer.o_proj.weight)


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_formula_and_decoding(name):
    layer, x = made(name)
    y = layer(x)
    torch.testing.assert_close(y, formula(layer, x))
    state = layer.new_state(2, 7)
    parts = [layer(x[:, a:b], state=state) for a, b in ((0, 3), (3, 4), (4, 5), (5, 7))]
    torch.testing.assert_close(torch.cat(parts, 1), y)


def test_parameters_have_the_shapes_of_fla():
    """Names and shapes of its layers with hidden_size=12, num_heads=2, head_dim=6."""
    layer = GatedDeltaProduct(12, 2, num_householder=3)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes["k_proj.weight"] == (36, 12) and shapes["v_proj.weight"] == (72, 12)
    assert shapes["b_proj.weight"] == (6, 12) and shapes["a_proj.weight"] == (2, 12)
    assert shapes["k_conv1d.weight"] == (36, 1, 4) and shapes["o_norm.weight"] == (12,)
    comba = Comba(12, 2)
    assert comba.D.tolist() == comba.decay.tolist() == [1, 1]
    shapes = {name: tuple(p.shape) for name, p in GatedDeltaNet2(12, 2).named_parameters()}
    assert shapes["f_proj.0.weight"] == (6, 12) and shapes["f_proj.1.weight"] == (12, 6)
    assert shapes["b_proj.weight"] == shapes["w_proj.weight"] == (12, 12)
    assert shapes["A_log"] == (2,) and shapes["dt_bias"] == (12,)
    assert shapes["g_proj.1.bias"] == (12,)
    layer = PrecondGatedDeltaNet(12, 2, num_v_heads=4, log_atk_scale_init=-0.5)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes["a_atk_proj.weight"] == shapes["b_atk_proj.weight"] == (2, 12)
    assert shapes["a_proj.weight"] == shapes["b_proj.weight"] == (4, 12)
    assert layer.log_atk_scale.tolist() == [-0.5] * 2 and shapes["A_log_atk"] == (2,)
    layer = PrecondKDA(12, 2, num_v_heads=4)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes["a_proj.weight"] == shapes["b_atk_proj.weight"] == (4, 12)
    assert shapes["b_proj.weight"] == (2, 12) and shapes["dt_bias_atk"] == (4,)
    assert not layer.dt_bias.any()
