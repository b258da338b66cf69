"""xformers' names: attention with each mask is that with the tensor that it stands for.

The definitions are those of mslk's `attn_bias.py`, commit 2a3c89786adf, which xformers 0.0.35
imports; `block` writes them down for one sequence.
"""

import pytest
import torch

from omniattn import compat, functional
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
    packed = layer.w12.weight.unflatten(0, (2, -1)), layer.w12.bias.unflatten(0, (2, -1))
    found = xops.swiglu_packed(x, *packed, layer.w3.weight, layer.w3.bias)
    torch.testing.assert_close(found, layer(x))
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


def rotated(x, positions, freqs, adjacents):
    """Rotates x (1, T, H, D) as complex numbers."""
    turn = torch.polar(torch.ones(()).double(), positions[:, None] * freqs)[:, None]
    if adjacents:
        z = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(z * turn).flatten(-2)
    z = torch.complex(*(t.contiguous() for t in x.chunk(2, -1))) * turn
    return torch.cat((z.real, z.imag), -1)


@pytest.mark.parametrize("groups", [0, 3])
@pytest.mark.parametrize("adjacents", [True, False])
def test_rope_padded(adjacents, groups):
    """Queries, the caches with their old rows, and attention to both."""
    torch.manual_seed(0)
    queries, lengths, room, size = [2, 1, 3], [4, 7, 3], 9, 6
    bias = xops.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(queries, room, lengths)
    middle = (groups,) * bool(groups)
    xq = torch.randn(1, 6, *middle, 4, size, dtype=torch.float64)
    xk, xv = torch.randn(2, 1, 6, *middle, 2, size, dtype=torch.float64)
    caches = torch.randn(2, 1, 27, *middle, 2, size, dtype=torch.float64)
    rows = torch.tensor([2, 3, 15, 18, 19, 20])
    freqs = 100.0 ** (-torch.arange(0, size, 2).double() / size)
    shift = torch.tensor([5, 0, 1])
    cases = [
        ({}, rows % 9, freqs),
        ({"linear_scale": 4.0}, rows % 9 / 4, freqs),
        ({"seqpos": torch.arange(6) + 3}, torch.arange(6) + 3, freqs),
        ({"first_seqpos": shift}, rows % 9 + shift.repeat_interleave(torch.tensor(queries)), freqs),
    ]
    for options, positions, theta in cases:
        cache_k, cache_v = caches.clone()
        options = {"theta": 100.0, "adjacents": adjacents, **options}
        out = xops.rope_padded(xq, xk, xv, cache_k, cache_v, bias, **options)
        flat = (t.flatten(2, -2) for t in (xq, xk))
        q, k = (rotated(t, positions, theta, adjacents) for t in flat)
        torch.testing.assert_close(out, q.view_as(xq))
        wanted = caches.clone()
        wanted[0][:, rows], wanted[1][:, rows] = k.view_as(xk), xv
        torch.testing.assert_close(torch.stack((cache_k, cache_v)), wanted)
        again = torch.empty_like(xq)
        found = xops.rope_padded(xq, xk, xv, cache_k, cache_v, bias, out_q=again, **options)
        assert found is again and torch.equal(again, out)


def test_rope_padded_of_one_expanded_head_and_llama_3():
    torch.manual_seed(0)
    bias = xops.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([1, 1], 5, [3, 5])
    xq, one = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 1, 8)
    cache_k, cache_v = torch.zeros(2, 1, 10, 1, 8)
    wide = [t.expand(-1, -1, 4, -1) for t in (one, one, cache_k, cache_v)]
    scaling = {"dynamic_old_context_len": 16.0, "dynamic_high_freq_factor": 4.0}
    q = xops.rope_padded(xq, *wide, bias, use_dynamic_scaling=True, **scaling)
    theta = functional.Llama3Scaling(16.0, 1.0, 4.0, 16)
    freqs = functional.rope_frequencies(8, scaling=theta)
    tables = functional.rotary_tables(freqs, torch.tensor([2, 4]))
    wanted = functional.apply_rotary(xq, one, *tables, interleaved=True)
    torch.testing.assert_close((q, cache_k[:, [2, 9]]), wanted)
    torch.testing.assert_close(cache_v[:, [2, 9]], one)
    with pytest.raises(ValueError, match="cache_k must have shape"):
        xops.rope_padded(xq, *(t.contiguous() for t in wide[:2]), *wide[2:], bias)
    with pytest.raises(ValueError, match="dynamic_low_freq_factor must be <= dynamic_high"):
        rest = {"dynamic_low_freq_factor": 9.0, **scaling}
        xops.rope_padded(xq, *wide, bias, use_dynamic_scaling=True, **rest)
    with pytest.raises(ValueError, match="seqpos must be None with first_seqpos"):
        places = torch.arange(2)
        xops.rope_padded(xq, *wide, bias, seqpos=places, first_seqpos=places)
    with pytest.raises(TypeError, match="attn_bias must be a BlockDiagonalCausalWith"):
        xops.rope_padded(xq, *wide, xops.LowerTriangularMask())
    with pytest.raises(NotImplementedError, match="gradients are not supported"):
        xops.rope_padded(xq.requires_grad_(), *wide, bias)


