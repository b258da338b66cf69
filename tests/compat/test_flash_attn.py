"""Functions and layers under the names of flash-attn."""

import inspect

import libraries
import pytest
import torch
from torch.nn import functional as nnf

from omniattn.compat import flash_attn as fa

B, TQ, TK, HQ, H, D = 2, 6, 9, 4, 2, 8
OPTIONS = [
    {},
    {"causal": True},
    {"softmax_scale": 0.5, "window_size": (3, 1)},
    {"causal": True, "window_size": [3, 5], "softcap": 1.5},
    {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0]), "deterministic": True},
]


def inputs(tk=TK):
    torch.manual_seed(0)
    q, k, v = torch.randn(B, TQ, HQ, D), torch.randn(B, tk, H, D), torch.randn(B, tk, H, D)
    return [t.requires_grad_() for t in (q, k, v)]


def compare(found, wanted, leaves):
    """Values, and gradients of their sum of squares."""
    torch.testing.assert_close(found, wanted)
    pairs = [torch.autograd.grad(y.square().sum(), leaves) for y in (found, wanted)]
    torch.testing.assert_close(*pairs)


@pytest.mark.parametrize("options", OPTIONS)
def test_dense_and_packed_into_one_tensor(options):
    q, k, v = inputs()
    wanted = libraries.flash_attn_func(q, k, v, **options)
    compare(fa.flash_attn_func(q, k, v, **options), wanted, (q, k, v))
    kv = torch.stack((k, v), 2).detach().requires_grad_()
    wanted = libraries.flash_attn_kvpacked_func(q, kv, **options)
    compare(fa.flash_attn_kvpacked_func(q, kv, **options), wanted, (q, kv))
    qkv = torch.randn(B, TQ, 3, HQ, D, requires_grad=True)
    wanted = libraries.flash_attn_qkvpacked_func(qkv, **options)
    compare(fa.flash_attn_qkvpacked_func(qkv, **options), wanted, (qkv,))
    out, lse, pattern = fa.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    expected = libraries.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    torch.testing.assert_close((out, lse), expected[:2])
    assert pattern.numel() == 0


@pytest.mark.parametrize("options", OPTIONS)
def test_packed_sequences_and_pages(options):
    q, k, v = (t.detach().flatten(0, 1).requires_grad_() for t in inputs())
    lengths = torch.tensor([0, 5, 12]).int(), torch.tensor([0, 7, 18]).int(), 7, 11
    wanted = libraries.flash_attn_varlen_func(q, k, v, *lengths, **options)
    compare(fa.flash_attn_varlen_func(q, k, v, *lengths, **options), wanted, (q, k, v))
    kv = torch.stack((k, v), 1)
    torch.testing.assert_close(
        fa.flash_attn_varlen_kvpacked_func(q, kv, *lengths, **options), wanted
    )
    qkv = torch.randn(12, 3, HQ, D)
    wanted = libraries.flash_attn_varlen_qkvpacked_func(qkv, lengths[0], 7, **options)
    found = fa.flash_attn_varlen_qkvpacked_func(qkv, lengths[0], 7, **options)
    torch.testing.assert_close(found, wanted)

    table = torch.tensor([[3, 0, -1], [1, 4, 2]]).int()
    pages = torch.randn(2, 5, 4, H, D)
    rows = [p[table.clamp(min=0)].flatten(1, 2) for p in pages]
    whole = [torch.cat((r[0, :7], r[1, :11])) for r in rows]
    wanted = libraries.flash_attn_varlen_func(q, *whole, *lengths, **options)
    found = fa.flash_attn_varlen_func(q, *pages, *lengths, block_table=table, **options)
    torch.testing.assert_close(found, wanted)
    with pytest.raises(
        ValueError, match=r"flash_attn_varlen_func: block_table must be in \[0, 5\)"
    ):
        fa.flash_attn_varlen_func(q, *pages, *lengths, block_table=table - 1)


def caches(kind):
    """Caches for 3 sequences with capacity 16, and the arguments that address them."""
    if kind == "pages":
        table = torch.tensor([[4, 1, 9, 3], [0, 5, 2, 8], [7, 6, 10, 11]]).int()
        return [torch.randn(12, 4, H, D) for _ in "kv"], {"block_table": table}
    if kind == "rows":
        return [torch.randn(5, 16, H, D) for _ in "kv"], {
            "cache_batch_idx": torch.tensor([4, 0, 2]).int()
        }
    return [torch.randn(3, 16, H, D) for _ in "kv"], {}


