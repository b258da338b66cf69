"""Liger's attention, rotary embeddings and residual streams, from the formulas of its own tests.

linkedin/Liger-Kernel, commit ead96b61.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as nnf

from omniattn.compat import liger


def same(found, wanted, leaves):
    torch.testing.assert_close(found, wanted)
    pairs = [
        torch.autograd.grad(t.square().sum(), leaves, retain_graph=True) for t in (found, wanted)
    ]
    torch.testing.assert_close(*pairs)


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("sparse", [False, True])
def test_multi_token_attention(sparse, groups):
    layer = liger.LigerMultiTokenAttention(4, 6, 3, padding=1, groups=groups, sparse=sparse)
    layer = layer.double()
    nn.init.normal_(layer.bias)
    scores, hidden = draw(2, 4, 7, 7), torch.ones(7, 7).triu(1).bool()
    logits = scores.masked_fill(hidden, -1e9)
    weights = liger.liger_sparsemax(logits) if sparse else logits.softmax(-1)
    wanted = nnf.conv2d(weights, layer.weight, layer.bias, padding=1, groups=groups)
    same(layer(scores), wanted.masked_fill(hidden, 0.0), (scores, *layer.parameters()))
    with pytest.raises(ValueError, match="liger_multi_token_attention: the convolution must keep"):
        liger.liger_multi_token_attention(scores, layer.weight, groups=groups)
    with pytest.raises(ValueError, match="liger_multi_token_attention: scores must have shape"):
        liger.liger_multi_token_attention(scores[..., 1:], layer.weight, groups=groups)


def neighbours(steps, kernel_size, dilation):
    gap = torch.arange(steps) - torch.arange(steps)[:, None]
    return (gap.abs() <= kernel_size // 2 * dilation) & (gap % dilation == 0)


@pytest.mark.parametrize(("kernel_size", "dilation"), [(1, 1), (5, 1), (5, 3), (7, 20)])
def test_neighborhood_attention(kernel_size, dilation):
    q, k, v = (draw(2, 3, 17, 4, seed=n) for n in range(3))
    seen = neighbours(17, kernel_size, dilation)
    weights = (q @ k.mT * 0.3).masked_fill(~seen, -torch.inf).softmax(-1)
    found = liger.liger_fused_neighborhood_attention(q, k, v, kernel_size, dilation, 0.3)
    same(found, weights @ v, (q, k, v))


def test_layers_of_neighborhood_attention():
    torch.manual_seed(0)
    options = liger.LigerFusedNeighborhoodAttentionConfig(12, 3, 5, dilation=2).to_dict()
    layer, x = liger.LigerFusedNeighborhoodAttentionLayer(**options).double(), draw(2, 9, 12)
    inner = layer.attention
    normed = nnf.layer_norm(x, (12,), layer.layer_norm.weight, layer.layer_norm.bias)
    q, k, v = (
        getattr(inner, f"{n}_proj")(normed).unflatten(-1, (3, 4)).transpose(1, 2) for n in "qkv"
    )
    weights = (q @ k.mT / 2).masked_fill(~neighbours(9, 5, 2), -torch.inf).softmax(-1)
    y = inner.out_proj((weights @ v).transpose(1, 2).flatten(-2))
    same(layer(x), x + y, (x, *layer.parameters()))
    for wrong, message in (({"num_heads": 5}, "multiple"), ({"kernel_size": 4}, "be odd")):
        with pytest.raises(ValueError, match=f"LigerFusedNeighborhoodAttention: .*{message}"):
            liger.LigerFusedNeighborhoodAttentionLayer(**options | wrong)
    with pytest.raises(NotImplementedError, match="attention_mask must be None"):
        layer(x, torch.ones(2, 9))


def rotated(x, table):
    """Multiplies pairs of neighbours, as complex numbers, with a table (.., T, D / 2)."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * table[..., None, :]).flatten(-2)


