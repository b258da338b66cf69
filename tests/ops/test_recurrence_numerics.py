"""Recurrences where rounding hurts: keys that repeat each other with beta near 2, strong decays of
heads, gates of mLSTM far below 0."""

import pytest
import torch
from baselines import BASELINES
from recurrence_cases import draw, qkv
from torch.nn import functional as nnf

from omniattn import functional as F
from omniattn import testing


def repeating(steps: int, size: int = 32, heads: int = 2):
    """Keys whose cosines are 0.99, and betas from 1.9 to 2: each step turns the state around, and
    the inverse of a chunk has large elements of both signs."""
    q, _, v = qkv(steps, heads, heads, size, 24)
    common = nnf.normalize(draw(1, 1, heads, size, seed=1), dim=-1)
    own = nnf.normalize(draw(2, steps, heads, size, seed=4), dim=-1)
    k = nnf.normalize(common + 0.1 * own, dim=-1)
    beta = 2 - 0.1 * draw(2, steps, heads, seed=5).sigmoid()
    g = -0.01 * draw(2, steps, heads, size, seed=6).sigmoid()
    return q, k, v, g, beta


#: By name, the arguments of q, k, v, g and beta.
RULES = {
    "delta_rule": lambda q, k, v, g, beta: (q, k, v, beta),
    "gated_delta_rule": lambda q, k, v, g, beta: (q, k, v, g[..., 0], beta),
    "kimi_delta_attention": lambda q, k, v, g, beta: (q, k, v, g, beta),
    "dplr_delta_rule": lambda q, k, v, g, beta: (q, k, v, -k, beta[..., None] * k, g),
    "rwkv7": lambda q, k, v, g, beta: (q, g, k, v, -k, beta[..., None] * k),
}


def results(function, given, **options):
    """Outputs, state and gradients of tensors that are leaves."""
    leaves = [t.detach().requires_grad_() for t in given]
    o, state = function(*leaves, **options)
    return o, state, *torch.autograd.grad(o.square().sum() + state.square().sum(), leaves)


def error(found, exact) -> float:
    """Relative, in the mean of squares."""
    return ((found.double() - exact).square().mean() / exact.square().mean()).sqrt().item()


@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize("name", RULES)
def test_keys_that_repeat_each_other_with_beta_near_2(name, isa):
    """No further from fp64 than twice what a chunk form in eager fp32 is, which solves the same
    systems: a loop over the tokens is 10 times closer, but no chunk form is."""
    pytest.importorskip("transformers")
    exact_inputs = [t.float().double() for t in RULES[name](*repeating(200))]
    single = [t.float() for t in exact_inputs]
    exact = results(getattr(F, name), exact_inputs, backend="reference")
    with testing.isa(isa):
        ours = results(getattr(F, name), single)
    plain = next(iter(BASELINES[name].values()))
    theirs = results(plain, single)
    for n, (a, b, e) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert error(a, e) <= 2 * error(b, e) + 1e-6, n