@pytest.mark.parametrize("kind", ["own", "rows", "pages"])
@pytest.mark.parametrize("rotary", [None, True, False])
@pytest.mark.parametrize("options", [{"causal": True}, {}, {"window_size": (4, 0)}])
def test_decoding_appends_and_rotates(kind, rotary, options):
    """Rows of each sequence, taken out of the caches, give the same as the formula."""
    torch.manual_seed(0)
    both, where = caches(kind)
    n, left = torch.tensor([5, 9, 0]).int(), torch.tensor([2, 0, 1]).int()
    q, (k, v) = torch.randn(3, 3, HQ, D), torch.randn(2, 3, 3, H, D)
    tables = {}
    qr, kr = q, k
    if rotary is not None:
        cos, sin = (f(torch.randn(16, 3)) for f in (torch.cos, torch.sin))
        tables = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": rotary}
        kr = libraries.apply_rotary_emb(k, cos, sin, rotary, seqlen_offsets=n)
        if options:
            qr = libraries.apply_rotary_emb(q, cos, sin, rotary, seqlen_offsets=n)
        else:  # all at the first position
            parts = q.flatten(0, 1)[:, None], cos, sin, rotary, False, n.repeat_interleave(3)
            qr = libraries.apply_rotary_emb(*parts).view(q.shape)

    def rows(cache):
        if kind == "pages":
            return cache[where["block_table"].long()].flatten(1, 2)
        return cache[where["cache_batch_idx"].long()] if kind == "rows" else cache

    before, wanted = [rows(c).clone() for c in both], []
    for b, (length, skipped) in enumerate(zip(n.tolist(), left.tolist(), strict=True)):
        for cache, new in zip(before, (kr, v), strict=True):
            cache[b, length : length + 3] = new[b]
        seen = [cache[b : b + 1, skipped : length + 3] for cache in before]
        wanted.append(libraries.flash_attn_func(qr[b : b + 1], *seen, **options))
    out, lse = fa.flash_attn_with_kvcache(
        q, *both, k, v, cache_seqlens=n, cache_leftpad=left, **where, **tables, **options,
        return_softmax_lse=True,
    )  # fmt: skip
    torch.testing.assert_close(out, torch.cat(wanted))
    assert lse.shape == (3, HQ, 3)
    torch.testing.assert_close([rows(c) for c in both], before)
    again = fa.flash_attn_with_kvcache(
        qr, *both, cache_seqlens=n + 3, cache_leftpad=left, **where, **options
    )
    torch.testing.assert_close(again, out)


def test_lengths_of_a_cache():
    q, k, v = (t.detach() for t in inputs())
    k_cache, v_cache = k.clone(), v.clone()
    wanted = libraries.flash_attn_func(q, k[:, :7], v[:, :7], causal=True)
    found = fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=7, causal=True)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        fa.flash_attn_with_kvcache(q, k, v), libraries.flash_attn_func(q, k, v)
    )
    with pytest.raises(ValueError, match="k_cache must have room for the new keys"):
        fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=1)
    assert torch.equal(k_cache, k)
    with pytest.raises(ValueError, match="cache_seqlens must be given with k"):
        fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v)


def test_padding_is_removed_and_restored():
    torch.manual_seed(0)
    x, mask = torch.randn(2, 5, 3), torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]])
    rows, indices, cu, longest, used = fa.unpad_input(x, mask)
    assert torch.equal(rows, x[mask.bool()])
    assert (cu.tolist(), longest, used.tolist()) == ([0, 3, 8], 5, [3, 5])
    assert cu.dtype == used.dtype == torch.int32
    assert torch.equal(fa.pad_input(rows, indices, 2, 5), x * mask[..., None])
    unused = torch.tensor([[0, 0, 1, 0, 0], [0] * 5])
    _, _, cu, longest, used = fa.unpad_input(x, mask, unused)
    assert (cu.tolist(), longest, used.tolist()) == ([0, 4, 9], 5, [3, 5])
    lengths = torch.tensor([[2, 1, 0, 0, 0], [5, 0, 0, 0, 0]])
    rows, indices, cu, longest = fa.unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(rows, torch.cat((x[0, :3], x[1])))
    assert (cu.tolist(), longest) == ([0, 2, 3, 8], 5)
    leaf = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([4, 0])
    assert torch.autograd.gradcheck(lambda t: fa.index_first_axis(t, index), leaf)
    assert torch.autograd.gradcheck(lambda t: fa.index_put_first_axis(t[:2], index, 5), leaf)
    with pytest.raises(ValueError, match=r"pad_input: indices must be in \[0, 4\)"):
        fa.pad_input(torch.randn(2, 3), index, 2, 2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved):
    torch.manual_seed(0)
    x = torch.randn(B, TQ, H, D, requires_grad=True)
    cos, sin = (f(torch.randn(16, 3)) for f in (torch.cos, torch.sin))
    offsets = torch.tensor([4, 0])
    for places in (0, 3, offsets):
        wanted = libraries.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=places)
        found = fa.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=places)
        compare(found, wanted, (x,))
        packed = fa.apply_rotary_emb(
            x.flatten(0, 1), cos, sin, interleaved, False, places, torch.tensor([0, TQ, 2 * TQ]), TQ
        )
        torch.testing.assert_close(packed.view(x.shape), wanted)
        own = x.detach().clone()
        assert fa.apply_rotary_emb(own, cos, sin, interleaved, True, places) is own
        torch.testing.assert_close(own, wanted.detach())
    torch.testing.assert_close(
        fa.apply_rotary_emb_torch(x, cos[:TQ], sin[:TQ], interleaved),
        fa.apply_rotary_emb(x, cos, sin, interleaved),
    )
    quarter = torch.zeros(16, 4), torch.ones(16, 4)
    turned = libraries.apply_rotary_emb(x, *quarter, interleaved)
    torch.testing.assert_close(fa.rotate_half(x, interleaved), turned)


