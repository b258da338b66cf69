"""Means whose weights hold r . k and a decay: token by token, what one form is not, errors."""

import itertools

import pytest
import torch
from recurrence_cases import draw, qkv

from omniattn import functional as F

BACKENDS = [None, "reference"]


def inputs(channels: bool = False, v_heads: int = 4, steps: int = 35):
    r, k, v = qkv(steps, v_heads=v_heads)
    return r, 3 * k, v, draw(v_heads, *((5,) if channels else ()), seed=6).exp() / 4


def loop(r, k, v, w, *, present: bool) -> torch.Tensor:
    """Sums of exponentials over earlier tokens, with the r of the present token or of theirs."""
    group, w = v.shape[2] // r.shape[2], w.view(v.shape[2], -1)
    r, k = (t.repeat_interleave(group, 2) for t in (r, k))
    rows = []
    for i in range(v.shape[1]):
        num = den = 0
        for j in range(i + 1):
            score = (r[:, i if present else j] * k[:, j]).sum(-1, keepdim=True) - (i - j) * w
            num, den = num + score.exp() * v[:, j], den + score.exp()
        rows.append(num / den)
    return torch.stack(rows, 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("v_heads", [2, 4])
def test_token_by_token(backend, channels, v_heads):
    given = inputs(channels, v_heads)
    y = F.rwkv_quadratic(*given, backend=backend)
    torch.testing.assert_close(y, loop(*given, present=True))
    y, _ = F.rwkv_recurrent(*given, backend=backend)
    torch.testing.assert_close(y, loop(*given, present=False))


def test_the_two_are_different_functions():
    """Equal where r is constant; the published proof of their equality takes that for granted."""
    r, k, v, w = inputs(v_heads=2)
    one, other = F.rwkv_quadratic(r, k, v, w), F.rwkv_recurrent(r, k, v, w)[0]
    assert (one - other).abs().max() > 0.5
    r = r[:, :1].expand(r.shape)
    torch.testing.assert_close(F.rwkv_quadratic(r, k, v, w), F.rwkv_recurrent(r, k, v, w)[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_continues(backend):
    *tokens, w = inputs(channels=True)
    y, final = F.rwkv_recurrent(*tokens, w, backend=backend)
    state, parts = None, []
    for a, b in itertools.pairwise((0, 1, 1, 33, 35)):
        part, state = F.rwkv_recurrent(
            *(t[:, a:b] for t in tokens), w, initial_state=state, backend=backend
        )
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), y)
    torch.testing.assert_close(state, final)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("channels", [False, True])
def test_packed_sequences_are_apart(backend, channels):
    *tokens, w = inputs(channels)
    tokens, edges = [t[:1] for t in tokens], (0, 10, 10, 35)
    cu = torch.tensor(edges)
    quadratic = F.rwkv_quadratic(*tokens, w, cu_seqlens=cu, backend=backend)
    recurrent, _ = F.rwkv_recurrent(*tokens, w, cu_seqlens=cu, backend=backend)
    for a, b in itertools.pairwise(edges):
        part = [t[:, a:b] for t in tokens]
        torch.testing.assert_close(quadratic[:, a:b], F.rwkv_quadratic(*part, w))
        torch.testing.assert_close(recurrent[:, a:b], F.rwkv_recurrent(*part, w)[0])


@pytest.mark.parametrize("size", [1e3, -1e3])
def test_large_products_do_not_overflow(size):
    r, k, v, w = (t.float() for t in inputs())
    r = torch.cat((torch.full_like(r[..., :1], size), r[..., 1:]), -1)
    k = torch.cat((k[..., :1].abs() + 1, k[..., 1:]), -1)
    wide = [t.double() for t in (r, k, v, w)]
    for function in (F.rwkv_quadratic, lambda *given: F.rwkv_recurrent(*given)[0]):
        y, expected = function(r, k, v, w), function(*wide)
        assert y.isfinite().all()
        torch.testing.assert_close(y.double(), expected, rtol=1e-3, atol=1e-3)


R, W = torch.ones(1, 3, 2, 4), torch.ones(2)


@pytest.mark.parametrize("function", [F.rwkv_quadratic, F.rwkv_recurrent])
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"r": R[0]}, ValueError, r"r must have shape \(B, T, H, K\), got r.shape"),
        ({"k": R.double()}, TypeError, "k must have the dtype of r"),
        ({"v": torch.ones(1, 3, 3, 4)}, ValueError, "Hv a multiple of its heads"),
        ({"w": torch.ones(4)}, ValueError, r"w must have shape \(2,\) or \(2, 4\), got w.shape"),
        ({"w": torch.inf * W}, ValueError, "w must be finite"),
        ({"w": W.int()}, TypeError, "w must be floating-point"),
        (
            {"cu_seqlens": torch.tensor([0, 4])},
            ValueError,
            "must grow from 0 to the number of tokens, 3",
        ),
        ({"backend": "fast"}, ValueError, "backend must be one of"),
    ],
)
def test_errors(function, changed, error, message):
    with pytest.raises(error, match=f"^{function.__name__}: .*{message}"):
        function(**({"r": R, "k": R, "v": R, "w": W} | changed))


def test_a_state_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"^rwkv_recurrent: initial_state must have shape \(1, 3"):
        F.rwkv_recurrent(R, R, R, W, initial_state=torch.ones(1, 2, 2, 4))