def test_rotary_embeddings_of_llama_4():
    q, k = draw(2, 5, 4, 6), draw(2, 5, 2, 6, seed=1)
    table = torch.polar(torch.ones(7, 3).double(), draw(7, 3, seed=2).detach())
    found = liger.liger_llama4_text_rotary_pos_emb(q, k, table[None])
    for y, x in zip(found, (q, k), strict=True):
        same(y, rotated(x, table[:5]), (x,))
    own = torch.stack((table[:5], table[2:]))
    found = liger.liger_llama4_text_rotary_pos_emb(q, k, own)
    torch.testing.assert_close(found, (rotated(q, own), rotated(k, own)))
    for shaped in (table[:5], table[:5, None], table[None, :5, None]):
        found = liger.liger_llama4_vision_rotary_pos_emb(q, k, shaped)
        torch.testing.assert_close(found, (rotated(q, table[:5]), rotated(k, table[:5])))
    found = liger.liger_llama4_vision_rotary_pos_emb(q, k, table[:5].real)
    torch.testing.assert_close(found[0], rotated(q, table[:5].real))
    with pytest.raises(ValueError, match="liger_llama4_text_rotary_pos_emb: freqs_cis must be com"):
        liger.liger_llama4_text_rotary_pos_emb(q, k, table[:3])


def test_rotary_embeddings_of_images():
    q, k, angles = draw(5, 4, 6), draw(5, 2, 6, seed=1), draw(5, 3, seed=2).detach().repeat(1, 2)

    def turned(x):
        half = torch.cat((-x[..., 3:], x[..., :3]), -1)
        return x * angles.cos()[:, None] + half * angles.sin()[:, None]

    found = liger.liger_rotary_pos_emb_vision(q, k, angles.cos(), angles.sin())
    torch.testing.assert_close(found, (turned(q), turned(k)))


def coefficients(x, phi, b, alphas, tmax, pre_eps):
    flat = x.flatten(-2)
    mixed = flat @ phi * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
    pre, post, res = (
        part * alpha + bias
        for part, alpha, bias in zip(
            mixed.split([3, 3, 9], -1), alphas, b.split([3, 3, 9]), strict=True
        )
    )
    m = res.unflatten(-1, (3, 3)).softmax(-1) + 1e-6
    m = m / (m.sum(-2, keepdim=True) + 1e-6)
    for _ in range(tmax - 1):
        m = m / (m.sum(-1, keepdim=True) + 1e-6)
        m = m / (m.sum(-2, keepdim=True) + 1e-6)
    return pre.sigmoid() + pre_eps, 2 * post.sigmoid(), m


def test_streams():
    torch.manual_seed(0)
    layer = liger.LigerMHC(nn.Linear(4, 4), hc=3, c=4, tmax=3, pre_eps=0.1).double()
    for parameter in (layer.b, layer.alpha_pre, layer.alpha_post, layer.alpha_res):
        nn.init.normal_(parameter)
    x, alphas = draw(2, 5, 3, 4), (layer.alpha_pre, layer.alpha_post, layer.alpha_res)
    pre, post, mix = coefficients(x, layer.phi, layer.b, alphas, 3, 0.1)
    read = torch.einsum("bti,btic->btc", pre, x)
    written = post[..., None] * layer.layer(read)[..., None, :]
    wanted = torch.einsum("btoi,btic->btoc", mix, x) + written
    same(layer(x), wanted, (x, *layer.parameters()))
    given = x, layer.layer, layer.phi, layer.b, *alphas
    _, found = liger.liger_mhc_forward(*given, tmax=3, pre_eps=0.1, return_coeffs=True)
    torch.testing.assert_close(found, (pre, post, mix))
    out, inner = liger.liger_mhc_apply(x, layer.layer(read), pre, post, mix, return_x_in=True)
    torch.testing.assert_close((out, inner), (wanted, read))
    assert liger.LigerMHC(nn.Linear(4, 4), hc=2, c=4).phi.dtype == torch.float16
    half = liger.LigerMHC(nn.Linear(4, 4), hc=3, c=4)(x.bfloat16())
    assert half.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"LigerMHC: x must have shape \(2, 5, 3, 4\)"):
        layer(x[..., :2])
    with pytest.raises(ValueError, match="liger_mhc_coeffs: tmax must be"):
        liger.liger_mhc_coeffs(x, layer.phi, layer.b, *alphas, tmax=0)


def test_attention_residuals():
    v, query, weight = draw(3, 2, 5, 4), draw(4, seed=1), draw(4, seed=2)
    keys = nnf.rms_norm(v, (4,), eps=0.1) * weight
    shares = (keys * query).sum(-1, keepdim=True).softmax(0)
    wanted = (shares * v).sum(0)
    same(liger.liger_attn_res(v, query, weight, 0.1), wanted, (v, query, weight))
    torch.testing.assert_close(liger.liger_attn_res(list(v), query, weight, 0.1), wanted)
