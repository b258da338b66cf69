"""DeltaFormer's attention: its triangular system, blocks, steps, memory, errors."""

import pytest
import torch

from omniattn import functional as F
from omniattn.compositions.recurrences import deltaformer

F64 = torch.float64


def made(batch, steps, heads=2, key=5, value=3, strength=1.0):
    torch.manual_seed(0)
    q, k = torch.randn(2, batch, steps, heads, key, dtype=F64)
    v = torch.randn(batch, steps, heads, value, dtype=F64)
    return strength * q, k, v, torch.randn(batch, steps, heads, dtype=F64)


def by_system(q, k, v, beta):
    """(1 + diag(beta) P) u = v with P the strictly lower softmax, then attention to u: what
    `naive_deltaformer_attn` of fla computes token by token."""
    steps, logits = q.shape[1], torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    seen = torch.ones(steps, steps, dtype=torch.bool).tril()
    strict = logits.masked_fill(~seen.tril(-1), -torch.inf)[:, :, 1:].softmax(-1)
    strict = torch.nn.functional.pad(strict, (0, 0, 1, 0))
    u = torch.linalg.solve(torch.eye(steps) + beta.mT[..., None] * strict, v.transpose(1, 2))
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights @ u).transpose(1, 2), u.transpose(1, 2)


@pytest.fixture(params=[4, 128])
def block(request, monkeypatch):
    monkeypatch.setattr(deltaformer, "BLOCK", request.param)


@pytest.mark.parametrize("strength", [1.0, 300.0])
@pytest.mark.parametrize("steps", [1, 4, 19])
def test_triangular_system(block, steps, strength):
    x = made(2, steps, strength=strength)
    torch.testing.assert_close(F.deltaformer_attention(*x), by_system(*x))
    ones = torch.ones_like(x[3])
    torch.testing.assert_close(F.deltaformer_attention(*x[:3]), by_system(*x[:3], ones))


def test_parts_of_a_sequence(block):
    """Parts give what the whole gives, with gradients through earlier values."""
    q, k, v, beta = x = [t.requires_grad_() for t in made(2, 19)]
    whole = F.deltaformer_attention(*x)
    outs, u = [], v[:, :0]
    for a, b in ((0, 7), (7, 8), (8, 19)):
        part = (q[:, a:b], k[:, :b], v[:, a:b], beta[:, a:b])
        o, new = F.deltaformer_attention(*part, past=u)
        outs.append(o)
        u = torch.cat((u, new), 1)
    parts = torch.cat(outs, 1), u
    torch.testing.assert_close(parts, whole)
    grads = [torch.randn_like(t) for t in whole]
    expected = torch.autograd.grad(whole, x, grads)
    torch.testing.assert_close(torch.autograd.grad(parts, x, grads), expected)


def test_beta_of_zero_is_attention(block):
    q, k, v, beta = made(2, 19)
    o, u = F.deltaformer_attention(q, k, v, 0 * beta)
    torch.testing.assert_close((o, u), (F.attention(q, k, v, causal=True), v))


def test_sequences_of_a_nested_tensor():
    """Each as alone; u has the packed rows."""
    packed, offsets = made(1, 19), torch.tensor([0, 7, 8, 19])
    nested = [torch.nested.nested_tensor_from_jagged(t[0], offsets) for t in packed]
    o, u = F.deltaformer_attention(*nested)
    for a, b in ((0, 7), (7, 8), (8, 19)):
        found = o.values()[None, a:b], u[:, a:b]
        torch.testing.assert_close(found, F.deltaformer_attention(*(t[:, a:b] for t in packed)))


def test_memory_grows_linearly():
    """The backward keeps no matrix of weights."""
    saved = []
    x = [t.float().requires_grad_() for t in made(1, 256)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        F.deltaformer_attention(*x)
    kept = {t.data_ptr(): t.numel() for t in saved}
    assert sum(kept.values()) <= sum(t.numel() for t in x) + 2 * x[2].numel() + 2 * 256 + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.ones(1, 4, 2, 4)}, "k must have shape"),
        ({"v": torch.ones(1, 5, 1, 3)}, "v must have shape"),
        ({"beta": torch.ones(1, 5, 1)}, "beta must have shape"),
        ({"past": torch.ones(1, 2, 2, 3)}, "k must have shape"),
        (
            {"past": torch.ones(1, 0, 2, 3), "cu_seqlens": torch.tensor([0, 5])},
            "past must be None with cu_seqlens",
        ),
        ({"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens"),
    ],
)
def test_errors(change, message):
    row = torch.ones(1, 5, 2, 4)
    with pytest.raises(ValueError, match=f"deltaformer_attention: .*{message}"):
        F.deltaformer_attention(**{"q": row, "k": row, "v": row[..., :3]} | change)