@pytest.mark.parametrize("scale_base", [None, 512.0])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(scale_base, interleaved):
    torch.manual_seed(0)
    layer = fa.RotaryEmbedding(6, 100.0, interleaved, scale_base)
    angles = torch.arange(TQ + 2.0)[:, None] * 100.0 ** (-torch.arange(0, 6, 2) / 6)
    xpos = 1.0
    if scale_base:
        base = (torch.arange(0, 6, 2) + 0.4 * 6) / (1.4 * 6)
        xpos = base ** ((torch.arange(TQ + 2.0) - (TQ + 2) // 2) / scale_base)[:, None]
    of_q = angles.cos() * xpos, angles.sin() * xpos
    of_k = angles.cos() / xpos, angles.sin() / xpos
    qkv = torch.randn(B, TQ, 3, H, D)
    q, k, v = qkv.unbind(2)
    wanted = [
        libraries.apply_rotary_emb(q, *of_q, interleaved, seqlen_offsets=2),
        libraries.apply_rotary_emb(k, *of_k, interleaved, seqlen_offsets=2),
    ]
    grouped = torch.cat((q, k[:, :, :1], v[:, :, :1]), 2)
    kv = torch.stack((k, v), 2)
    expected = torch.stack((*wanted, v), 2)
    packed = qkv.clone()
    assert layer(packed, seqlen_offset=2) is packed
    torch.testing.assert_close(packed, expected)
    leaf = qkv.clone().requires_grad_()
    layer(leaf, seqlen_offset=2).square().sum().backward()
    assert leaf.grad.shape == leaf.shape
    rows = layer(grouped, seqlen_offset=torch.full((B,), 2), max_seqlen=TQ + 2, num_heads_q=H)
    torch.testing.assert_close(rows, torch.cat((wanted[0], wanted[1][:, :, :1], v[:, :, :1]), 2))
    found = layer(q.clone(), kv, seqlen_offset=2)
    torch.testing.assert_close(found, (wanted[0], torch.stack((wanted[1], v), 2)))
    fresh = fa.RotaryEmbedding(6)
    with pytest.raises(ValueError, match="max_seqlen must be given"):
        fresh(qkv, seqlen_offset=torch.zeros(B).int())


def test_losses():
    torch.manual_seed(0)
    logits = torch.randn(5, 11, requires_grad=True)
    labels = torch.tensor([3, 0, -100, 10, 7])
    for options in ({}, {"label_smoothing": 0.1, "lse_square_scale": 1e-2}):
        wanted = libraries.cross_entropy_loss(2 * logits, labels, **options)
        found = fa.cross_entropy_loss(logits, labels, logit_scale=2.0, **options)
        torch.testing.assert_close(found, wanted)
        compare(found[0], wanted[0], (logits,))
        for reduction, count in (("none", None), ("sum", 1), ("mean", 4)):
            layer = fa.CrossEntropyLoss(
                reduction=reduction, logit_scale=2.0, return_z_loss=True, **options
            )
            expected = wanted if count is None else tuple(t.sum() / count for t in wanted)
            torch.testing.assert_close(layer(logits, labels), expected)
    assert fa.CrossEntropyLoss()(logits, labels).shape == ()
    with pytest.raises(NotImplementedError, match="cross_entropy_loss: process_group is not supp"):
        fa.cross_entropy_loss(logits, labels, process_group=object())


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms(kind):
    torch.manual_seed(0)
    x, residual, x1 = torch.randn(3, 2, 5, 8, requires_grad=True).unbind()
    w, b, w1, b1 = torch.randn(4, 8, requires_grad=True).unbind()
    rows, channels = torch.rand(2, 5), torch.rand(8)

    def formula(h, weight, bias):
        y = nnf.layer_norm(h, (8,), eps=0.1) if kind == "layer" else nnf.rms_norm(h, (8,), eps=0.1)
        return y * weight + bias

    fn = fa.rms_norm_fn if kind == "rms" else fa.layer_norm_fn
    h = x * rows[..., None] + residual
    wanted = formula(h, 1 + w, b), h
    found = fn(x, w, b, residual, rowscale=rows, eps=0.1, prenorm=True, zero_centered_weight=True)
    torch.testing.assert_close(found, wanted)
    compare(found[0], wanted[0], (x, residual, w, b))
    h = x + x1 + residual
    found = fn(x, w, b, residual, x1, w1, b1, eps=0.1)
    torch.testing.assert_close(found, (formula(h, w, b), formula(h, w1, b1)))
    add = fa.dropout_add_rms_norm if kind == "rms" else fa.dropout_add_layer_norm
    h = x * rows[..., None] * channels + residual
    found = add(x, residual, w, b, 0.0, 0.1, rows, channels, prenorm=True)
    torch.testing.assert_close(found, (formula(h, w, b), h))
    alone = fa.rms_norm(x, w, 0.1) if kind == "rms" else fa.layer_norm(x, w, b, 0.1)
    torch.testing.assert_close(alone, formula(x, w, 0 if kind == "rms" else b))


def test_dtypes_of_norms():
    x, w = torch.randn(3, 8).bfloat16(), torch.randn(8)
    y, h = fa.rms_norm_fn(x, w, None, prenorm=True, residual_in_fp32=True)
    assert (y.dtype, h.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(y, nnf.rms_norm(x.float(), (8,), w, 1e-6).bfloat16())
    layer = fa.TritonRMSNorm(8, dropout_p=0.5, zero_centered_weight=True)
    assert layer.train()(x.float(), h).eq(layer.eval()(x.float(), h)).all().logical_not()
    torch.testing.assert_close(layer(x.float()), nnf.rms_norm(x.float(), (8,), eps=1e-5))
    assert fa.RMSNorm(8)(x.float()).shape == x.shape
    ours = fa.DropoutAddLayerNorm(8, prenorm=True, p=0.5).eval()
    torch.testing.assert_close(
        ours(x.float(), h), (nnf.layer_norm(x.float() + h, (8,)), x.float() + h)
    )
    assert list(ours.state_dict()) == ["weight", "bias"]
    assert list(fa.DropoutAddRMSNorm(8).state_dict()) == ["weight"]
    with pytest.raises(NotImplementedError, match="return_dropout_mask is not supported"):
        fa.layer_norm_fn(x, w, None, return_dropout_mask=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, k, v: fa.flash_attn_func(q, k, v, softmax_scale="a"), "softmax_scale must be"),
        (lambda q, k, v: fa.flash_attn_func(q, k, v, window_size=3), "window_size must be"),
        (lambda q, k, v: fa.flash_attn_func(q, k, v, 2.0), "dropout_p must be"),
        (lambda q, k, v: fa.flash_attn_func(q, k[:1], v), "flash_attn_func: q and k must"),
        (lambda q, k, v: fa.flash_attn_func(q, k, v, deterministic=1), "deterministic must be"),
        (
            lambda q, k, v: fa.flash_attn_kvpacked_func(q, k),
            r"kv must have shape \(B, T, 2, H, D\)",
        ),
        (lambda q, k, v: fa.flash_attn_qkvpacked_func(q), "qkv must have shape"),
        (
            lambda q, k, v: fa.flash_attn_func(q, k, v, 0.5, return_attn_probs=True),
            "return_attn_probs is not supported with dropout_p > 0",
        ),
        (
            lambda q, k, v: fa.flash_attn_with_kvcache(q, k, v, rotary_cos=torch.ones(9, 2)),
            "rotary_cos and rotary_sin must be given together",
        ),
    ],
)
def test_errors_name_arguments_of_flash_attn(call, message):
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        call(*inputs())


def test_dropout_keeps_the_mean():
    q, k, v = (t.detach() for t in inputs())
    torch.manual_seed(0)
    found = torch.stack([fa.flash_attn_func(q, k, v, 0.2) for _ in range(300)]).mean(0)
    torch.testing.assert_close(found, fa.flash_attn_func(q, k, v), rtol=0.0, atol=0.2)


def test_parameters_are_those_of_flash_attn():
    names = list(inspect.signature(fa.flash_attn_varlen_func).parameters)
    assert names[:8] == [
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "dropout_p",
    ]  # fmt: skip
