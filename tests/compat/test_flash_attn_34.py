"""Names of flash-attn 3 and 4 against attention with the mask that their options stand for.

The definitions are those of flash-attention, commit 0251105a2fb1: `hopper/test_util.py` for chunks
and windows, `flash_attn/cute/interface.py` for qv, sinks and lengths.
"""

import pytest
import torch

from omniattn import compat, functional
from omniattn.compat import flash_attn as fa4
from omniattn.compat.flash_attn import hopper as fa3


def inputs(tq=5, tk=7, batch=2, kv_heads=2, dv=5):
    torch.manual_seed(0)
    sizes = (tq, 4, 8), (tk, kv_heads, 8), (tk, kv_heads, dv)
    return [torch.randn(batch, *s, dtype=torch.float64, requires_grad=True) for s in sizes]


def dense(q, k, v, allowed=None, *, scale=None, qv=None, sink=None, softcap=0.0):
    """Attention of flash-attn's reference: logits, mask, sink, softmax."""
    groups = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(groups, 2).transpose(1, 2) for t in (k, v))
    logits = q.transpose(1, 2) @ k.mT
    size = q.shape[-1]
    if qv is not None:
        logits, size = logits + qv.transpose(1, 2) @ v.mT, size + v.shape[-1]
    logits = logits * (size**-0.5 if scale is None else scale)
    logits = softcap * (logits / softcap).tanh() if softcap else logits
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    if sink is not None:
        column = sink.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], -1)
        v = torch.cat([v, v.new_zeros(*v.shape[:2], 1, v.shape[3])], 2)
    lse = logits.logsumexp(-1)
    weights = (logits - lse[..., None]).exp().nan_to_num()
    return (weights @ v).transpose(1, 2), lse


def chunks(tq, tk, size):
    i, j = torch.arange(tq)[:, None] + tk - tq, torch.arange(tk)
    return i // size == j // size


def test_options_of_flash_attn_3():
    q, k, v = inputs()
    allowed = chunks(5, 7, 3) & torch.ones(5, 7).tril(2).bool()
    options = dict(attention_chunk=3, causal=True, softcap=2.0, num_splits=3, pack_gqa=True)
    out, lse = fa3.flash_attn_func(q, k, v, **options, sm_margin=4, return_attn_probs=True)
    wanted = dense(q, k, v, allowed, softcap=2.0)
    torch.testing.assert_close((out, lse), wanted)
    ours, theirs = (torch.autograd.grad(t.sin().sum(), (q, k, v)) for t in (out, wanted[0]))
    torch.testing.assert_close(ours, theirs)
    one = fa3.flash_attn_func(q, k, v, window_size=(1, 2))
    i, j = torch.arange(5)[:, None] + 2, torch.arange(7)
    torch.testing.assert_close(one, dense(q, k, v, (j >= i - 1) & (j <= i + 2))[0])


def test_qv_is_added_to_the_products_of_q_and_k():
    q, k, v = inputs()
    qv = torch.randn(2, 5, 4, 5, dtype=torch.float64, requires_grad=True)
    wanted, lse = dense(q, k, v, qv=qv)
    torch.testing.assert_close(fa3.flash_attn_func(q, k, v, qv=qv), wanted)
    out, found = fa4.cute_flash_attn_func(q, k, v, qv, return_lse=True)
    torch.testing.assert_close((out, found.transpose(1, 2)), (wanted, lse))
    ours, theirs = (torch.autograd.grad(t.sin().sum(), (q, k, v, qv)) for t in (out, wanted))
    torch.testing.assert_close(ours, theirs)
    again = fa3.flash_attn_with_kvcache(q, k, v, qv=qv)
    torch.testing.assert_close(again, wanted.detach())


@pytest.mark.parametrize("heads", (None, 4))
def test_packed_heads(heads):
    q, k, v = inputs(6, 6, kv_heads=2 if heads else 4, dv=8)
    wanted = dense(q, k, v, torch.ones(6, 6).tril().bool())
    packed = torch.cat([q, k, v], 2) if heads else torch.stack([q, k, v], 2)
    call = fa3.flash_attn_qkvpacked_func
    found = call(packed, causal=True, num_heads_q=heads, return_attn_probs=True)
    torch.testing.assert_close(found, wanted)


