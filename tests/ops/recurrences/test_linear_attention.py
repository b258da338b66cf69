"""linear_attention: weighted means, feature maps, gates, divisors and their gradients, errors."""

import pytest
import torch
from recurrence_cases import decays, draw, pairwise, qkv
from torch.nn import functional as nnf

from omniattn import functional as F
from omniattn.encoding.sequences import Sequences
from omniattn.functional.recurrences._common import run
from omniattn.ops.recurrence import FEATURE_MAPS

PHI = {
    "identity": lambda x: x,
    "elu1": lambda x: nnf.elu(x) + 1,
    "relu": torch.relu,
    "squared_relu": lambda x: torch.relu(x) ** 2,
    "exp": torch.exp,
}


@pytest.mark.parametrize(
    "feature_map", ["elu1", "relu", "squared_relu", "exp", "softmax", "taylor"]
)
def test_linear_attention_is_a_mean(feature_map):
    q, k, v = qkv()
    q, k = q.abs(), k.abs()  # so that no denominator of relu is 0
    if feature_map == "taylor":
        u = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        weight = 1 + u + u * u / 2
    else:
        phi = PHI.get(feature_map, lambda x: x.softmax(-1))
        weight = torch.einsum("bihd,bjhd->bhij", phi(q), phi(k))
    for causal in (True, False):
        w = weight.tril() if causal else weight
        expected = torch.einsum("bhij,bjhv->bihv", w / w.sum(-1, keepdim=True), v)
        o, _ = F.linear_attention(q, k, v, feature_map=feature_map, causal=causal)
        torch.testing.assert_close(o, expected)


def test_linear_attention_of_a_function():
    q, k, v = qkv()
    phi = lambda x: torch.cat((x.sin(), x.cos()), -1)  # noqa: E731
    weight = torch.einsum("bihd,bjhd->bhij", phi(q / 2), phi(k / 2)).tril()
    o, state = F.linear_attention(q, k, v, feature_map=phi, scale=0.25)
    torch.testing.assert_close(o, torch.einsum("bhij,bjhv->bihv", weight, v))
    assert state.shape == (2, 2, 16, 5)


def test_gates_of_linear_attention():
    """A mean whose weights decay, for each feature: token by token."""
    q, k, v = qkv()
    g, beta = decays(*k.shape), draw(*k.shape).sigmoid()
    num, den, every = 0, 0, []
    for t in range(k.shape[1]):
        new = beta[:, t] * (nnf.elu(k[:, t]) + 1)
        num = g[:, t, :, :, None].exp() * num + new[..., None] * v[:, t, :, None]
        den = g[:, t].exp() * den + new
        phi = nnf.elu(q[:, t]) + 1
        expected = torch.einsum("bhk,bhkv->bhv", phi, num) / (phi * den).sum(-1, keepdim=True)
        every.append(expected)
    o, _ = F.linear_attention(q, k, v, g=g, beta=beta)
    torch.testing.assert_close(o, torch.stack(every, 1))


def test_gates_of_linear_attention_are_checked():
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"beta must have shape .*, got beta.shape=\(2,\)"):
        F.linear_attention(q, k, v, beta=torch.ones(2))
    with pytest.raises(
        ValueError, match=r"g must be None where causal=False, got g=Tensor of shape"
    ):
        F.linear_attention(q, k, v, g=decays(*k.shape), causal=False)


def test_small_denominators_keep_their_sign():
    q, k, v = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1, 1), -1e-9), torch.ones(1, 1, 1, 1)
    o, _ = F.linear_attention(q, k, v, feature_map="identity", normalize=True, eps=1e-3)
    torch.testing.assert_close(o.item(), 1e-6)
    o, _ = F.linear_attention(q, -k, v, feature_map="identity", normalize=True, eps=1e-3)
    torch.testing.assert_close(o.item(), 1e-6)


