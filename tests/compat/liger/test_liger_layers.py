"""Liger's functions and layers: norms, MLPs, activations, distances."""

from types import SimpleNamespace

import libraries
import pytest
import torch
from torch import nn
from torch.nn import functional as nnf

from omniattn.compat import liger

N = 8


def same(found, wanted, leaves):
    torch.testing.assert_close(found, wanted)
    pairs = [
        torch.autograd.grad(t.square().sum(), leaves, retain_graph=True) for t in (found, wanted)
    ]
    torch.testing.assert_close(*pairs)


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(2, 5, N, requires_grad=True)


def test_norms(x):
    w, b, residual = torch.randn(N, requires_grad=True), torch.randn(N), torch.randn(2, 5, N)
    wanted = nnf.rms_norm(x, (N,), eps=0.1) * (w + 1)
    for mode in ("llama", "gemma", "none"):
        same(liger.liger_rms_norm(x, w, 0.1, 1.0, mode), wanted, (x, w))
    y, h = liger.liger_fused_add_rms_norm(x, residual, w, 0.1)
    same(y, nnf.rms_norm(x + residual, (N,), w, 0.1), (x, w))
    torch.testing.assert_close(h, x + residual)
    same(liger.liger_layer_norm(x, w, b, 0.1), nnf.layer_norm(x, (N,), w, b, 0.1), (x, w))
    images = x.mT  # (B, 8, 5)
    wanted = nnf.group_norm(images, 2, w, b, 0.1)
    same(liger.liger_group_norm(images, w, b, N, 2, 0.1), wanted, (x, w))
    scale, shift = torch.randn(2, 2, 1, N)
    wanted = nnf.rms_norm(x, (N,), w, 1e-6) * (1 + scale) + shift
    same(liger.liger_modulated_rms_norm(x, w, scale, shift), wanted, (x, w))
    half = x.detach().bfloat16()
    llama = (nnf.rms_norm(half.float(), (N,), eps=1e-6).bfloat16() * w.bfloat16()).detach()
    torch.testing.assert_close(liger.liger_rms_norm(half, w.bfloat16().detach(), 1e-6), llama)
    plain = nnf.rms_norm(half.float(), (N,), eps=1e-6).bfloat16()
    found = liger.liger_rms_norm(half, None, 1e-6, casting_mode="none")
    torch.testing.assert_close(found, plain)
    with pytest.raises(ValueError, match="liger_rms_norm: casting_mode must be"):
        liger.liger_rms_norm(half, None, 1e-6, casting_mode="fp32")
    with pytest.raises(ValueError, match="liger_rms_norm: W must"):
        liger.liger_rms_norm(x, w[:3], 1e-6)


def test_layers_of_norms(x):
    wanted = nnf.rms_norm(x, (N,), eps=1e-6)
    torch.testing.assert_close(liger.LigerRMSNorm(N)(x), wanted)
    gemma = liger.LigerRMSNorm(N, offset=1.0, casting_mode="gemma", init_fn="zeros")
    torch.testing.assert_close(gemma(x), wanted)
    assert not liger.LigerRMSNorm(N, elementwise_affine=False).state_dict()
    torch.testing.assert_close(liger.LigerLayerNorm(N)(x), nnf.layer_norm(x, (N,), eps=1e-6))
    torch.testing.assert_close(liger.LigerGroupNorm(N, 2)(x.mT), nnf.group_norm(x.mT, 2, eps=1e-6))
    y, h = liger.LigerFusedAddRMSNorm(N)(x, x)
    torch.testing.assert_close((y, h), (nnf.rms_norm(2 * x, (N,), eps=1e-6), 2 * x))
    assert list(liger.LigerLayerNorm(N).state_dict()) == ["weight", "bias"]
    with pytest.raises(ValueError, match="LigerRMSNorm: init_fn must be"):
        liger.LigerRMSNorm(N, init_fn="twos")


CONFIG = SimpleNamespace(hidden_size=N, intermediate_size=12, hidden_act="silu")


