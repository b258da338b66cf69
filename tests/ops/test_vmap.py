"""torch.vmap over tensors that no OpSpec has: of masks and scores, closed over, drawn; one call.

Every single tensor argument of every op, and all together: `mapped` in test_specs.py.
"""

from collections import Counter
from functools import partial

import pytest
import torch
from torch.func import grad, jacfwd, jacrev, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from omniattn import functional as F
from omniattn.functional import masks, scores

Q, K, V = (torch.randn(2, t, 2, 4, dtype=torch.float64) for t in (5, 6, 6))

#: Name: (a mask or score of a tensor, as options of attention; the batch of the tensor)
SIDES = {
    "boolean": (lambda t: {"mask": t}, torch.rand(3, 2, 1, 5, 6) < 0.6),
    "padding": (lambda t: {"mask": masks.KeyPadding(t)}, torch.rand(3, 2, 6) < 0.6),
    "lengths": (lambda t: {"mask": masks.KeyLengths(t)}, torch.tensor([[1, 6], [5, 2], [0, 3]])),
    "prefix": (lambda t: {"mask": masks.PrefixLM(t)}, torch.tensor([[1, 6], [5, 2], [0, 3]])),
    "documents": (
        lambda t: {"mask": masks.Documents(t[:, :5], t) & masks.Causal()},
        torch.randint(3, (3, 2, 6)),
    ),
    "blocks": (
        lambda t: {"mask": masks.Blocks.from_block_mask(t)},
        torch.tensor([True, False, True]).view(3, 1, 1, 1, 1),
    ),
    "t5": (
        lambda t: {"relative": scores.T5Bias(t, max_distance=4)},
        torch.randn(3, 8, 2, dtype=torch.float64),
    ),
    "rows": (
        lambda t: {
            "relative_keys": scores.DistanceRows(t, 2),
            "relative_queries": scores.DistanceRows(t, 5),
        },
        torch.randn(3, 8, 2, 4, dtype=torch.float64),
    ),
    "seed": (lambda t: {"dropout_p": 0.5, "seed": t}, torch.randint(99, (3, 2))),
}


@pytest.mark.parametrize("name", SIDES)
@pytest.mark.parametrize("q_too", [False, True])
def test_tensors_of_masks_and_scores(name, q_too):
    options, batch = SIDES[name]
    qs = torch.stack([Q, -Q, 2 * Q]) if q_too else Q.expand(3, *Q.shape)

    def attention(q, t):
        return F.attention(q, K, V, **options(t))

    def loss(q, t):
        return attention(q, t).square().sum()

    for function in (attention, grad(loss)):
        got = vmap(function, (0 if q_too else None, 0))(qs if q_too else Q, batch)
        each = [function(q, t) for q, t in zip(qs, batch, strict=True)]
        torch.testing.assert_close(got, torch.stack(each))


def test_nested_with_tensors_closed_over():
    biases = torch.randn(2, 3, 2, 5, 6, dtype=torch.float64)
    sinks = torch.randn(2, 2, dtype=torch.float64)

    def outer(bias, sinks):
        def loss(bias, q):
            return F.attention(q, K, V, bias=bias, sinks=sinks).square().sum()

        return vmap(grad(loss, argnums=(0, 1)), (0, None))(bias, Q)

    got = vmap(outer, in_dims=(1, 0), out_dims=1)(biases.transpose(0, 1), sinks)
    for i in range(2):
        want = outer(biases[i], sinks[i])
        torch.testing.assert_close([g[:, i] for g in got], list(want))


def test_jacobians():
    bias, weight = torch.randn(2, 5, 6, dtype=torch.float64), torch.randn(4, dtype=torch.float64)

    def attention(bias):
        return F.attention(Q, K, V, bias=bias)[0, :2, 0]

    def norm(weight):
        return F.rms_norm(Q, weight)[0, :2, 0]

    for function, x in ((attention, bias), (norm, weight)):
        want = torch.autograd.functional.jacobian(function, x)
        torch.testing.assert_close(jacrev(function)(x), want)
        torch.testing.assert_close(jacfwd(function)(x), want)


def test_second_derivatives_by_vjp_alone():
    """torch.func.vjp returns a function that differentiates once its level has ended."""
    x, up, weight, u = torch.randn(4, 5, dtype=torch.float64)
    weight.requires_grad_()

    def loss(x, **options):
        y = F.swiglu(F.rms_norm(x, weight, **options), up, **options)
        return y.sin().sum()

    of_ops, expected = (partial(loss, backend=b) for b in (None, "reference"))
    wanted = jacrev(grad(expected))(x)
    torch.testing.assert_close(jacrev(grad(of_ops))(x), wanted)
    (found, by_weight), (want, want_by_weight) = (
        (hvp := vjp(grad(f), x)[1](u)[0], torch.autograd.grad(hvp.sum(), weight)[0])
        for f in (of_ops, expected)
    )
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(by_weight, want_by_weight)
    product = vjp(grad(lambda x: of_ops(x).square()), x)[1]
    reference = vjp(grad(lambda x: expected(x).square()), x)[1]
    torch.testing.assert_close(*(jacrev(lambda u, f=f: f(u)[0])(u) for f in (product, reference)))