def test_products_of_tiles():
    torch.manual_seed(0)
    a = [[torch.randn(m, k, dtype=torch.float64) for k in (3, 1)] for m in (2, 5, 1)]
    b = [[torch.randn(k, n, dtype=torch.float64) for n in (4, 2)] for k in (3, 1)]
    found = xops.tiled_matmul(a, b)
    out = [[torch.empty_like(tile) for tile in row] for row in found]
    xops.tiled_matmul_out(a, b, out)
    for m in range(3):
        for n in range(2):
            wanted = a[m][0] @ b[0][n] + a[m][1] @ b[1][n]
            torch.testing.assert_close(found[m][n], wanted)
            torch.testing.assert_close(out[m][n], wanted)
    with pytest.raises(ValueError, match="tiled_matmul: b must have rows of the sizes of a's"):
        xops.tiled_matmul(a, b[::-1])
    with pytest.raises(ValueError, match="tiled_matmul: a must have equally many tiles"):
        xops.tiled_matmul([a[0], a[1][:1]], b)
    with pytest.raises(ValueError, match="tiled_matmul_out: out must have shape"):
        xops.tiled_matmul_out(a, b, out[::-1])


def test_trees_of_draft_tokens():
    """The fields against their definitions, node by node."""
    choices = [(1, 2), (0,), (1,), (0, 1), (0, 0), (3,), (1, 2, 0)]
    tree = xops.TreeAttnMetadata.from_tree_choices(choices, torch.float64)
    nodes = [(), (0,), (1,), (3,), (0, 0), (0, 1), (1, 2), (1, 2, 0)]
    assert tree.tree_choices == nodes[1:]
    seen = torch.tensor([[node[: len(other)] == other for other in nodes] for node in nodes])
    assert torch.equal(tree.attention_bias == 0, seen)
    assert torch.equal(tree.attention_bias == -torch.inf, ~seen)
    assert tree.tree_indices.tolist() == [0, 1, 2, 4, 5, 6, 7, 8]
    ways = [[0, 3, -1, -1], [0, 1, 4, -1], [0, 1, 5, -1], [0, 2, 6, 7]]
    assert tree.retrieval_indices.tolist() == ways and tree.path_lengths == [2, 3, 3, 4]
    assert tree.tree_seq_position_ids.tolist() == list(map(len, nodes))
    assert [nodes[n] for n in tree.parent_node_indices] == [node[:-1] for node in nodes[1:]]
    children = [[0, 1, 2], [3, 4, 4], [5] * 3, [0] * 3, [0] * 3, [0] * 3, [6] * 3, [0] * 3]
    assert tree.child_node_indices.tolist() == children
    counts = [3, 2, 1, 0, 0, 0, 1, 0]
    assert tree.num_children_per_node.tolist() == counts
    assert tree.candidate_idx.tolist() == [0, 1, 2, 0, 1, 0, 0]
    assert tree.num_nodes_per_level.tolist() == [1, 3, 3, 1]
    assert [t.tolist() for t in tree.num_children_per_node_at_level] == [
        [3],
        [2, 1, 0],
        [0, 0, 1],
        [0],
    ]
    assert tree.subtree_sizes == [1, 4, 7, 8]
    full = xops.construct_full_tree_choices(2, 3)
    assert len(full) + 1 == xops.get_full_tree_size(3, 3) == 13 and full[3:6] == [
        (0, 0),
        (0, 1),
        (0, 2),
    ]
    assert len(xops.construct_tree_choices([2, 3])) == 8
    alone = xops.TreeAttnMetadata.from_tree_choices_cached(())
    assert alone.retrieval_indices.tolist() == [[0]] and alone.subtree_sizes == [1]
    for wrong in ([(0, 0)], [(0,), (0,)], [()]):
        with pytest.raises(ValueError, match="tree_choices must have the parent of each node"):
            xops.TreeAttnMetadata.from_tree_choices(wrong)


@pytest.mark.parametrize("groups", [0, 2])
@pytest.mark.parametrize("last", [5, 2])
def test_tree_attention(groups, last):
    """Each node of a tree is the last token of a sequence, and attends to its ancestors."""
    torch.manual_seed(0)
    tree = xops.TreeAttnMetadata.from_tree_choices([(0,), (1,), (1, 0), (1, 1)], torch.float64)
    middle, lengths = (groups,) * bool(groups), [3, 1]
    sizes = (last, 5, 5, 4, 4)
    tensors = [torch.randn(2, n, *middle, 3, 6, dtype=torch.float64) for n in sizes]
    q, spec_k, spec_v, cache_k, cache_v = (t.requires_grad_() for t in tensors)
    prefix = xops.BlockDiagonalPaddedKeysMask.from_seqlens([last] * 2, 4, lengths)
    bias = tree.attention_bias[-last:]
    out = xops.tree_attention(q, spec_k, spec_v, cache_k, cache_v, bias, prefix)
    rows = []
    for n, length in enumerate(lengths):
        k, v = (
            torch.cat((old[n : n + 1, :length], new[n : n + 1]), 1)
            for old, new in ((cache_k, spec_k), (cache_v, spec_v))
        )
        both = torch.cat((torch.zeros(last, length), bias), 1)
        heads = (t.flatten(2, -2) for t in (q[n : n + 1], k, v))
        rows.append(dense(*heads, both)[0].view(1, *q.shape[1:]))
    wanted = torch.cat(rows)
    torch.testing.assert_close(out, wanted)
    grad = torch.randn_like(out)
    leaves = q, spec_k, spec_v, cache_k, cache_v
    theirs = torch.autograd.grad(wanted, leaves, grad)
    torch.testing.assert_close(torch.autograd.grad(out, leaves, grad), theirs)
    with pytest.raises(ValueError, match="tree_attention: spec_attn_bias must have shape"):
        xops.tree_attention(q, spec_k, spec_v, cache_k, cache_v, bias[1:], prefix)
    with pytest.raises(NotImplementedError, match="q_fp8 must be None"):
        xops.tree_attention(q, spec_k, spec_v, cache_k, cache_v, bias, prefix, q_fp8=q)


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
