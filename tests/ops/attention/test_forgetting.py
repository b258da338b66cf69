"""forgetting_attention: a loop over queries, strong gates, gates of 0, nested tensors, errors."""

import math

import pytest
import torch

from omniattn.functional import attention, forgetting_attention

F64 = torch.float64


def inputs(tq=20, tk=20, heads=4, kv_heads=2, batch=2, mean=0.0, dtype=F64):
    make = torch.Generator().manual_seed(0)
    shapes = ((batch, tq, heads, 8), (batch, tk, kv_heads, 8), (batch, tk, kv_heads, 5))
    q, k, v = (torch.randn(shape, generator=make, dtype=F64) for shape in shapes)
    gates = 5 * torch.randn(batch, tk, heads, generator=make, dtype=F64) + mean
    return [t.to(dtype) for t in (q, k, v, torch.nn.functional.logsigmoid(gates))]


def by_hand(q, k, v, log_f):
    """One query and head after another; each gate between key and query multiplies the weight."""
    (batch, tq, heads, dim), tk, group = q.shape, k.shape[1], q.shape[2] // k.shape[2]
    out = torch.zeros(batch, tq, heads, v.shape[3], dtype=q.dtype)
    for b, n, h in torch.cartesian_prod(*map(torch.arange, (batch, tq, heads))).tolist():
        own = n + tk - tq
        scores = torch.stack(
            [
                k[b, j, h // group] @ q[b, n, h] / math.sqrt(dim)
                + log_f[b, j + 1 : own + 1, h].sum()
                for j in range(own + 1)
            ]
        )
        out[b, n, h] = scores.softmax(0) @ v[b, : own + 1, h // group]
    return out


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("mean", [3.0, -30.0])
@pytest.mark.parametrize("sizes", [(12, 12), (3, 9), (1, 1)])
def test_the_definition(sizes, mean, backend):
    given = inputs(*sizes, mean=mean)
    torch.testing.assert_close(forgetting_attention(*given, backend=backend), by_hand(*given))


@pytest.mark.parametrize("mean", [3.0, 0.0, -30.0])
def test_sums_of_strong_gates_do_not_cancel(mean):
    """Naive sums in fp32 lose three to five digits here."""
    given = inputs(700, 700, mean=mean, batch=1, dtype=torch.float32)
    wide = [t.double() for t in given]
    want = forgetting_attention(*wide, backend="reference")
    got = forgetting_attention(*given)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)
    leaves = [t.clone().requires_grad_() for t in given]
    wide = [t.requires_grad_() for t in wide]
    grads = torch.autograd.grad(forgetting_attention(*leaves).sum(), leaves)
    wants = torch.autograd.grad(forgetting_attention(*wide, backend="reference").sum(), wide)
    for grad, want in zip(grads, wants, strict=True):
        torch.testing.assert_close(grad.double(), want, rtol=1e-4, atol=1e-4)


def test_a_gate_of_zero_hides_all_earlier_tokens():
    q, k, v, log_f = inputs(12, 12)
    log_f[:, 5] = -math.inf
    got = forgetting_attention(q, k, v, log_f)
    later = forgetting_attention(*(t[:, 5:] for t in (q, k, v, log_f)))
    torch.testing.assert_close(got[:, 5:], later)
    assert got.isfinite().all()


def test_open_gates_are_plain_attention():
    q, k, v, log_f = inputs(9, 12)
    window = {"window_size": (4, 0), "softcap": 2.0}
    got = forgetting_attention(q, k, v, torch.zeros_like(log_f), **window)
    torch.testing.assert_close(got, attention(q, k, v, causal=True, **window))


def test_nested_sequences_are_apart():
    ends, parts = torch.tensor([0, 7, 7, 20]), ((0, 7), (7, 20))
    rows = [t[0].requires_grad_() for t in inputs(20, 20, batch=1)]
    nested = [torch.nested.nested_tensor_from_jagged(t, ends) for t in rows]
    got = forgetting_attention(*nested).values()
    want = torch.cat([forgetting_attention(*(t[None, a:b] for t in rows))[0] for a, b in parts])
    torch.testing.assert_close(got, want)
    grads = torch.autograd.grad(got.square().sum(), rows)
    for grad, expected in zip(grads, torch.autograd.grad(want.square().sum(), rows), strict=True):
        torch.testing.assert_close(grad, expected)


def test_errors():
    q, k, v, log_f = inputs()
    with pytest.raises(ValueError, match=r"^forgetting_attention: log_f must have shape .2, 20, 4"):
        forgetting_attention(q, k, v, log_f[:, :, :2])
    with pytest.raises(TypeError, match=r"^forgetting_attention: log_f must not be float64 unless"):
        forgetting_attention(q.float(), k.float(), v.float(), log_f)
    with pytest.raises(
        TypeError, match=r"forgetting_attention.* unexpected keyword argument 'bias'"
    ):
        forgetting_attention(q, k, v, log_f, bias=log_f)
    rows = [torch.nested.nested_tensor_from_jagged(t[0], torch.tensor([0, 20])) for t in (q, k, v)]
    apart = torch.nested.nested_tensor_from_jagged(log_f[0], torch.tensor([0, 10, 20]))
    with pytest.raises(ValueError, match=r"^forgetting_attention: log_f must have the boundaries"):
        forgetting_attention(*rows, apart)