def divided(x, sums, min_denominator, eps):
    if min_denominator is not None:
        return x / (torch.maximum(sums.abs(), min_denominator[..., None]) + eps)
    sign = 1 - 2 * (sums < 0).double()
    return x / torch.where(sums.abs() < eps, sign * eps, sums)


@pytest.mark.parametrize("steps", [3, 70])
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize("given", ["eps", "min_denominator"])
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_divisors(feature_map, given, decay, steps):
    """Half of the sums of weights are too small; key heads are shared, and values have factors."""
    q, k, v = (t[:, :steps] for t in qkv(heads=2, v_heads=4))
    rates, beta = decays(2, 70, 4, 8)[:, :steps], draw(2, 70, 4, seed=4)[:, :steps]
    if decay != "channel":
        rates = rates[..., 0] if decay == "head" else torch.zeros_like(rates[..., 0])
    for t in (q, k, v, beta, rates):
        t.requires_grad_()
    g = rates if decay == "channel" else rates[..., None].expand(*rates.shape, 8)
    phi_q, phi_k = PHI[feature_map](q), PHI[feature_map](k)
    ones = torch.cat((v, torch.ones_like(v[..., :1])), -1) * beta[..., None]
    sums = 8**0.5 * pairwise(phi_q, phi_k, ones, g)
    sizes = sums[..., -1].detach().abs()
    if given == "eps":
        min_denominator, eps = None, 1.01 * sizes.median().item()
    else:
        min_denominator, eps = sizes.median() * draw(2, 70, 4, seed=5)[:, :steps].exp(), 0.1
        min_denominator.requires_grad_()
    expected = 0.5 * divided(sums[..., :-1], sums[..., -1:], min_denominator, eps)
    to_end = (g.flip(1).cumsum(1).flip(1) - g).exp() * phi_k.repeat_interleave(2, 2)
    last = torch.einsum("bthk,bthv->bhkv", to_end, ones)

    options = {"feature_map": feature_map, "normalize": True, "eps": eps}
    gates = {"beta": beta, "min_denominator": min_denominator}
    given_rates = None if decay == "none" else rates
    o, state = run("op", q, k, v, given_rates, 0.5, Sequences(), **gates, **options)
    torch.testing.assert_close((o, state), (expected, last))
    leaves = [t for t in (q, k, v, beta, min_denominator, given_rates) if t is not None]
    ours, theirs = (
        torch.autograd.grad(x.square().sum() + (y * last.detach().sin()).sum(), leaves)
        for x, y in ((o, state), (expected, last))
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("feature_map", ["elu1", "relu", "squared_relu", "exp"])
def test_features_of_halves_are_not_rounded(feature_map, dtype):
    """One rounding of the output: the sums of 300 tokens are far beyond the digits of a half."""
    q, k, v = (t.to(dtype) for t in qkv(steps=300))
    q, k = q.abs(), k.abs()
    o, _ = F.linear_attention(q, k, v, feature_map=feature_map)
    exact, _ = F.linear_attention(*(t.double() for t in (q, k, v)), feature_map=feature_map)
    torch.testing.assert_close(o, exact.to(dtype), rtol=1.1 * torch.finfo(dtype).eps, atol=2e-6)


@pytest.mark.parametrize("steps", [3, 70])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_state_of_features_continues(normalize, steps):
    q, k, v = qkv()
    options = {"normalize": normalize}
    whole, last = F.linear_attention(q, k, v, **options)
    state, parts = None, []
    for first in range(0, 70, steps):
        part = slice(first, first + steps)
        o, state = F.linear_attention(
            *(t[:, part] for t in (q, k, v)), initial_state=state, **options
        )
        parts.append(o)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("feature_map", ["elu1", "exp"])
def test_extreme_inputs_of_features(feature_map):
    """Features that are 0, and sums at the ends of the range."""
    q, k, v = (t.float() for t in qkv(steps=40))
    k[:, ::2] = -1e4
    q[:, 1] = -torch.inf
    for t in (q, k, v):
        t.requires_grad_()
    o, _ = F.linear_attention(q, k, v, feature_map=feature_map)
    expected, _ = F.linear_attention(q, k, v, feature_map=feature_map, backend="reference")
    torch.testing.assert_close(o, expected)
    assert o[:, 1].eq(0).all()
    ours, theirs = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (o, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("size", [9e37, 3e38])
@pytest.mark.parametrize("steps", [1, 9])
def test_sums_whose_inverse_is_no_normal_number(steps, size):
    q, v = torch.full((1, steps, 1, 1), size), torch.full((1, steps, 1, 1), 0.5)
    k = torch.zeros(1, steps, 1, 1)
    k[:, 0] = 1
    o, _ = F.linear_attention(q, k, v, feature_map="relu")
    torch.testing.assert_close(o, v)


def test_sums_are_not_rounded_under_autocast():
    inputs = [t.float() for t in qkv()]
    for causal in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            o, _ = F.linear_attention(*inputs, causal=causal)
        assert torch.equal(o, F.linear_attention(*inputs, causal=causal)[0])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"beta": "x"}, TypeError, "beta must be a torch.Tensor, got beta='x'"),
        ({"feature_map": lambda x: None}, TypeError, "give a torch.Tensor, got None"),
        ({"feature_map": lambda x: x[:, 1:]}, ValueError, r"of shape \(2, 70, 2, K'\), got"),
        ({"feature_map": lambda x: x[:, :, :1]}, ValueError, r"of shape \(2, 70, 2, K'\), got"),
        ({"feature_map": lambda x: x.half()}, TypeError, "of dtype torch.float64, got"),
    ],
)
def test_errors(changed, error, message, causal):
    with pytest.raises(error, match=f"linear_attention: .*{message}"):
        F.linear_attention(*qkv(), causal=causal, **changed)


