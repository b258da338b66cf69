"""Chunks, long convolutions, attention residuals and losses of fla, from their definitions.

fla-org/flash-linear-attention 0.5.2, commit bc3b101d.
"""

import itertools

import pytest
import torch
from torch.nn import functional as nnf

from omniattn.compat import fla

CU = torch.tensor([0, 0, 5, 12, 13])


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def test_places_of_chunks():
    found = fla.prepare_chunk_indices(CU, 4)
    assert found.tolist() == [[1, 0], [1, 1], [2, 0], [2, 1], [3, 0]]
    assert fla.prepare_chunk_offsets(CU, 4).tolist() == [0, 0, 2, 4, 5]
    assert fla.prepare_chunk_indices(CU.int(), 4).dtype == torch.int32


def summed(g, size, cu, reverse, scale):
    out = torch.empty_like(g)
    for a, b in itertools.pairwise(cu.tolist()):
        for start in range(a, b, size):
            part = g[:, start : min(start + size, b)]
            total = part.flip(1).cumsum(1).flip(1) if reverse else part.cumsum(1)
            out[:, start : min(start + size, b)] = scale * total
    return out


@pytest.mark.parametrize("reverse", [False, True])
def test_sums_of_chunks(reverse):
    g = draw(1, 13, 2, 3)
    options = {"reverse": reverse, "scale": 0.5, "output_dtype": None}
    row = torch.tensor([0, 13])
    for cu, given in ((CU, CU), (row, None)):
        wanted = summed(g, 4, cu, reverse, 0.5)
        names = "chunk_local_cumsum", "chunk_local_cumsum_vector"
        for name in names:
            torch.testing.assert_close(
                getattr(fla, name)(g, 4, cu_seqlens=given, **options), wanted
            )
        found = fla.chunk_local_cumsum_scalar(g[..., 0], 4, cu_seqlens=given, **options)
        torch.testing.assert_close(found, wanted[..., 0])
        wanted = summed(g, 13, cu, reverse, 0.5)
        for name in ("chunk_global_cumsum", "chunk_global_cumsum_vector"):
            torch.testing.assert_close(getattr(fla, name)(g, cu_seqlens=given, **options), wanted)
        found = fla.chunk_global_cumsum_scalar(g[..., 0], cu_seqlens=given, **options)
        torch.testing.assert_close(found, wanted[..., 0])
    assert fla.chunk_local_cumsum(g, 4).dtype == torch.float32
    with pytest.raises(ValueError, match="chunk_local_cumsum: chunk_size must be"):
        fla.chunk_local_cumsum(g, 0)
    with pytest.raises(ValueError, match="chunk_global_cumsum: s must have shape"):
        fla.chunk_global_cumsum(g[0, 0])


def test_sums_of_gates():
    g, a, bias = draw(1, 13, 2), draw(2, seed=1), draw(2, seed=2)
    gates = -a.exp() * nnf.softplus(g + bias)
    found = fla.gdn_gate_chunk_cumsum(g, a, 4, 0.5, bias, CU, output_dtype=None)
    torch.testing.assert_close(found, summed(gates, 4, CU, False, 0.5))
    g, bias = draw(1, 13, 2, 3), draw(6, seed=2)
    gates = -2 * (a.exp()[:, None] * (g + bias.view(2, 3))).sigmoid()
    found = fla.kda_gate_chunk_cumsum(g, a, 4, 0.5, bias, CU, None, lower_bound=-2.0)
    torch.testing.assert_close(found, summed(gates, 4, CU, False, 0.5))


@pytest.mark.parametrize("cu", [None, CU])
def test_inverses_of_chunks(cu):
    a = draw(1, 13, 2, 4)
    found = fla.solve_tril(a, cu, output_dtype=None)
    edges = [0, 13] if cu is None else cu.tolist()
    for first, last in itertools.pairwise(edges):
        for start in range(first, last, 4):
            end = min(start + 4, last)
            size = end - start
            part = a[0, start:end, :, :size].transpose(0, 1).tril(-1)
            inverse = (torch.eye(size).double() + part).inverse()
            torch.testing.assert_close(found[0, start:end, :, :size].transpose(0, 1), inverse)
            assert not found[0, start:end, :, size:].any()


def test_products():
    a, b, x = draw(2, 3, 4), draw(4, 5, seed=1), draw(2, 3, 5, seed=2)
    for name, function in (("", torch.clone), ("leaky_relu", nnf.leaky_relu), ("tanh", torch.tanh)):
        torch.testing.assert_close(fla.matmul(a, b, name), function(a @ b))
    torch.testing.assert_close(fla.addmm(x, a, b, 2.0, 3.0), 3 * x + 2 * a @ b)
    torch.testing.assert_close(fla.addmm(x[0], a[0], b), x[0] + a[0] @ b)
    with pytest.raises(ValueError, match="matmul: a must have shape"):
        fla.matmul(a, b.mT)


