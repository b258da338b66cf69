"""LogLinearMamba2: its formula, decoding, padding, parameters of fla."""

import pytest
import torch
from torch.nn import functional as nnf

from omniattn.modules import LogLinearMamba2

CONFIG = LogLinearMamba2.Config(8, 4, headdim=4, ngroups=2, init_std=0.5, num_levels=5)


def made():
    torch.manual_seed(0)
    layer = CONFIG.build(dtype=torch.float64)
    torch.nn.init.normal_(layer.L)
    return layer, torch.randn(2, 7, 8, dtype=torch.float64)


def formula(layer, x):
    """Pair by pair of tokens, as fla's `hmamba_chunk_scan_combined` defines it."""
    z, u, dt, dl = nnf.linear(x, layer.in_proj.weight).split((16, 32, 4, 20), -1)
    conv = layer.conv1d
    u = nnf.silu(nnf.conv1d(nnf.pad(u.mT, (3, 0)), conv.weight, conv.bias, groups=32).mT)
    v, k, q = u.split((16, 8, 8), -1)
    v, k, q = v.unflatten(-1, (4, 4)), k.unflatten(-1, (2, 4)), q.unflatten(-1, (2, 4))
    dt = nnf.softplus(dt + layer.dt_bias)
    scales = nnf.softplus(layer.L * dl.unflatten(-1, (4, 5)))
    y = layer.D[:, None] * v
    for i in range(x.shape[1]):
        for j in range(i + 1):
            decay = (-layer.A_log.exp() * dt[:, j + 1 : i + 1].sum(1)).exp() * dt[:, j]
            both = (q[:, i] * k[:, j]).sum(-1).repeat_interleave(2, 1)
            weight = scales[:, i, :, (i ^ j).bit_length()] * decay * both
            y[:, i] += weight[..., None] * v[:, j]
    gated = (y.flatten(-2) * nnf.silu(z)).unflatten(-1, (2, 8))
    normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + 1e-5)
    return nnf.linear(normed.flatten(-2) * layer.norm.weight, layer.out_proj.weight)


@torch.no_grad()
def test_formula_and_decoding():
    layer, x = made()
    y = layer(x)
    torch.testing.assert_close(y, formula(layer, x))
    state = layer.new_state(2, 7)
    parts = [layer(x[:, a:b], state=state) for a, b in ((0, 3), (3, 4), (4, 5), (5, 7))]
    torch.testing.assert_close(torch.cat(parts, 1), y)


@torch.no_grad()
def test_decoding_after_padding():
    """Each sequence counts its own tokens."""
    layer, x = made()
    real = torch.ones(2, 1, 1, 4, dtype=torch.bool)
    real[1, ..., :2] = False
    state = layer.new_state(2, 7)
    layer(x[:, :4], state=state, mask=real)
    assert state["position"].tolist() == [4, 2]
    found = torch.cat([layer(x[:, t : t + 1], state=state) for t in range(4, 7)], 1)
    torch.testing.assert_close(found[0], layer(x[:1])[0, 4:])
    torch.testing.assert_close(found[1], layer(x[1:, 2:])[0, 2:])


def test_parameters_have_the_shapes_of_fla():
    layer = LogLinearMamba2(8, 4, headdim=4)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes["in_proj.weight"] == (2 * 16 + 8 + 4 + 4 * 15, 8) and shapes["L"] == (4, 15)


def test_too_many_tokens():
    layer, x = made()
    with pytest.raises(ValueError, match=r"log_linear_attention: level_scales .* for 21 tokens"):
        layer(x.repeat(1, 3, 1))