@pytest.mark.parametrize("batch", [1, 2])
def test_jacobians_of_what_is_not_mapped_over(batch):
    """For a batch of one, the tensor saved for the backward is a view."""
    x = torch.randn(batch, 3, 1, 4, dtype=torch.float64)
    recurrent = torch.randn(4, 1, 4, 4, dtype=torch.float64)
    for function in (
        lambda x: F.gated_linear_attention(x, x, x, -x.abs())[0][0, :2, 0, 0],
        lambda x: F.slstm(x.repeat(1, 1, 4, 1)[..., None, :], recurrent)[0][0, :2, 0],
    ):
        want = torch.autograd.functional.jacobian(function, x)
        torch.testing.assert_close(jacrev(function)(x), want)


@pytest.mark.parametrize(
    "function", [lambda x: F.dropout(x, 0.5), lambda x: F.attention(x, x, x, dropout_p=0.5)]
)
def test_randomness(function):
    x = torch.randn(2, 5, 2, 4).expand(3, 2, 5, 2, 4)
    a, b, c = vmap(function, randomness="different")(x)
    assert not torch.equal(a, b) and not torch.equal(b, c)
    a, b, c = vmap(function, randomness="same")(x)
    assert torch.equal(a, b) and torch.equal(b, c)
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(function)(x)


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "omniattn":
            self.calls[func._schema.name.removeprefix("omniattn::")] += 1
        return func(*args, **(kwargs or {}))


COS = torch.randn(5, 2, dtype=torch.float64)
WEIGHT = torch.randn(4, dtype=torch.float64)
FOLDED = {
    "attention": lambda x: F.attention(x, x, x, causal=True, window_size=(2, 0)),
    "norm": lambda x: F.rms_norm(x, WEIGHT),
    "gated_norm": lambda x: F.rms_norm_gated(x, x, WEIGHT),
    "rope": lambda x: F.apply_rotary(x, None, COS, COS)[0],
    "norm_rope": lambda x: F.qk_norm_rotary(x, None, COS, COS, q_weight=WEIGHT)[0],
    "glu": lambda x: F.swiglu(x, x),
    # Requests our kernel: `linear` uses torch's where that is faster.
    "linear": lambda x: F.linear(x, WEIGHT.expand(3, 4), backend="cpu"),
}


@pytest.mark.parametrize("name", FOLDED)
def test_a_batch_of_problems_is_one_call(name):
    x = torch.randn(5, 2, 5, 2, 4, dtype=torch.float64)
    function = FOLDED[name]
    with Counted() as counted:
        vmap(grad(lambda x: function(x).square().sum()))(x)
    backward = "rope_raw" if name == "rope" else f"{name}_backward"
    assert counted.calls == Counter([f"{name}_raw", backward])


def test_what_vmap_cannot_map_over_is_named():
    q, cu = Q[0], torch.tensor([[0, 2, 5], [0, 1, 5]])
    with pytest.raises(ValueError, match="max_seqlen_q must be given where vmap"):
        vmap(lambda cu: F.attention_varlen(q, q, q, cu, cu))(cu)
    with pytest.raises(NotImplementedError, match="attention_cached: cache_seqlens must not be"):
        vmap(lambda n: F.attention_cached(Q, K, V, n, backend="reference"))(cu[:, :2])
    with pytest.raises(ValueError, match="norm: vmap must be over at least one element"):
        vmap(F.rms_norm, (0, None))(torch.ones(0, 2, 4), torch.ones(4))
    with pytest.raises(ValueError, match="with inplace q and k must be mapped over by vmap"):
        vmap(lambda cos: F.apply_rotary(Q.clone(), None, cos, COS, inplace=True))(COS[None])


def test_positions_of_packed_sequences():
    cu = torch.tensor([[0, 2, 5], [0, 1, 5]])
    got = vmap(lambda cu: F.packed_positions(cu, 5))(cu)
    assert torch.equal(got, torch.stack([F.packed_positions(c, 5) for c in cu]))


@pytest.mark.parametrize(
    "rotate",
    [
        lambda cos, sin: F.apply_rotary(Q, None, cos, sin)[0],
        lambda cos, sin: F.qk_norm_rotary(Q, None, cos, sin)[0],
    ],
    ids=["apply_rotary", "qk_norm_rotary"],
)
def test_gradients_that_rotary_tables_do_not_get_are_refused_around_vmap(rotate):
    cos, sin = torch.randn(3, 5, 2, dtype=Q.dtype), torch.randn(5, 2, dtype=Q.dtype)
    with pytest.raises(NotImplementedError, match="cos and sin get no gradient"):
        grad(lambda c: vmap(lambda one: rotate(one, sin))(c).sum())(cos)
    cos.requires_grad_()
    with pytest.raises(NotImplementedError, match="cos and sin get no gradient"):
        vmap(lambda one: rotate(one, sin))(cos).sum().backward()