@pytest.mark.parametrize(
    ("cls", "act"),
    [
        (liger.LigerSwiGLUMLP, nn.SiLU()),
        (liger.LigerMLP, nn.SiLU()),
        (liger.LigerQwen3MoeSwiGLUMLP, nn.SiLU()),
        (liger.LigerTiledSwiGLUMLP, nn.SiLU()),
        (liger.LigerGEGLUMLP, nn.GELU(approximate="tanh")),
        (liger.LigerTiledGEGLUMLP, nn.GELU(approximate="tanh")),
    ],
)
def test_mlps(x, cls, act):
    config = SimpleNamespace(**vars(CONFIG))
    config.hidden_act = "silu" if isinstance(act, nn.SiLU) else "gelu_pytorch_tanh"
    layer = cls(config)
    wanted = layer.down_proj(act(layer.gate_proj(x)) * layer.up_proj(x))
    same(layer(x), wanted, (x, *layer.parameters()))
    if cls is not liger.LigerGEGLUMLP:
        config.hidden_act = "tanh"
        with pytest.raises(ValueError, match=r"config\.hidden_act must be"):
            cls(config)


def test_other_layers(x):
    expert = liger.LigerBlockSparseTop2MLP(CONFIG)
    same(expert(x), expert.w2(nnf.silu(expert.w1(x)) * expert.w3(x)), (x,))
    assert liger.LigerQwen3MoeSwiGLUMLP(CONFIG, 20).up_proj.weight.shape == (20, N)
    same(liger.LigerSoftmax()(x), x.softmax(-1), (x,))
    same(liger.LigerReLUSquared()(x), x.relu().square(), (x,))
    layer = liger.LigerDyT(N)
    same(layer(x), (0.5 * x).tanh() * layer.gamma + layer.beta, (x, layer.gamma, layer.beta))
    assert liger.LigerDyT(N, beta=False).beta is None
    poly = liger.LigerPolyNorm()
    parts = [nnf.rms_norm(x**n, (N,), eps=1e-6) for n in (3, 2, 1)]
    wanted = sum(w * p for w, p in zip(poly.weight, parts, strict=True)) + poly.bias
    same(poly(x), wanted, (x, poly.weight, poly.bias))


@pytest.mark.parametrize("dim", [-1, 1])
def test_sparsemax_is_the_nearest_distribution(x, dim):
    p = liger.LigerSparsemax(dim)(3 * x)
    torch.testing.assert_close(p.sum(dim), torch.ones_like(p.sum(dim)))
    assert (p >= 0).all() and (p == 0).any()
    # Optimality: 3 x - p is the same number tau where p > 0, and at most tau elsewhere.
    rest = (3 * x - p).detach()
    tau = rest.masked_fill(p == 0, -torch.inf).amax(dim, keepdim=True)
    torch.testing.assert_close(torch.where(p > 0, rest, tau), tau.expand_as(rest))
    assert (torch.where(p == 0, rest, tau) <= tau + 1e-5).all()
    values = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(liger.liger_sparsemax, values)


def test_total_variation_distance():
    torch.manual_seed(0)
    p, q = torch.randn(2, 6, 5).softmax(-1).unbind()
    p.requires_grad_()
    labels = torch.tensor([1, -100, 3, 2, -100, 0])
    wanted = 0.5 * (p - q).abs()
    kept = wanted[labels != -100]
    for reduction, value in (
        ("none", wanted),
        ("sum", wanted.sum()),
        ("mean", wanted.mean()),
        ("batchmean", wanted.sum() / 6),
    ):
        same(liger.LigerTVDLoss(reduction)(p, q), value, (p,))
    same(liger.liger_tvd(p, q, labels), kept.mean(), (p,))
    same(liger.LigerTVDLoss()(p, q, labels), kept.sum() / 4, (p,))
    with pytest.raises(ValueError, match="liger_tvd: reduction must be"):
        liger.liger_tvd(p, q, reduction="median")


