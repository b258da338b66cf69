"""Random features: kernels that they estimate, their stabilised mean, and the layer Performer."""

import math

import pytest
import torch
from torch.nn import functional as nnf

from omniattn import functional as F
from omniattn.modules import Performer

KINDS = ("positive", "hyperbolic", "trigonometric", "gaussian", "exp_random")
KERNELS = {
    "gaussian": lambda q, k: torch.exp(-(q - k).square().sum() / 2),
    "exp_random": lambda q, k: torch.exp((q + k).square().sum() / 2),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(steps: int = 9) -> torch.Tensor:
    return torch.randn(2, steps, 24, dtype=torch.float64, generator=generator(1))


def made(**options) -> Performer:
    torch.manual_seed(0)
    return Performer(24, 3, init_std=0.3, dtype=torch.float64, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("orthogonal", [False, True])
def test_products_estimate_the_kernel(kind, orthogonal):
    """Within five standard errors of 4000 independent estimates, which are below 4%."""
    size, rows, draws = 4, 4, 4000
    q, k = 0.7 * torch.randn(2, size, dtype=torch.float64, generator=generator(3))
    options = {"generator": generator(), "dtype": torch.float64}
    if orthogonal:  # blocks are independent of each other
        w = F.orthogonal_gaussian(draws * rows, size, **options)
    else:
        w = torch.randn(draws * rows, size, **options)
    products = [F.random_features(x, w, kind=kind, scale=1.0) for x in (q, k)]
    each = (products[0] * products[1]).unflatten(0, (-1, draws, rows)).sum((0, 2)) * draws
    error = each.std().item() / draws**0.5
    expected = KERNELS.get(kind, lambda q, k: torch.exp(q @ k))(q, k).item()
    assert error < 0.04 * expected
    assert each.mean().item() == pytest.approx(expected, abs=5 * error)


def test_the_default_scale_is_that_of_attention():
    x, w = torch.randn(3, 16, generator=generator()), torch.randn(5, 16, generator=generator(1))
    for kind in KINDS[:4]:
        expected = F.random_features(x, w, kind=kind, scale=0.25)
        assert F.random_features(x, w, kind=kind).equal(expected)
    expected = F.random_features(x, w, kind="exp_random", scale=1.0)
    assert F.random_features(x, w, kind="exp_random").equal(expected)


@pytest.mark.parametrize("rows", [3, 5, 13])
def test_rows_are_orthogonal(rows):
    w = F.orthogonal_gaussian(rows, 5, generator=generator(), dtype=torch.float64)
    assert w.shape == (rows, 5)
    for block in w.split(5):
        products = nnf.normalize(block) @ nnf.normalize(block).T
        torch.testing.assert_close(products, torch.eye(len(block), dtype=w.dtype))
    equal = F.orthogonal_gaussian(rows, 5, row_norm="sqrt_d", dtype=torch.float64)
    torch.testing.assert_close(equal.norm(dim=1), torch.full((rows,), 5**0.5, dtype=w.dtype))


def test_rows_are_distributed_as_gaussian_ones():
    """Directions of a whole block are uniform: the first one is not in a half space."""
    w = F.orthogonal_gaussian(40_000, 2, generator=generator(), dtype=torch.float64)
    assert w.mean(0).abs().max() < 0.03 and (w.T @ w / len(w) - torch.eye(2)).abs().max() < 0.03
    first = w.view(-1, 2, 2)[:, 0]
    assert first.mean(0).abs().max() < 0.04


def formula(layer: Performer, x: torch.Tensor) -> torch.Tensor:
    c = layer.config
    q, k, v = (nnf.linear(x, getattr(layer, f"{n}_proj").weight) for n in "qkv")
    q, k, v = (t.unflatten(-1, (c.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
    w = layer.projection
    q, k = (F.random_features(t, w, kind=c.kind, scale=c.scale) for t in (q, k))
    weights = q @ k.mT
    if c.causal:
        weights = weights.tril()
    o = weights @ v / weights.sum(-1, keepdim=True)
    return nnf.linear(o.transpose(1, 2).flatten(2), layer.o_proj.weight)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_formula(kind, causal):
    layer, x = made(kind=kind, causal=causal), inputs(70).requires_grad_()
    torch.testing.assert_close(layer(x), formula(layer, x))
    parameters = [x, *layer.parameters()]
    ours = torch.autograd.grad(layer(x).square().sum(), parameters)
    theirs = torch.autograd.grad(formula(layer, x).square().sum(), parameters)
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_goes_on_from_a_state(kind):
    layer, x = made(kind=kind), inputs()
    state = layer.new_state(2, 9)
    parts = [layer(part, state=state) for part in x.split([2, 1, 0, 5, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x))
    assert state.length == 9


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["positive", "hyperbolic", "exp_random"])
def test_long_vectors_do_not_overflow(kind, causal):
    layer = made(kind=kind, causal=causal).float()
    x = (inputs(70).float() * 300).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()
    # o are means of values.
    values = nnf.linear(x, layer.v_proj.weight).abs().amax()
    assert y.abs().max() <= values * layer.o_proj.weight.abs().sum(1).max() * 1.001


def test_feature_eps_is_added_to_stabilised_features():
    """As in performer-pytorch: W y of keys less its maximum over tokens and features, times
    exp(-|y|^2 / 2)."""
    layer, x = made(causal=False, feature_eps=1e-2), inputs()
    q, k, v = (nnf.linear(x, getattr(layer, f"{n}_proj").weight) for n in "qkv")
    q, k, v = (t.unflatten(-1, (3, -1)).transpose(1, 2) for t in (q, k, v))
    lengths = [(t * t.shape[-1] ** -0.25).square().sum(-1, keepdim=True) / 2 for t in (q, k)]
    q, k = (t * t.shape[-1] ** -0.25 @ layer.projection.T for t in (q, k))
    q = torch.exp(q - lengths[0] - q.amax(-1, keepdim=True)) + 1e-2
    k = torch.exp(k - lengths[1] - k.amax((-1, -2), keepdim=True)) + 1e-2
    weights = q @ k.mT
    o = weights @ v / weights.sum(-1, keepdim=True)
    expected = nnf.linear(o.transpose(1, 2).flatten(2), layer.o_proj.weight)
    torch.testing.assert_close(layer(x), expected)


def test_redraw_and_copies():
    layer = made()
    assert layer.projection.shape == (math.floor(8 * math.log(8)), 8)
    assert "projection" in layer.state_dict()
    before = layer.projection.clone()
    layer.redraw(generator())
    after = layer.projection.clone()
    assert not after.equal(before)
    layer.redraw(generator())
    assert layer.projection.equal(after)
    free = made(orthogonal=False, features=5)
    assert free.projection.shape == (5, 8)


def test_more_features_are_nearer_to_softmax():
    x, errors = 0.4 * inputs(), []
    for features in (8, 4096):
        layer = made(features=features, kind="hyperbolic")
        q, k, v = (nnf.linear(x, getattr(layer, f"{n}_proj").weight) for n in "qkv")
        q, k, v = (t.unflatten(-1, (3, -1)).transpose(1, 2) for t in (q, k, v))
        o = nnf.scaled_dot_product_attention(q, k, v, is_causal=True)
        expected = nnf.linear(o.transpose(1, 2).flatten(2), layer.o_proj.weight)
        errors.append((layer(x) - expected).norm() / expected.norm())
    assert errors[1] < 0.03 and errors[1] < 0.2 * errors[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Performer(8, 3), "dim must be a multiple of num_heads"),
        (lambda: Performer(8, 2, kind="cosine"), "kind must be .*'cosine'"),
        (lambda: Performer(8, 2, features=0), "features must be an integer >= 1, got"),
        (lambda: Performer(8, 2, row_norm="one"), "row_norm must be .*'one'"),
        (lambda: Performer(8, 2, feature_eps=0.1), "feature_eps must be 0 where causal=True"),
        (lambda: Performer(8, 2, causal=False).new_state(1, 1), "a state must have causal=True"),
        (lambda: F.orthogonal_gaussian(0, 2), "rows must be"),
        (
            lambda: F.random_features(torch.ones(3), torch.ones(2, 4)),
            r"weight must have .*\(2, 4\)",
        ),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
