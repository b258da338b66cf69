"""ATLAS' layer: its formula, decoding, features, bounded memory, parameters."""

import pytest
import torch
from torch.nn import functional as nnf

from omniattn.modules import AtlasLinear
from omniattn.modules.recurrent.atlas import _features

DIM, C, WINDOW = 12, 3, 4
MODES = {
    "linear": {},
    "atlas": {"gate": None, "degree": 2, "newton_schulz_steps": 2, "max_step": 0.5},
}


def made(mode):
    torch.manual_seed(0)
    options = {"mini_batch_size": C, "window": WINDOW, "init_std": 0.4, "dtype": torch.float64}
    layer = AtlasLinear(DIM, 2, head_dim=4, **MODES[mode], **options)
    for name in ("coefficients", "alpha_proj.bias"):
        if name in dict(layer.named_parameters()):
            torch.nn.init.normal_(layer.get_parameter(name))
    return layer, torch.randn(2, 8, DIM, dtype=torch.float64)


def orthogonal(x, steps):
    x = x / x.norm(dim=(-2, -1), keepdim=True) if steps else x
    for _ in range(steps):
        square = x.mT @ x
        x = 3.4445 * x - 4.775 * x @ square + 2.0315 * x @ square @ square
    return x


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_formula_and_decoding(mode):
    """By the gradients of autograd, one token after another."""
    layer, x = made(mode)
    c = layer.config

    def part(name):
        rows = nnf.linear(x, getattr(layer, f"{name}_proj").weight)
        weight = getattr(layer, f"{name}_conv1d").weight
        rows = nnf.silu(nnf.conv1d(nnf.pad(rows.mT, (3, 0)), weight, groups=8).mT)
        rows = rows.unflatten(-1, (2, 4))
        if name == "v":
            return rows
        rows = rows / (rows.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        if layer.coefficients is None:
            return rows
        first, second = nnf.normalize(layer.coefficients, dim=-1).unbind(-1)
        squares = rows[..., None] * rows[..., None, :]  # a pair is there twice
        squares = squares * (0.5**0.5 + (1 - 0.5**0.5) * torch.eye(4, dtype=x.dtype))
        above = torch.ones(4, 4).triu().bool()
        squares = (squares * (1 + (above & ~torch.eye(4).bool())))[..., above]
        return torch.cat((first[:, None] * rows, second[:, None] * squares), -1)

    q, k, v = map(part, "qkv")
    alpha, eta, share = (
        getattr(layer, f"{name}_proj")(x).sigmoid()[..., None, None]
        for name in ("alpha", "eta", "theta")
    )
    gamma = layer.gamma_proj(x).sigmoid().unflatten(-1, (2, WINDOW)) / WINDOW
    theta = c.max_step * share / C * (1 if c.newton_schulz_steps else 1 - eta)
    memory = layer.M.detach().expand(2, -1, -1, -1)
    surprise, out = torch.zeros_like(memory), []
    for t in range(8):
        if t % C == 0:
            start = memory.clone()
        with torch.enable_grad():
            at = start.clone().requires_grad_()
            loss = 0
            for j in range(min(WINDOW, t + 1)):
                gap = torch.einsum("bhk,bhkv->bhv", k[:, t - j], at) - v[:, t - j]
                loss = loss + (gamma[:, t, :, j] * gap.square().sum(-1)).sum()
            (slope,) = torch.autograd.grad(loss, at)
        surprise = eta[:, t] * surprise - slope
        moved = orthogonal(surprise, c.newton_schulz_steps)
        memory = (1 - alpha[:, t]) * memory + theta[:, t] * moved
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], memory))
    o = torch.stack(out, 1)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * layer.o_norm.weight
    if c.gate is not None:
        o = o * nnf.silu(layer.g_proj(x).unflatten(-1, (2, 4)))
    y = layer(x)
    torch.testing.assert_close(y, nnf.linear(o.flatten(-2), layer.o_proj.weight))
    state = layer.new_state(2, 8)
    parts = [layer(x[:, a:b], state=state) for a, b in ((0, 2), (2, 3), (3, 7), (7, 8))]
    torch.testing.assert_close(torch.cat(parts, 1), y)
    assert state["position"].tolist() == [8, 8] and state["keys"].shape[:2] == (2, WINDOW - 1)


@torch.no_grad()
def test_products_of_features_are_polynomials():
    layer, _ = made("atlas")
    q, k = nnf.normalize(torch.randn(2, 1, 5, 2, 4, dtype=torch.float64), dim=-1)
    left, right = (_features(t, layer.coefficients) for t in (q, k))
    first, second = nnf.normalize(layer.coefficients, dim=-1).square().unbind(-1)
    product = (q * k).sum(-1)
    torch.testing.assert_close((left * right).sum(-1), first * product + second * product**2)


def test_gradients_reach_all_parameters():
    for mode in MODES:
        layer, x = made(mode)
        layer(x).square().sum().backward()
        assert [n for n, p in layer.named_parameters() if p.grad is None] == []


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "bound"),
    [({}, 1.1), ({"max_step": 0.5}, 0.1), ({"newton_schulz_steps": 5, "max_step": 0.05}, 0.3)],
)
@pytest.mark.parametrize("eta", [-4.0, 0.0, 4.0])
def test_equal_keys_do_not_diverge(eta, options, bound):
    """A key is seen 1024 times: memory is bounded for the largest steps, and learns with half."""
    layer = AtlasLinear(4, 1, conv_size=0, mini_batch_size=16, **options)
    for name, value in (("theta", 50.0), ("alpha", -50.0), ("gamma", 50.0), ("eta", eta)):
        proj = layer.get_submodule(f"{name}_proj")
        proj.weight.zero_()
        proj.bias.fill_(value)
    key = torch.tensor([1.0, 0, 0, 0]).expand(1, 1024, 1, 4)
    o, _ = layer.recur(key, key, key, key[:, :, 0], cu_seqlens=None, initial_state=None)
    assert float((o - key).abs().max()) < 1.1 and float((o - key)[:, -64:].abs().max()) < bound


def test_sizes_and_errors():
    layer = AtlasLinear(12, 2, head_dim=4, v_head_dim=6, degree=2, window=5)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes["M"] == (2, 14, 6) and shapes["coefficients"] == (2, 2)
    assert shapes["gamma_proj.bias"] == (10,)
    for options, message in (
        ({"num_v_heads": 4}, "num_v_heads must be num_heads"),
        ({"max_step": 1.5}, r"max_step must be in \(0, 1\]"),
        ({"degree": 3}, "degree must be 1 or 2, got degree=3"),
        ({"window": 0}, "window must be an integer >= 1"),
    ):
        with pytest.raises(ValueError, match=f"AtlasLinear: {message}"):
            AtlasLinear(12, 2, **options)
