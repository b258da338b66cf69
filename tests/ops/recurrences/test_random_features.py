"""Attention by random features as a function: packed sequences, states, errors."""

import itertools

import pytest
import torch
from recurrence_cases import draw, qkv

from omniattn import functional as F

KINDS = ("positive", "hyperbolic", "trigonometric", "gaussian", "exp_random")


def inputs(steps: int = 40):
    q, k, v = qkv(steps)
    return q / 2, k, v, draw(11, 8, seed=7)


def by_pairs(q, k, v, weight, kind, causal):
    phi_q, phi_k = (F.random_features(t, weight, kind=kind) for t in (q, k))
    score = torch.einsum("bihf,bjhf->bhij", phi_q, phi_k)
    score = score.tril() if causal else score
    return torch.einsum("bhij,bjhv->bihv", score / score.sum(-1, keepdim=True), v)


def of_performer(q, k, v, weight, kind, eps):
    """The definition with feature_eps: one divisor for each query and one for all keys of a head,
    the largest W y, without the factor of the length of y."""
    y_q, y_k = (t.transpose(1, 2) * t.shape[-1] ** -0.25 for t in (q, k))
    w_q, w_k = (y @ weight.T for y in (y_q, y_k))
    if kind == "hyperbolic":
        w_q, w_k = (torch.cat((w, -w), -1) for w in (w_q, w_k))
    length_q, length_k = (y.square().sum(-1, keepdim=True) / 2 for y in (y_q, y_k))
    phi_q = torch.exp(w_q - length_q - w_q.amax(-1, keepdim=True)) + eps
    phi_k = torch.exp(w_k - length_k - w_k.amax((-1, -2), keepdim=True)) + eps
    weights = phi_q @ phi_k.mT
    return (weights @ v.transpose(1, 2) / weights.sum(-1, keepdim=True)).transpose(1, 2)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("eps", [1e-4, 1e-1])
@pytest.mark.parametrize("kind", ["positive", "hyperbolic"])
def test_feature_eps_is_that_of_performers(kind, eps, backend):
    q, k, v, weight = inputs(20)
    q, k = 3 * q, 2 * k  # long vectors, whose features are small relative to eps
    options = {"kind": kind, "causal": False, "feature_eps": eps, "backend": backend}
    leaves = [t.requires_grad_() for t in (q, k, v, weight)]
    o, _ = F.random_feature_attention(*leaves, **options)
    expected = of_performer(*leaves, kind, eps)
    torch.testing.assert_close(o, expected)
    with torch.no_grad():
        edges = (0, 7, 7, 20)
        o, _ = F.random_feature_attention(
            q[:1], k[:1], v[:1], weight, cu_seqlens=torch.tensor(edges), **options
        )
        for a, b in ((0, 7), (7, 20)):
            part = (t[:1, a:b] for t in (q, k, v))
            torch.testing.assert_close(o[:, a:b], of_performer(*part, weight, kind, eps))


@pytest.mark.parametrize("feature_eps", [1e-4, 1e-2])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_feature_eps_and_its_gradients_by_both_backends(kind, packed, feature_eps):
    tensors = [t[:1] if t.dim() == 4 else t for t in inputs(20)]
    options = {"kind": kind, "causal": False, "feature_eps": feature_eps}
    options["cu_seqlens"] = torch.tensor([0, 7, 7, 20]) if packed else None
    found = []
    for backend in (None, "reference"):
        leaves = [t.clone().requires_grad_() for t in tensors]
        o, state = F.random_feature_attention(*leaves, **options, backend=backend)
        found.append([o, *state, *torch.autograd.grad(o.square().sum(), leaves)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_each_sequence_alone(kind, causal, backend):
    q, k, v, weight = (t[:1] if t.dim() == 4 else t for t in inputs())
    options = {"kind": kind, "causal": causal, "backend": backend, "eps": 0.0}
    edges = (0, 10, 10, 40)
    o, _ = F.random_feature_attention(q, k, v, weight, cu_seqlens=torch.tensor(edges), **options)
    for a, b in ((0, 10), (10, 40)):
        part = [t[:, a:b] for t in (q, k, v)]
        expected = by_pairs(*part, weight, kind, causal)
        torch.testing.assert_close(o[:, a:b], expected)
        torch.testing.assert_close(
            F.random_feature_attention(*part, weight, **options)[0], expected
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_continues(kind):
    *tokens, weight = inputs()
    o, final = F.random_feature_attention(*tokens, weight, kind=kind)
    state, parts = None, []
    for a, b in itertools.pairwise((0, 1, 1, 33, 40)):
        part, state = F.random_feature_attention(
            *(t[:, a:b] for t in tokens), weight, kind=kind, initial_state=state
        )
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), o)
    torch.testing.assert_close(state, final)


Q, WEIGHT = torch.ones(1, 3, 2, 4), torch.ones(5, 4)
STATE = (torch.ones(1, 2, 5, 5), torch.ones(1, 2, 5))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"v": torch.ones(1, 3, 4, 4)}, ValueError, "v must have the heads of q"),
        ({"weight": torch.ones(5, 3)}, ValueError, r"weight must have shape \(m, K\)"),
        ({"kind": "cosine"}, ValueError, "kind must be one of"),
        ({"causal": 1}, TypeError, "causal must be True or False"),
        ({"feature_eps": 1e-4}, ValueError, "feature_eps must be 0 where causal=True"),
        ({"initial_state": STATE[0]}, TypeError, r"initial_state must be a tuple \(S, M\)"),
        ({"initial_state": STATE[:1] * 2}, ValueError, r"M must have shape \(1, 2, 5\)"),
        ({"initial_state": STATE, "causal": False}, ValueError, "must be None where causal=False"),
        (
            {"cu_seqlens": torch.tensor([0, 4])},
            ValueError,
            "must grow from 0 to the number of tokens, 3",
        ),
        ({"weight": None}, TypeError, "weight must be a torch.Tensor, got weight=None"),
        ({"weight": torch.ones(5, 4).int()}, TypeError, "weight must be float64.*int32"),
        ({"weight": torch.ones(5, 4) + 0j}, TypeError, "weight must be float64.*complex64"),
    ],
)
def test_errors(changed, error, message):
    with pytest.raises(error, match=f"^random_feature_attention: .*{message}"):
        F.random_feature_attention(**({"q": Q, "k": Q, "v": Q, "weight": WEIGHT} | changed))
