"""Recurrences where rounding hurts: keys that repeat each other with beta near 2, strong decays,
gates of mLSTM far below 0."""

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
        assert error(a, e) <= 2 * error(b, e), n


#: By name, the arguments of q, k, v, log-decays of heads and beta.
OF_HEADS = {
    "gated_linear_attention": lambda q, k, v, g, beta: (q, k, v, g),
    "gated_delta_rule": lambda q, k, v, g, beta: (q, k, v, g, beta),
    "dplr_delta_rule": lambda q, k, v, g, beta: (q, k, v, -k, beta[..., None] * k, g),
}


@pytest.mark.parametrize("least", [-0.0, -50.0, -1e4])
@pytest.mark.parametrize("name", [*OF_HEADS, "linear_attention"])
def test_strong_decays_of_heads(name, least):
    """No factor overflows where a chunk's sum of logarithms is far beyond what exp can undo."""
    q, k, v = qkv(130)
    beta = draw(2, 130, 2, seed=4).sigmoid()
    g = torch.where(draw(2, 130, 2, seed=3) > 0, least, -0.01).double()
    function = getattr(F, name)
    if name == "linear_attention":
        given = (q, k, v, g, beta)
        call = lambda q, k, v, g, beta, **o: function(q, k, v, g=g, beta=beta, **o)  # noqa: E731
    else:
        given, call = OF_HEADS[name](q, k, v, g, beta), function
    single = [t.float() for t in given]
    ours = results(call, single)
    exact = results(call, [t.double() for t in single], backend="reference")
    for a, e in zip(ours, exact, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rate", [1e-30, 1e-3, 1.0])
def test_retention_that_forgets_at_once_or_never(rate):
    q, k, v = (t.float() for t in qkv(130))
    gamma = torch.tensor([rate, 0.9])
    o, state = F.retention(q, k, v, gamma=gamma)
    exact = F.retention(q.double(), k.double(), v.double(), gamma=gamma, backend="reference")
    torch.testing.assert_close(o.double(), exact[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.double(), exact[1], rtol=1e-4, atol=1e-5)


def test_mlstm_where_its_stabiliser_is_below_what_exp_can_undo():
    """m falls to -100, where e^-m is no number of fp32, and comes back: against sums in fp64
    without a stabiliser, whose e^-100 is one."""
    q, k, v = (t.float() for t in qkv(30))
    i, f = torch.full((2, 30, 2), -100.0), torch.full((2, 30, 2), 2.0)
    f[:, 0] = -200.0  # forgets the m = 0 of no tokens
    i[:, 20:] = 1.0
    wide = [t.double().requires_grad_() for t in (q, k, v, i, f)]
    total = nnf.logsigmoid(wide[4]).cumsum(1)
    decay = (total[:, :, None] - total[:, None] + wide[3][:, None]).movedim(3, 1)
    weight = torch.einsum("bihd,bjhd->bhij", wide[0], wide[1]) * 8**-0.5 * decay.exp().tril()
    den = weight.sum(-1).abs().clamp(min=1)
    expected = torch.einsum("bhij,bjhv->bihv", weight / den[..., None], wide[2])
    single = [t.detach().float().requires_grad_() for t in wide]
    h, (_, _, m) = F.mlstm(*single, eps=0.0)
    assert F.mlstm(*(t[:, :15] for t in single))[1][2].max() < -80  # the bound is in use
    torch.testing.assert_close(m, torch.ones_like(m))
    assert h[:, :20].abs().max() < 1e-30 and expected[:, :20].abs().max() < 1e-30
    torch.testing.assert_close(h.double(), expected, rtol=1e-4, atol=1e-5)
    grads = torch.autograd.grad(h.square().sum(), single)
    exact = torch.autograd.grad(expected.square().sum(), wide)
    for a, e in zip(grads, exact, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-3, atol=1e-4)


#: Arguments, from q, k, v and g, of recurrences with a decay for each channel.
OF_CHANNELS = {
    "gated_linear_attention": lambda q, k, v, g, beta: (q, k, v, g),
    "rwkv6": lambda q, k, v, g, beta: (q, k, v, g, q.new_ones(q.shape[2:])),
    **{name: RULES[name] for name in ("kimi_delta_attention", "dplr_delta_rule")},
}


@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize("name", OF_CHANNELS)
def test_gates_before_a_reset_and_large_tokens(name, isa):
    """Their gradients do not drown in the contributions of later tokens, which are zero."""
    q, k, v, g, beta = repeating(40, 16)
    k = nnf.normalize(draw(*k.shape, seed=9), dim=-1)
    g[:, 5] = -200.0
    q[:, 5:], v[:, 5:] = 1e4 * q[:, 5:], 1e4 * v[:, 5:]
    found, exact = [], []
    for dtype, grads in ((torch.float32, found), (torch.float64, exact)):
        given = [t.float().to(dtype).requires_grad_() for t in (q, k, v, g, beta)]
        with testing.isa(isa):
            o = getattr(F, name)(*OF_CHANNELS[name](*given))[0]
        grads.append(torch.autograd.grad(o, given[3], torch.ones_like(o))[0][:, :5])
    assert error(found[0], exact[0]) < 1e-6
