"""xformers' names: attention with each mask is that with the tensor that it stands for.

The definitions are those of mslk's `attn_bias.py`, commit 2a3c89786adf, which xformers 0.0.35
imports; `block` writes them down for one sequence.
"""

import pytest
import torch

from omniattn import compat
from omniattn.compat import xformers as xops

TABLES = torch.tensor([[2, 0], [1, 4], [3, 5]])


def block(tq, tk, kind=None, left=0, right=0):
    """Pairs of a sequence that see each other."""
    i, j = torch.arange(tq)[:, None], torch.arange(tk)
    shift = tk - tq
    if kind is None:
        return torch.ones(tq, tk, dtype=torch.bool)
    if kind == "first":
        return (j <= i) & (j > i - left) if left else j <= i
    seen = j <= i + shift + right
    return seen & (j >= i + shift - left) if left else seen


def packed(tq, keys, rows, *kind):
    """Mask (T, rows) of sequences with tq[n] queries and the keys in rows keys[n]."""
    found = torch.zeros(sum(tq), rows, dtype=torch.bool)
    start = 0
    for n, own in zip(tq, keys, strict=True):
        found[start : start + n, own] = block(n, len(own), *kind)
        start += n
    return found


def span(*pairs):
    return [list(range(a, b)) for a, b in pairs]


def paged(*spans):
    tables = TABLES.tolist()
    return [[tables[n][t // 2] * 2 + t % 2 for t in range(*s)] for n, s in enumerate(spans)]


def inputs(tq, tk, batch=1, kv_heads=4):
    torch.manual_seed(0)
    sizes = (tq, 4, 8), (tk, kv_heads, 8), (tk, kv_heads, 5)
    return [torch.randn(batch, *s, dtype=torch.float64, requires_grad=True) for s in sizes]


def dense(q, k, v, bias, scale=None):
    logits = q.transpose(1, 2) @ k.transpose(1, 2).mT * (scale or q.shape[-1] ** -0.5) + bias
    out = logits.softmax(-1).nan_to_num() @ v.transpose(1, 2)
    return out.transpose(1, 2), logits.logsumexp(-1)


Q, K = [2, 3, 1], [3, 4, 2]  # lengths of queries and keys
LAST, FIRST = ("last",), ("first",)
PADDED, GAPPY = span((0, 3), (4, 8), (8, 10)), span((1, 4), (5, 9), (10, 12))
#: Mask, its pairs.
MASKS = {
    "causal": (xops.LowerTriangularMask(), block(5, 7, *FIRST)),
    "bottom_right": (xops.LowerTriangularFromBottomRightMask(), block(5, 7, *LAST)),
    "window": (
        xops.LowerTriangularFromBottomRightMask().make_local_attention(2),
        block(5, 7, *LAST, 1),
    ),
    "local": (xops.LocalAttentionFromBottomRightMask(1, 2), block(5, 7, *LAST, 1, 2)),
}
B = xops.BlockDiagonalMask.from_seqlens(Q, K)
PAD = xops.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(Q, 4, K)
PAGED = [3, 4, 2]
for name, mask, keys, rows, kind in (
    ("blocks", B, span((0, 3), (3, 7), (7, 9)), 9, ()),
    ("blocks_causal", B.make_causal(), span((0, 3), (3, 7), (7, 9)), 9, FIRST),
    ("blocks_last", B.make_causal_from_bottomright(), span((0, 3), (3, 7), (7, 9)), 9, LAST),
    ("blocks_local", B.make_local_attention(2), span((0, 3), (3, 7), (7, 9)), 9, (*FIRST, 2)),
    (
        "blocks_local_last",
        B.make_local_attention_from_bottomright(2),
        span((0, 3), (3, 7), (7, 9)),
        9,
        (*LAST, 1),
    ),
    ("padded", xops.BlockDiagonalPaddedKeysMask.from_seqlens(Q, 4, K), PADDED, 12, ()),
    ("padded_causal", PAD, PADDED, 12, LAST),
    ("padded_local", PAD.make_local_attention(2, 1), PADDED, 12, (*LAST, 2, 1)),
    (
        "padded_window",
        xops.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(Q, 4, K, 2),
        PADDED,
        12,
        (*LAST, 1),
    ),
    (
        "equal_queries",
        xops.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([2, 2, 2], 4, K),
        PADDED,
        12,
        LAST,
    ),
    (
        "paged",
        PAD.make_paged(TABLES, 2, xops.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask),
        paged((0, 3), (0, 4), (0, 2)),
        12,
        LAST,
    ),
    (
        "paged_equal_queries",
        xops.PagedBlockDiagonalCausalLocalPaddedKeysMask.from_seqlens_local(
            [1, 1, 1], K, TABLES, 2, 2
        ),
        paged((0, 3), (0, 4), (0, 2)),
        12,
        (*LAST, 1),
    ),
    (
        "gappy",
        xops.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(Q, [1, 5, 10, 12], K),
        GAPPY,
        12,
        LAST,
    ),
    (
        "gappy_paged",
        xops.PagedBlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(
            Q, [1, 0, 1], [3, 3, 2], TABLES, 2
        ),
        paged((1, 4), (0, 3), (1, 3)),
        12,
        LAST,
    ),
):
    lengths = [b - a for a, b in mask.q_seqinfo.intervals()]
    MASKS[name] = mask, packed(lengths, keys, rows, *kind)


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_the_tensors_that_they_stand_for(name):
    mask, allowed = MASKS[name]
    tq, tk = allowed.shape
    bias = mask.materialize((1, tq, tk), torch.float64)
    assert torch.equal(bias[0] == 0, allowed) and torch.equal(bias[0] == -torch.inf, ~allowed)
    q, k, v = inputs(tq, tk)
    out = xops.memory_efficient_attention(q, k, v, mask.to("cpu"), scale=0.3)
    wanted, lse = dense(q, k, v, bias, 0.3)
    torch.testing.assert_close(out, wanted)
    grad = torch.randn_like(out)
    theirs = torch.autograd.grad(wanted, (q, k, v), grad)
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), grad), theirs)
    call = xops.memory_efficient_attention_forward_requires_grad
    found = call(q, k, v, mask, scale=0.3)
    torch.testing.assert_close(found, (wanted.detach(), lse.detach()))
    again = xops.memory_efficient_attention_backward(grad, *found, q, k, v, mask, scale=0.3)
    torch.testing.assert_close(again, theirs)


