"""path_attention: a loop over tokens, blocks, strong gates, calls in parts, packed sequences."""

import math

import pytest
import torch

from omniattn.functional import attention, forgetting_attention, path_attention

F64 = torch.float64


def inputs(steps=12, past=0, heads=4, kv_heads=2, batch=2, dim=6, mean=None, dtype=F64):
    make = torch.Generator().manual_seed(0)
    new, total = (batch, steps), (batch, steps + past)
    shapes = ((*new, heads, dim), (*total, kv_heads, dim), (*total, kv_heads, 5))
    q, k, v, w, beta, gates = (
        torch.randn(shape, generator=make, dtype=F64)
        for shape in (*shapes, (*new, kv_heads, dim), (*new, kv_heads), (*total, heads))
    )
    w, beta = torch.nn.functional.normalize(w, dim=-1), 2 * beta.sigmoid()
    g = [] if mean is None else [torch.nn.functional.logsigmoid(5 * gates + mean)]
    return [t.to(dtype) for t in (q, k, v, w, beta, *g)]


def by_hand(q, k, v, w, beta, g=None):
    """One token after another changes all earlier keys, as a decoder would."""
    (batch, steps, heads, dim), total, group = q.shape, k.shape[1], q.shape[2] // k.shape[2]
    out = torch.zeros(batch, steps, heads, v.shape[3], dtype=q.dtype)
    for b, h in torch.cartesian_prod(torch.arange(batch), torch.arange(heads)).tolist():
        keys, past = k[b, :, h // group].clone(), total - steps
        for i in range(steps):
            own, unit = i + past, w[b, i, h // group]
            matrix = torch.eye(dim, dtype=q.dtype) - beta[b, i, h // group] * unit.outer(unit)
            keys[:own] = keys[:own] @ matrix
            scores = keys[: own + 1] @ q[b, i, h] / math.sqrt(dim)
            if g is not None:
                decays = [g[b, j + 1 : own + 1, h].sum() for j in range(own + 1)]
                scores = scores + torch.stack(decays)
            out[b, i, h] = scores.softmax(0) @ v[b, : own + 1, h // group]
    return out


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("mean", [None, 3.0, -30.0])
@pytest.mark.parametrize("sizes", [(9, 0), (3, 6), (1, 4), (1, 0)])
def test_the_definition(sizes, mean, backend):
    given = inputs(*sizes, mean=mean)
    torch.testing.assert_close(path_attention(*given, backend=backend), by_hand(*given))


@pytest.mark.parametrize("blocks", [2, 3, 7])
def test_blocks_join_to_the_whole(blocks):
    """Numbers of blocks of 64 that are no powers of 2, and a part of one."""
    given = [t.requires_grad_() for t in inputs(64 * blocks - 5, batch=1, mean=0.0)]
    got = path_attention(*given, return_keys=True)
    want = path_attention(*given, return_keys=True, backend="reference")
    torch.testing.assert_close(got, want)
    grads, wants = (torch.autograd.grad([t.cos().sum() for t in o], given) for o in (got, want))
    torch.testing.assert_close(grads, wants)


def test_reflections_of_one_direction_alternate():
    """With w = e_0 and beta = 2, keys at odd distances have the other sign in channel 0."""
    q, k, v, w, _ = inputs(130, heads=1, kv_heads=1, batch=1)
    w, beta = torch.zeros_like(w), torch.full(w.shape[:3], 2.0, dtype=F64)
    w[..., 0] = 1
    signs = torch.ones_like(q)
    signs[:, 1::2, :, 0] = -1
    want = attention(q * signs, k * signs, v, causal=True)
    torch.testing.assert_close(path_attention(q, k, v, w, beta), want)


def test_no_matrices_is_forgetting_attention():
    q, k, v, w, beta, g = inputs(140, mean=0.0)
    got = path_attention(q, k, v, w, torch.zeros_like(beta), g, scale=0.3)
    torch.testing.assert_close(got, forgetting_attention(q, k, v, g, scale=0.3))


@pytest.mark.parametrize("mean", [3.0, -30.0])
def test_strong_gates_in_float32(mean):
    given = inputs(700, batch=1, mean=mean, dtype=torch.float32)
    leaves, wide = ([t.to(d).requires_grad_() for t in given] for d in (torch.float32, F64))
    got, want = path_attention(*leaves), path_attention(*wide)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)
    grads = torch.autograd.grad(got.sum(), leaves)
    for grad, exact in zip(grads, torch.autograd.grad(want.sum(), wide), strict=True):
        torch.testing.assert_close(grad.double(), exact, rtol=1e-4, atol=2e-4)


def test_calls_in_parts():
    given = inputs(150, mean=0.0)
    want, want_keys = path_attention(*given, return_keys=True)
    parts, keys, first = [], given[1][:, :0], 0
    for size in (70, 1, 1, 78):
        q, k, v, w, beta, g = (t[:, first : first + size] for t in given)
        v, g = (t[:, : first + size] for t in (given[2], given[5]))
        k = torch.cat([keys, k], 1)
        out, keys = path_attention(q, k, v, w, beta, g, return_keys=True)
        parts.append(out)
        first += size
    torch.testing.assert_close(torch.cat(parts, 1), want)
    torch.testing.assert_close(keys, want_keys)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_packed_sequences_are_apart(backend):
    rows = [t.requires_grad_() for t in inputs(150, batch=1, mean=0.0)]
    ends = torch.tensor([0, 7, 7, 90, 150])
    got = path_attention(*rows, cu_seqlens=ends, backend=backend)
    bounds = zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    want = torch.cat([path_attention(*(t[:, a:b] for t in rows)) for a, b in bounds if a < b], 1)
    torch.testing.assert_close(got, want)
    grads, wants = (torch.autograd.grad(o.square().sum(), rows) for o in (got, want))
    torch.testing.assert_close(grads, wants)
    nested = [torch.nested.nested_tensor_from_jagged(t[0], ends) for t in rows]
    torch.testing.assert_close(path_attention(*nested).values(), want[0])


def test_errors():
    q, k, v, w, beta, g = inputs(mean=0.0)
    for bad, message in (
        ((q, k, v, w[:, :3], beta), r"w must have shape .2, 12, 2, 6., got w.shape=.2, 3"),
        ((q, k, v, w, beta[..., :1]), r"beta must have shape .2, 12, 2., got"),
        ((q, k, v, w, beta, g[:, :3]), r"g must have shape .2, 12, 4., got"),
        ((q, k[:, :3], v[:, :3], w, beta), r"T must be at most Tk, got T=12, Tk=3"),
    ):
        with pytest.raises(ValueError, match="^path_attention: " + message):
            path_attention(*bad)
    with pytest.raises(TypeError, match=r"^path_attention: w must not be float64 unless q is"):
        path_attention(q.float(), k.float(), v.float(), w, beta)
    one = [t[:1] for t in (q, k, v, w, beta)]
    with pytest.raises(ValueError, match=r"cu_seqlens must be None with return_keys or keys of"):
        path_attention(*one, cu_seqlens=torch.tensor([0, 12]), return_keys=True)
