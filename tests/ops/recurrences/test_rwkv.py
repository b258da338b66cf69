"""RWKV-5, 6 and 7 and transitions of low rank: pairwise formulas, the loops of papers, errors."""

import pytest
import torch
from recurrence_cases import decays, draw, pairwise, qkv
from torch.nn import functional as nnf

from omniattn import functional as F

BACKENDS = [None, "reference"]


def unit_rows(*shape: int, seed: int) -> torch.Tensor:
    return nnf.normalize(draw(*shape, seed=seed), dim=-1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("v_heads", [2, 6])
def test_rwkv6(backend, v_heads):
    """By pairs j < i with the decays between them, and a token's own by the bonus."""
    r, k, v = qkv(v_heads=v_heads)
    w, u = decays(2, 70, v_heads, 8), draw(v_heads, 8, seed=6)
    group = v_heads // 2
    rows = [t.repeat_interleave(group, 2) for t in (r, k)]
    # Queries that come one step early see what those of the recurrence see before their own token.
    early = torch.cat((rows[0][:, 1:], torch.zeros_like(rows[0][:, :1])), 1)
    past = pairwise(early, rows[1], v, w)[:, :-1] * 8**0.5
    past = torch.cat((torch.zeros_like(v[:, :1]), past), 1)
    own = torch.einsum("bthk,hk,bthk->bth", rows[0], u, rows[1])[..., None] * v
    o, state = F.rwkv6(r, k, v, w, u, backend=backend)
    torch.testing.assert_close(o, past + own)
    _, same = F.gated_linear_attention(r, k, v, w)
    torch.testing.assert_close(state, same)
    o, _ = F.rwkv6(r, k, v, w, u, scale=0.5, backend=backend)
    torch.testing.assert_close(o, (past + own) / 2)


def test_constant_decays_are_those_of_all_tokens():
    r, k, v = qkv(steps=33)
    w, u = decays(2, 8).requires_grad_(), draw(2, 8, seed=6)
    repeated = w.detach().repeat(2, 33, 1, 1).requires_grad_()
    o, state = F.rwkv6(r, k, v, w, u)
    expected = F.rwkv6(r, k, v, repeated, u)
    torch.testing.assert_close((o, state), expected)
    (dw,), (every,) = (
        torch.autograd.grad(x.sum(), y) for x, y in ((o, w), (expected[0], repeated))
    )
    torch.testing.assert_close(dw, every.sum((0, 1)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dplr_delta_rule(backend):
    """The gated delta rule is one: its probe and its keys are k, its decay comes first."""
    q, k, v = qkv()
    beta, g = draw(2, 70, 2, seed=4).sigmoid(), decays(2, 70, 2, 8)
    decay, beta_k = g.exp(), beta[..., None] * k
    expected = F.kimi_delta_attention(q, k, v, g, beta)
    ours = F.dplr_delta_rule(q, beta_k, v, decay * k, -beta_k, g, backend=backend)
    torch.testing.assert_close(ours, expected)
    of_heads = g[..., 0]
    ours = F.dplr_delta_rule(q, beta_k, v, decay[..., :1] * k, -beta_k, of_heads, backend=backend)
    torch.testing.assert_close(ours, F.gated_delta_rule(q, k, v, of_heads, beta))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rwkv7(backend):
    """The loop of its paper, on states (V, K)."""
    r, k, v = qkv(steps=40)
    w, kk = decays(2, 40, 2, 8), unit_rows(2, 40, 2, 8, seed=7)
    alpha = draw(2, 40, 2, 8, seed=8).sigmoid()
    state, outputs = torch.zeros(2, 2, 5, 8).double(), []
    for t in range(40):
        transition = (
            torch.diag_embed(w[:, t].exp()) - kk[:, t, :, :, None] @ ((kk * alpha)[:, t, :, None])
        )
        state = state @ transition + v[:, t, :, :, None] @ k[:, t, :, None]
        outputs.append((state @ r[:, t, :, :, None])[..., 0])
    o, final = F.rwkv7(r, w, k, v, -kk, kk * alpha, backend=backend)
    torch.testing.assert_close(o, torch.stack(outputs, 1))
    torch.testing.assert_close(final, state.mT)


def rwkv6_call(**changed):
    r, k, v = qkv(4)
    given = {"r": r, "k": k, "v": v, "w": decays(2, 4, 2, 8), "u": torch.ones(2, 8)}
    return F.rwkv6(**(given | changed))


def dplr_call(**changed):
    q, k, v = qkv(4)
    given = {"q": q, "k": k, "v": v, "a": k, "b": k, "g": decays(2, 4, 2)}
    return F.dplr_delta_rule(**(given | changed))


@pytest.mark.parametrize(
    ("function", "changed", "error", "message"),
    [
        (
            rwkv6_call,
            {"r": draw(2, 4, 8)},
            ValueError,
            r"r must have shape \(B, T, H, K\), got r.sh",
        ),
        (
            rwkv6_call,
            {"k": draw(2, 4, 2, 7)},
            ValueError,
            r"k must have shape \(2, 4, 2, 8\), got k",
        ),
        (
            rwkv6_call,
            {"w": decays(2, 4, 2)},
            ValueError,
            r"w must have shape \(2, 4, 2, 8\) or \(2, 8\), got w.shape=\(2, 4, 2\)",
        ),
        (rwkv6_call, {"u": draw(8)}, ValueError, r"u must have shape \(2, 8\), got u.shape=\(8,\)"),
        (
            rwkv6_call,
            {"u": torch.ones(2, 8).int()},
            TypeError,
            r"u must be floating-point, got u.dt",
        ),
        (
            rwkv6_call,
            {"cu_seqlens": torch.tensor([0, 4])},
            ValueError,
            r"B must be 1 .* got r.shape",
        ),
        (rwkv6_call, {"scale": float("inf")}, ValueError, r"scale must be .*, got scale=inf"),
        (
            dplr_call,
            {"a": draw(2, 4, 2, 7)},
            ValueError,
            r"a must have shape \(2, 4, 2, 8\), got a.s",
        ),
        (
            dplr_call,
            {"b": draw(2, 4, 1, 8)},
            ValueError,
            r"b must have shape \(2, 4, 2, 8\), got b.s",
        ),
        (
            dplr_call,
            {"a": torch.ones(2, 4, 2, 8)},
            TypeError,
            r"a must have the dtype of q, got a.dtype=torch.float32",
        ),
        (
            dplr_call,
            {"g": draw(2, 4)},
            ValueError,
            r"g must have shape \(2, 4, 2\) or \(2, 4, 2, 8\)",
        ),
    ],
)
def test_errors_of_rwkv_and_dplr(function, changed, error, message):
    with pytest.raises(error, match=rf"^(rwkv6|dplr_delta_rule): .*{message}"):
        function(**changed)