def test_sinks_windows_and_lists_of_flash_attn_4():
    q, k, v = inputs()
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    out, lse = fa4.cute_flash_attn_func(
        q, k, v, causal=True, window_size=(2, None), learnable_sink=sink, return_lse=True
    )
    i, j = torch.arange(5)[:, None] + 2, torch.arange(7)
    wanted = dense(q, k, v, (j <= i) & (j >= i - 2), sink=sink)
    torch.testing.assert_close((out, lse), wanted)
    ours, theirs = (torch.autograd.grad(t.sin().sum(), (q, sink)) for t in (out, wanted[0]))
    torch.testing.assert_close(ours, theirs)
    lists = torch.rand(2, 5, 7).argsort(-1)[..., :3]
    allowed = torch.zeros(2, 5, 7, dtype=torch.bool).scatter(-1, lists, True)
    lists = torch.cat([lists, torch.full((2, 5, 1), 99)], -1)
    found, none = fa4.cute_flash_attn_func(q, k, v, gather_kv_indices=lists)
    assert none is None
    torch.testing.assert_close(found, dense(q, k, v, allowed[:, None])[0])


@pytest.mark.parametrize("packed", (False, True))
def test_rows_that_are_not_in_use_are_not_seen(packed):
    q, k, v = inputs()
    used_q, used_k = torch.tensor([3, 5]), torch.tensor([6, 4])
    real = (torch.arange(5) < used_q[:, None])[:, None, :, None]
    shift = (used_k - used_q)[:, None, None, None]
    i, j = torch.arange(5)[:, None], torch.arange(7)
    allowed = real & (j < used_k[:, None, None, None]) & (j <= i + shift)
    wanted, lse = dense(q, k, v, allowed)
    wanted = wanted.masked_fill(~real.transpose(1, 2), 0.0)
    used = dict(seqused_q=used_q, seqused_k=used_k, causal=True)
    tensors, cu, cu_k = (q, k, v), torch.tensor([0, 5, 10]), torch.tensor([0, 7, 14])
    if packed:
        tensors = [t.flatten(0, 1) for t in tensors]
        used |= dict(cu_seqlens_q=cu, cu_seqlens_k=cu_k, max_seqlen_q=5, max_seqlen_k=7)
        third = fa3.flash_attn_varlen_func(*tensors, **used)
        torch.testing.assert_close(third, wanted.flatten(0, 1))
    out, found = fa4.cute_flash_attn_varlen_func(*tensors, **used, return_lse=True)
    ours, theirs = (torch.autograd.grad(t.sin().sum(), (q, k, v)) for t in (out, wanted))
    torch.testing.assert_close(ours, theirs)
    if packed:
        out, found = out.unflatten(0, (2, 5)), found.unflatten(1, (2, 5)).transpose(0, 1)
    torch.testing.assert_close((out, found), (wanted, lse))


def test_keys_in_pages():
    q, k, v = inputs(3, 6)
    table, used = torch.tensor([[2, 0, 5], [1, 4, 3]], dtype=torch.int32), torch.tensor([5, 6])
    pages = [torch.empty(6, 2, *t.shape[2:], dtype=t.dtype) for t in (k, v)]
    for page, t in zip(pages, (k, v), strict=True):
        page[table.long()] = t.detach().unflatten(1, (3, 2))
    i, j = torch.arange(3)[:, None], torch.arange(6)
    last = used[:, None, None, None]
    allowed = (j < last) & (j <= i + last - 3)
    wanted = dense(q, k, v, allowed)[0]
    options = dict(page_table=table, causal=True)
    out, _ = fa4.cute_flash_attn_varlen_func(q, *pages, seqused_k=used, **options)
    torch.testing.assert_close(out, wanted)
    cached = fa3.flash_attn_with_kvcache(q, *pages, cache_seqlens=used, **options)
    torch.testing.assert_close(cached, wanted.detach())
    cu = torch.tensor([0, 3, 6])
    packed, lse, *_ = fa3.flash_attn_with_kvcache(
        q.flatten(0, 1), *pages, cache_seqlens=used, cu_seqlens_q=cu, max_seqlen_q=3, **options,
        return_softmax_lse=True,
    )  # fmt: skip
    torch.testing.assert_close(packed, wanted.detach().flatten(0, 1))
    assert lse.shape == (4, 6)
    rows = {"page_table": table[[1, 1, 0]], "cache_batch_idx": torch.tensor([2, 0])}
    chosen = fa3.flash_attn_with_kvcache(q, *pages, cache_seqlens=used, causal=True, **rows)
    torch.testing.assert_close(chosen, cached)
    again, *_ = fa3.flash_attn_with_kvcache(
        q.flatten(0, 1), *pages, cache_seqlens=used, cu_seqlens_q=cu, max_seqlen_q=3, causal=True,
        return_softmax_lse=True, **rows,
    )  # fmt: skip
    torch.testing.assert_close(again, packed)
    rows["cache_batch_idx"] = torch.tensor([3, 0])
    with pytest.raises((RuntimeError, ValueError), match="cache_batch_idx"):
        fa3.flash_attn_with_kvcache(q, *pages, cache_seqlens=used, causal=True, **rows)