def test_feature_maps_of_unlike_sizes_are_refused():
    sizes = iter((4, 3))
    with pytest.raises(ValueError, match="as many features of k as of q, got 3 and 4"):
        F.linear_attention(*qkv(), feature_map=lambda x: x[..., : next(sizes)])


@pytest.mark.parametrize("name", ["g", "initial_state"])
def test_what_only_causal_calls_take(name):
    with pytest.raises(ValueError, match=f"{name} must be None where causal=False, got {name}="):
        F.linear_attention(*qkv(), causal=False, **{name: [1]})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"feature_map": 5}, r"feature_map must be in \[0, 5\), got 5"),
        ({"feature_map": -1}, r"feature_map must be in \[0, 5\), got -1"),
        ({"feature_map": 1, "delta": True}, "feature_map must be 0 with any of delta"),
        ({"normalize": True, "delta": True}, "normalize and any of delta"),
        ({"normalize": True, "skip": torch.ones(2, 2, 5)}, "normalize and any of delta"),
        (
            {"min_denominator": torch.ones(2, 70, 2)},
            "min_denominator needs normalize, got normalize=false",
        ),
        (
            {"normalize": True, "min_denominator": torch.ones(2, 70, 1)},
            "min_denominator must have shape",
        ),
        ({"normalize": True, "eps": -1.0}, "eps must be finite and >= 0, got -1"),
        ({"normalize": True, "eps": float("inf")}, "eps must be finite and >= 0, got inf"),
        ({"normalize": True, "initial_state": torch.zeros(2, 2, 8, 5)}, "initial_state must"),
    ],
)
def test_errors_of_the_op(changed, message):
    q, k, v = (t.float() for t in qkv())
    given = {"q": q, "k": k, "v": v, "scale": 1.0, "delta": False, "feature_map": 0}
    given |= {
        "normalize": False,
        "eps": 0.0,
        "fp32_output": False,
        "beta": torch.ones(2, 70, 2),
    } | changed
    names = (
        "g",
        "beta",
        "bonus",
        "a",
        "b",
        "skip",
        "min_denominator",
        "gv",
        "initial_state",
        "cu_seqlens",
    )
    with pytest.raises(RuntimeError, match=message):
        torch.ops.omniattn.recurrence(**(dict.fromkeys(names) | given))