def test_activations_and_rotary(x):
    same(liger.liger_swiglu(x, x + 1), nnf.silu(x) * (x + 1), (x,))
    gelu = nnf.gelu(x, approximate="tanh")
    same(liger.liger_geglu(x, x + 1), gelu * (x + 1), (x,))
    q, k = torch.randn(2, 4, 5, N), torch.randn(2, 2, 5, N)
    for rows in (1, 2):
        angles = torch.randn(rows, 5, N // 2)
        cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
        for found, given in zip(liger.liger_rope(q, k, cos, sin), (q, k), strict=True):
            for b in range(2):
                row = angles[b % rows]
                part = given[b].transpose(0, 1)[None], row.cos(), row.sin()
                wanted = libraries.apply_rotary_emb(*part)[0].transpose(0, 1)
                torch.testing.assert_close(found[b], wanted)
    assert torch.equal(
        liger.liger_rotary_pos_emb(q, k, cos, sin)[0], liger.liger_rope(q, k, cos, sin)[0]
    )


def test_modulated_norm(x):
    scale, shift = torch.randn(2, 2, 1, N)
    layer = liger.LigerModulatedRMSNorm(N, eps=0.1, offset=1.0, init_fn="zeros")
    wanted = nnf.rms_norm(x, (N,), eps=0.1) * (1 + scale)
    torch.testing.assert_close(layer(x, scale), wanted)
    plain = liger.LigerModulatedRMSNorm(N, eps=0.1, elementwise_affine=False)
    assert not plain.state_dict()
    torch.testing.assert_close(plain(x, scale, shift), wanted + shift)
    torch.testing.assert_close(plain(x, scale[:, 0], shift[:, 0]), wanted + shift)
    torch.testing.assert_close(
        plain(x, scale[0, 0]), nnf.rms_norm(x, (N,), eps=0.1) * (1 + scale[0])
    )
    with pytest.raises(ValueError, match="liger_modulated_rms_norm: scale must have n N elements"):
        plain(x, torch.randn(3, N))
    with pytest.raises(ValueError, match="liger_modulated_rms_norm: shift must have as many"):
        plain(x, scale, shift[:1])


def test_experts(x):
    config = SimpleNamespace(
        num_local_experts=3, intermediate_size=6, hidden_size=N, hidden_act="silu"
    )
    layer = liger.LigerExperts(config)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    index, weights = torch.randint(3, (2, 5, 2)), torch.rand(2, 5, 2, requires_grad=True)
    gate, up = (torch.einsum("efd,btd->btef", w, x) for w in layer.gate_up_proj.chunk(2, 1))
    each = torch.einsum("edf,btef->bted", layer.down_proj, nnf.silu(gate) * up)
    chosen = each.gather(2, index[..., None].expand(-1, -1, -1, N))
    wanted = (weights[..., None] * chosen).sum(2)
    same(layer(x, index, weights), wanted, (x, weights, *layer.parameters()))
    with pytest.raises(ValueError, match=r"LigerExperts: config\.hidden_act must be"):
        liger.LigerExperts(SimpleNamespace(**{**vars(config), "hidden_act": "relu"}))


def test_mlp_of_gemma_4(x):
    config = SimpleNamespace(
        hidden_size=N,
        intermediate_size=6,
        num_hidden_layers=4,
        num_kv_shared_layers=1,
        use_double_wide_mlp=True,
    )
    for layer_idx, width in ((None, 6), (2, 6), (3, 12)):
        layer = liger.LigerGEGLUMLPForGemma4(config, layer_idx)
        assert layer.down_proj.weight.shape == (N, width)
        gate = nnf.gelu(layer.gate_proj(x), approximate="tanh")
        torch.testing.assert_close(layer(x), layer.down_proj(gate * layer.up_proj(x)))


@pytest.mark.parametrize("num_shards", [None, 1, 4, 100])
def test_tiled_mlp(x, num_shards):
    layer, parts = nn.Linear(N, N), []

    def call(module, part):
        parts.append(len(part))
        return module(part).tanh()

    found = liger.apply_tiled_mlp(call, layer, x, num_shards)
    assert sum(parts) == 10 and len(parts) == {None: 1, 1: 1, 4: 4, 100: 10}[num_shards]
    same(found, layer(x).tanh(), (x, *layer.parameters()))