def convolved(u, k, rev=None):
    steps = u.shape[-1]
    lag = torch.arange(steps)[:, None] - torch.arange(steps)
    taps = k[..., lag.clamp(min=0)] * (lag >= 0)
    if rev is not None:
        taps = taps + rev[..., (-lag).clamp(min=0)] * (lag <= 0)
    return (taps * u[..., None, :]).sum(-1) + u


def test_long_convolutions():
    u, k, rev, mask = draw(2, 3, 7), draw(3, 9, seed=1), draw(3, 9, seed=2), draw(2, 3, seed=3)
    torch.testing.assert_close(fla.fft_conv(u, k, None, gelu=False), convolved(u, k))
    found = fla.fft_conv(u, k, mask, k_rev=rev)
    torch.testing.assert_close(found, nnf.gelu(convolved(u, k, rev)) * mask[..., None])
    layer = fla.LongConvolution(3, 9).double()
    torch.testing.assert_close(layer(u.mT), convolved(u, layer.filter).mT)
    layer = fla.ImplicitLongConvolution(3, 9, d_emb=5).double()
    t = torch.arange(9).double()
    z = torch.exp(-1j * torch.tensor([1e-4, 1.0]) * (2 * torch.pi * t / 9)[:, None])
    table = torch.cat((t[:, None] / 8, z.real, z.imag), -1)
    torch.testing.assert_close(layer.pos_emb(4)[0], table[:4], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer(u.mT), convolved(u, layer.filter(7)[0]).mT)
    with pytest.raises(ValueError, match="ImplicitLongConvolution: d_emb must be odd"):
        fla.ImplicitLongConvolution(3, 9, d_emb=4)


def test_attention_residuals():
    values, query, weight, out = draw(3, 2, 5, 4), draw(4, seed=1), draw(4, seed=2), draw(4, seed=3)
    keys = nnf.rms_norm(values, (4,), weight, 0.1)
    wanted = (keys @ (0.5 * query)).softmax(0)
    o, p = fla.fused_attnres(query, list(values), weight, None, 0.1, 0.5, return_weights=True)
    torch.testing.assert_close((o, p), ((wanted[..., None] * values).sum(0), wanted))
    normed = fla.fused_attnres(query[:, None], list(values), weight, out, 0.1, 0.5)
    torch.testing.assert_close(normed, nnf.rms_norm(o, (4,), out, 0.1))
    with pytest.raises(ValueError, match="fused_attnres: residuals must have a tensor at least"):
        fla.fused_attnres(query, [], weight)


def test_losses_of_grpo():
    logits, ref, ids = draw(3, 6, 7).requires_grad_(), draw(3, 5, seed=1), torch.arange(21) % 7
    ids, gains, mask = ids.view(3, 7), draw(3, seed=2), torch.ones(3, 5)
    mask[1, 3:] = 0
    p = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, -5:, None])[..., 0]
    kl = (ref - p).exp() - (ref - p) - 1
    wanted = (0.1 * kl - gains[:, None] * (p - p.detach()).exp()) * mask
    found, divergence = fla.fused_grpo_loss(
        logits, ref, ids, gains, completion_mask=mask, save_kl=True
    )
    torch.testing.assert_close((found, divergence), (wanted, (kl * mask).detach()))
    grads = [torch.autograd.grad(t.sum(), logits, retain_graph=True) for t in (found, wanted)]
    torch.testing.assert_close(*grads)
    old, rewards, kept = p.detach() + 0.3 * draw(3, 5, seed=3), draw(3, seed=4), mask.bool()
    a = ((rewards - rewards.mean()) / (rewards.std() + 1e-8))[:, None]
    r = (p - old).exp()
    each = -(torch.min(a * r, a * r.clamp(0.8, 1.2)) - 0.2 * kl) * kept
    found = fla.grpo_loss_with_old_logps(p, ref, old, kept, 5, rewards)
    torch.testing.assert_close(found, each.sum() / kept.sum())


def test_cross_entropy_with_a_cap():
    logits, target = draw(5, 7), torch.tensor([0, 3, -100, 6, 2])
    found, _ = fla.cross_entropy_loss(logits, target, logit_scale=3.0, logit_softcapping=2.0)
    wanted = nnf.cross_entropy(2 * (3 * logits / 2).tanh(), target, reduction="none")
    torch.testing.assert_close(found.double(), wanted)
    x, y, w = draw(5, 4), draw(5, 4, seed=1), draw(3, 4, seed=2)
    torch.testing.assert_close(fla.SwiGLULinear()(x, y, w, None), (nnf.silu(x) * y) @ w.T)