def test_tensors_are_added_to_the_logits():
    q, k, v = inputs(4, 4, batch=2)
    bias = torch.randn(2, 4, 4, 4, dtype=torch.float64, requires_grad=True)
    wanted = dense(q, k, v, bias)[0]
    out = xops.memory_efficient_attention(q, k, v, bias, op=(None, None))
    torch.testing.assert_close(out, wanted)
    ours, theirs = (torch.autograd.grad(t.sum(), bias)[0] for t in (out.sin(), wanted.sin()))
    torch.testing.assert_close(ours, theirs)
    both = xops.LowerTriangularMask().add_bias(bias)
    full = both.materialize((2, 4, 4, 4), torch.float64)
    found = xops.memory_efficient_attention_forward(q, k, v, both, output_dtype=torch.float32)
    torch.testing.assert_close(found, dense(q, k, v, full)[0].detach().float())


def test_forms_without_heads_and_with_groups():
    q, k, v = inputs(4, 6, batch=2)
    flat = [t[:, :, 0] for t in (q, k, v)]
    wanted = dense(q[:, :, :1], k[:, :, :1], v[:, :, :1], 0.0)[0][:, :, 0]
    torch.testing.assert_close(xops.memory_efficient_attention(*flat), wanted)
    groups = q.unflatten(2, (2, 2))
    shared = [t[:, :, ::2, None].expand(-1, -1, -1, 2, -1) for t in (k, v)]
    whole = [t.flatten(2, 3) for t in shared]
    for keys in (shared, [t.contiguous() for t in shared]):
        call = xops.memory_efficient_attention_forward_requires_grad
        out, lse = call(groups, *keys)
        theirs = dense(q, *whole, 0.0)
        torch.testing.assert_close(out.flatten(2, 3), theirs[0].detach())
        torch.testing.assert_close(lse.flatten(1, 2), theirs[1].detach())


def test_sets_of_keys_merge_and_have_their_part_of_the_gradient():
    q, k, v = inputs(4, 6)
    parts = [(k[:, :2], v[:, :2]), (k[:, 2:], v[:, 2:])]
    pieces = [xops.memory_efficient_attention_partial(q, *p) for p in parts]
    out, lse = xops.merge_attentions(*zip(*pieces, strict=True))
    whole = xops.memory_efficient_attention_partial(q, k, v)
    torch.testing.assert_close((out, lse), whole)
    grad = torch.randn_like(out)
    call = xops.memory_efficient_attention_backward
    rings = [call(grad, out.detach(), lse.detach(), q, *p) for p in parts]
    dq, dk, dv = torch.autograd.grad(whole[0], (q, k, v), grad)
    torch.testing.assert_close(rings[0][0] + rings[1][0], dq)
    torch.testing.assert_close(torch.cat([r[1] for r in rings], 1), dk)
    torch.testing.assert_close(torch.cat([r[2] for r in rings], 1), dv)


