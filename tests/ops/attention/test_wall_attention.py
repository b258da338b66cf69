"""wall_attention: a loop over tokens, blocks, strong gates, calls in parts, packed sequences."""

import math

import pytest
import torch

from omniattn.functional import attention, forgetting_attention, wall_attention

F64 = torch.float64


def inputs(steps=12, past=0, heads=4, kv_heads=2, batch=2, mean=0.0, dtype=F64):
    make = torch.Generator().manual_seed(0)
    new, total = (batch, steps), (batch, steps + past)
    shapes = ((*new, heads, 6), (*total, kv_heads, 6), (*total, kv_heads, 5), (*new, heads, 6))
    q, k, v, g, scalar, sinks = (
        torch.randn(shape, generator=make, dtype=F64)
        for shape in (*shapes, (*total, heads), (heads,))
    )
    g, scalar = (torch.nn.functional.logsigmoid(5 * t + mean) for t in (g, scalar))
    return [t.to(dtype) for t in (q, k, v, g, scalar, sinks)]


def call(q, k, v, g, scalar, sinks, **options):
    return wall_attention(q, k, v, g, scalar, sinks=sinks, **options)


def by_hand(q, k, v, g, scalar, sinks):
    """One token after another decays all earlier keys, as a decoder would."""
    (batch, steps, heads, dim), total, group = q.shape, k.shape[1], q.shape[2] // k.shape[2]
    out = torch.zeros(batch, steps, heads, v.shape[3], dtype=q.dtype)
    for b, h in torch.cartesian_prod(torch.arange(batch), torch.arange(heads)).tolist():
        keys = k[b, :, h // group].clone()
        for i in range(steps):
            own = i + total - steps
            keys[:own] *= g[b, i, h].exp()
            decays = [scalar[b, j + 1 : own + 1, h].sum() for j in range(own + 1)]
            scores = keys[: own + 1] @ q[b, i, h] / math.sqrt(dim) + torch.stack(decays)
            weights = torch.cat([scores, sinks[h : h + 1]]).softmax(0)[:-1]
            out[b, i, h] = weights @ v[b, : own + 1, h // group]
    return out


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("mean", [3.0, -30.0])
@pytest.mark.parametrize("sizes", [(19, 0, 4, 2), (3, 6, 2, 2), (1, 4, 2, 2), (1, 0, 4, 2)])
def test_the_definition(sizes, mean, backend):
    given = inputs(*sizes, mean=mean)
    torch.testing.assert_close(call(*given, backend=backend), by_hand(*given))


@pytest.mark.parametrize("blocks", [2, 3, 7])
def test_blocks_join_to_the_whole(blocks):
    """Numbers of blocks of 16 that are no powers of 2, and a part of one."""
    given = [t.requires_grad_() for t in inputs(16 * blocks - 5, batch=1)]
    got = call(*given, return_keys=True)
    want = call(*given, return_keys=True, backend="reference")
    torch.testing.assert_close(got, want)
    grads, wants = (torch.autograd.grad([t.cos().sum() for t in o], given) for o in (got, want))
    torch.testing.assert_close(grads, wants)


def test_equal_decays_in_all_channels_are_a_factor():
    """Open gates are plain attention; a channel whose gate closes is left out."""
    q, k, v, g, *_ = inputs(40)
    open_gates = torch.zeros_like(g)
    want = attention(q, k, v, causal=True)
    torch.testing.assert_close(wall_attention(q, k, v, open_gates), want)
    scalar = torch.nn.functional.logsigmoid(g[..., 0])
    want = forgetting_attention(q, k, v, scalar)
    torch.testing.assert_close(wall_attention(q, k, v, open_gates, scalar), want)


@pytest.mark.parametrize("mean", [3.0, 0.0, -30.0])
def test_strong_gates_in_float32(mean):
    given = inputs(300, batch=1, mean=mean, dtype=torch.float32)
    leaves, wide = ([t.to(d).requires_grad_() for t in given] for d in (torch.float32, F64))
    got, want = call(*leaves), call(*wide)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=5e-6)
    grads = torch.autograd.grad(got.sum(), leaves)
    for grad, exact in zip(grads, torch.autograd.grad(want.sum(), wide), strict=True):
        torch.testing.assert_close(grad.double(), exact, rtol=1e-4, atol=5e-5)


def test_gates_of_zero_hide_channels():
    q, k, v, g, *_ = inputs(40, batch=1)
    g = g.clone()
    g[:, 20] = -math.inf
    got = wall_attention(q, k, v, g)
    assert got.isfinite().all()
    hidden = k.clone()
    hidden[:, :20] = 0
    torch.testing.assert_close(got[:, 20:], wall_attention(q, hidden, v, g)[:, 20:])


def test_calls_in_parts():
    q, k, v, g, scalar, sinks = inputs(50, kv_heads=4)
    want, want_keys = call(q, k, v, g, scalar, sinks, return_keys=True)
    parts, keys, first = [], k[:, :0], 0
    for size in (20, 1, 1, 28):
        last = first + size
        now = (q[:, first:last], torch.cat([keys, k[:, first:last]], 1), v[:, :last])
        out, keys = call(*now, g[:, first:last], scalar[:, :last], sinks, return_keys=True)
        parts.append(out)
        first = last
    torch.testing.assert_close(torch.cat(parts, 1), want)
    torch.testing.assert_close(keys, want_keys)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_packed_sequences_are_apart(backend):
    *given, sinks = inputs(70, batch=1)
    rows = [t.requires_grad_() for t in given]
    ends = torch.tensor([0, 7, 7, 40, 70])
    got = wall_attention(*rows, sinks=sinks, cu_seqlens=ends, backend=backend)
    bounds = zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    parts = [call(*(t[:, a:b] for t in rows), sinks) for a, b in bounds if a < b]
    want = torch.cat(parts, 1)
    torch.testing.assert_close(got, want)
    grads, wants = (torch.autograd.grad(o.square().sum(), rows) for o in (got, want))
    torch.testing.assert_close(grads, wants)
    nested = [torch.nested.nested_tensor_from_jagged(t[0], ends) for t in rows]
    torch.testing.assert_close(wall_attention(*nested, sinks=sinks).values(), want[0])


def test_errors():
    q, k, v, g, scalar, sinks = inputs()
    for bad, message in (
        ((q, k, v, g[:, :3]), r"g must have shape .2, 12, 4, 6., got g.shape=.2, 3"),
        ((q, k, v, g, scalar[:, :3]), r"g_scalar must have shape .2, 12, 4., got"),
        ((q, k, v, g + 99), r"g must be <= 0, got g.max"),
        ((q, k, v, g, scalar + 99), r"g_scalar must be <= 0, got g_scalar.max"),
        ((q, k[:, :3], v[:, :3], g), r"T must be at most Tk, got T=12, Tk=3"),
        ((q[:, :3], k, v, g[:, :3]), r"Hkv must be Hq with keys of earlier calls, got Hq=4, Hkv"),
    ):
        with pytest.raises(ValueError, match="^wall_attention: " + message):
            wall_attention(*bad)
    with pytest.raises(TypeError, match=r"^wall_attention: g must not be float64 unless q is"):
        wall_attention(q.float(), k.float(), v.float(), g)
    with pytest.raises(ValueError, match=r"^wall_attention: sinks must have shape .4,., got"):
        wall_attention(q, k, v, g, sinks=sinks[:2])