def test_windows_may_be_tensors():
    q, k, v = inputs(3, 6)
    window = torch.tensor([2, 1])
    cu = torch.tensor([0, 3]), torch.tensor([0, 6])
    rows = [t[0] for t in (q, k, v)]
    found = fa3.flash_attn_varlen_func(*rows, *cu, 3, 6, window_size=window)
    wanted = fa3.flash_attn_varlen_func(*rows, *cu, 3, 6, window_size=(2, 1))
    torch.testing.assert_close(found, wanted)


def test_new_keys_rotate_from_positions_of_their_own():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 1, 2, 8) for _ in range(3))
    angles = torch.randn(9, 4)
    caches = [torch.randn(2, 6, 2, 8) for _ in range(2)]
    copies = [t.clone() for t in caches]
    lengths, first = torch.tensor([3, 4]), torch.tensor([0, 2])
    rotary = dict(rotary_cos=angles.cos(), rotary_sin=angles.sin(), rotary_interleaved=False)
    out = fa3.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=lengths, rotary_seqlens=first, causal=True,
        attention_chunk=4, **rotary,
    )  # fmt: skip
    tables = dict(cos=angles.cos(), sin=angles.sin(), positions=first[:, None])
    rotated = [functional.apply_rotary(t, None, **tables)[0] for t in (q, k)]
    for copy, row in zip(copies, (rotated[1], v), strict=True):
        copy[torch.arange(2), lengths] = row[:, 0]
    assert all(torch.equal(a, b) for a, b in zip(caches, copies, strict=True))
    j, last = torch.arange(6), lengths[:, None, None, None]
    allowed = (j <= last) & (j // 4 == last // 4)
    torch.testing.assert_close(out, dense(rotated[0], *copies, allowed)[0])


@pytest.mark.parametrize("packed", (False, True))
def test_combined_sets_of_keys_are_their_union(packed):
    q, k, v = inputs()
    parts = [fa4.cute_flash_attn_func(q, k[:, a:b], v[:, a:b], return_lse=True)
             for a, b in ((0, 2), (2, 7))]  # fmt: skip
    outs = torch.stack([p[0] for p in parts])
    lses = torch.stack([p[1].transpose(1, 2) for p in parts])
    wanted = dense(q, k, v)
    if packed:
        outs, lses = outs.flatten(1, 2), lses.flatten(1, 2)
    out, lse = fa4.flash_attn_combine(outs, lses)
    torch.testing.assert_close(out.view_as(wanted[0]), wanted[0])
    torch.testing.assert_close(lse.reshape(2, 5, 4).transpose(1, 2), wanted[1])
    into = torch.empty(out.shape)
    found, _ = fa3.flash_attn_combine(outs.detach(), lses.detach(), into, torch.float32)
    assert found is into
    torch.testing.assert_close(into, out.detach().float())


def test_errors_name_arguments_of_flash_attn():
    q, k, v = inputs()
    one = torch.ones(2, 2)
    cases = [
        (fa3.flash_attn_func, dict(k_descale=one), "flash_attn_func: k_descale must be None"),
        (fa3.flash_attn_func, dict(attention_chunk=-1), "flash_attn_func: attention_chunk must"),
        (fa3.flash_attn_func, dict(qv=q), "flash_attn_func: qv must have"),
        (fa3.flash_attn_with_kvcache, dict(cu_seqlens_k_new=one), "cu_seqlens_k_new must be None"),
        (fa4.cute_flash_attn_func, dict(mask_mod=max), "flash_attn_func: mask_mod must be None"),
        (fa4.cute_flash_attn_func, dict(aux_tensors=[q]), "flash_attn_func: aux_tensors must be"),
        (fa4.cute_flash_attn_func, dict(learnable_sink=q), "flash_attn_func: learnable_sink must"),
        (fa4.cute_flash_attn_func, dict(window_size=3), "window_size must be"),
        (fa4.cute_flash_attn_varlen_func, dict(seqused_k=torch.tensor([8, 1])), "seqused_k must"),
        (fa4.cute_flash_attn_varlen_func, dict(page_table=torch.ones(2, 1).int()), "seqused_k"),
    ]
    for call, options, text in cases:
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=text):
            call(q, k, v, **options)
    assert fa3.get_scheduler_metadata(1, 1, 1, 1, 1, 8, one) is None


def test_scripts_import_flash_attn_3_and_4():
    served = compat.install("flash_attn", "flash_attn_interface")
    try:
        if not all(served.values()):
            pytest.skip("flash-attn is installed")
        from flash_attn.cute import flash_attn_varlen_func
        from flash_attn.cute.interface import flash_attn_combine
        from flash_attn_interface import flash_attn_with_kvcache

        assert flash_attn_varlen_func is fa4.cute_flash_attn_varlen_func
        assert flash_attn_combine is fa4.flash_attn_combine
        assert flash_attn_with_kvcache is fa3.flash_attn_with_kvcache
    finally:
        compat.uninstall()