def test_lists_of_tensors_are_packed_and_split():
    torch.manual_seed(0)
    parts = [torch.randn(2, 3, 1, 4), torch.randn(1, 5, 1, 4)]
    mask, x = xops.BlockDiagonalMask.from_tensor_list(parts)
    assert mask.q_seqinfo.seqstart_py == [0, 3, 6, 11] and mask.q_seqinfo.max_seqlen == 5
    for part, again in zip(parts, mask.split(x), strict=True):
        assert torch.equal(part, again)
    keys = [torch.randn(2, 4, 1, 4), torch.randn(1, 2, 1, 4)]
    mask, q, k, v = xops.BlockDiagonalMask.from_tensor_lists_qkv(parts, keys)
    assert v is None and q.shape[1] == 11 and mask.key_lengths() == [4, 4, 2]
    for part, again in zip(keys, mask.split_kv(k), strict=True):
        assert torch.equal(part, again)


def test_layers_and_small_functions():
    torch.manual_seed(0)
    layer = xops.SwiGLU(6, 4, 5)
    x = torch.randn(3, 6)
    w1, w2 = layer.w12.weight.chunk(2)
    b1, b2 = layer.w12.bias.chunk(2)
    inner = torch.nn.functional.silu(x @ w1.T + b1) * (x @ w2.T + b2)
    torch.testing.assert_close(layer(x), layer.w3(inner))
    assert {"w1.weight", "w3.weight"} <= set(xops.SwiGLU(6, 4, _pack_weights=False).state_dict())
    norm, y = xops.RMSNorm(6), torch.randn(3, 6)
    wanted = torch.nn.functional.rms_norm(x + y, (6,), eps=1e-6)
    torch.testing.assert_close(norm.increment_and_forward_(x.clone(), y), wanted)
    z = torch.randn(2, 3, 4)
    assert torch.equal(xops.stack_or_none(xops.unbind(z, 1), 1), z)
    assert xops.get_stack_strides(z.unbind(1), 1) == z.stride()
    assert xops.stack_or_none([z, z.clone()], 0) is None
    index = torch.tensor([1, 0])
    found = xops.scaled_index_add(z.clone(), index, z, torch.full((4,), 2.0), alpha=3.0)
    torch.testing.assert_close(found, z + 6 * z.flip(0))
    rows = xops.index_select_cat([z[0], z[1]], [torch.tensor([2]), torch.tensor([0, 0])])
    assert torch.equal(rows, torch.cat([z[0, 2], z[1, 0], z[1, 0]]))
    mask = torch.eye(3).bool()
    assert (xops.masked_matmul(z, z.mT, mask)[:, ~mask] == -torch.inf).all()


def test_errors_name_arguments_of_xformers():
    q, k, v = inputs(6, 9)
    wrong = [
        ((q, k.float(), v), {}, TypeError, "memory_efficient_attention: key must"),
        ((q, k[:, 1:], v[:, 1:], B), {}, ValueError, "key must have 9 rows with BlockDiagonalMask"),
        ((q[:, 1:], k, v, B), {}, ValueError, r"query must have shape \(1, 6, ...\)"),
        ((q, k, v, "causal"), {}, TypeError, "attn_bias must be None, a tensor or an Attention"),
        ((q, k, v, torch.zeros(6, 9).double()), {}, ValueError, "attn_bias must have shape"),
        ((q, k, v), {"p": 2.0}, ValueError, "memory_efficient_attention: p must"),
        ((q, k, v), {"output_dtype": torch.int8}, TypeError, "output_dtype must be"),
    ]
    for tensors, options, error, text in wrong:
        with pytest.raises(error, match=text):
            xops.memory_efficient_attention(*tensors, **options)
    with pytest.raises(NotImplementedError, match="p must be 0 without autograd"):
        xops.memory_efficient_attention_forward_requires_grad(q, k, v, p=0.1)
    with pytest.raises(ValueError, match="q_seqlen and kv_seqlen must have the same length"):
        xops.BlockDiagonalMask.from_seqlens([1, 2], [3])
    with pytest.raises(ValueError, match="window_size"):
        B.make_local_attention(0)
    with pytest.raises(ValueError, match="kv_seqlen must be at least q_seqlen"):
        xops.BlockDiagonalCausalFromBottomRightMask.from_seqlens([3], [2])


def test_scripts_import_xformers_and_natten():
    served = compat.install("xformers", "natten")
    try:
        if not all(served.values()):
            pytest.skip("xformers or NATTEN is installed")
        import xformers.ops as theirs
        from natten import na2d
        from xformers.ops import fmha, unbind
        from xformers.ops.fmha.attn_bias import BlockDiagonalMask
        from xformers.ops.unbind import unbind as same

        assert theirs.unbind is unbind is same is xops.unbind
        assert fmha.BlockDiagonalMask is BlockDiagonalMask is xops.BlockDiagonalMask
        assert na2d is compat.natten.na2d
        with pytest.raises(ImportError, match="weights are not split over processes"):
            from xformers.ops import ColumnParallelLinear  # noqa: F401
    finally:
        compat.uninstall()
