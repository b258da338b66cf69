"""NATTEN's names against attention with the mask of NATTEN's definition.

The code compared with is NATTEN 0.21.7.dev1, commit 8c8729f496a4: `flex.py` for the mask of a
neighborhood, `functional.py` for additional keys and packed sequences.
"""

import itertools

import pytest
import torch

from omniattn.compat import natten


def seen(shape, kernel, stride, dilation, causal):
    """Pairs of tokens of a grid, (T, T), by NATTEN's definition of each axis."""

    def axis(n, kernel, stride, dilation, causal):
        allowed = torch.zeros(n, n, dtype=torch.bool)
        for q in range(n):
            group, place = q % dilation, q // dilation
            count = (n - group + dilation - 1) // dilation
            if causal:
                last = min(place // stride * stride + stride - 1, count - 1)
                window = range(max(0, last - kernel + 1), place + 1)
            else:
                leader = min(place // stride * stride + stride // 2, count - 1)
                first = min(max(leader - kernel // 2, 0), count - kernel)
                window = range(first, first + kernel)
            for k in window:
                allowed[q, group + k * dilation] = True
        return allowed

    found = torch.ones(1, 1, dtype=torch.bool)
    for n, *options in zip(shape, kernel, stride, dilation, causal, strict=True):
        found = torch.kron(found, axis(n, *options))
    return found


def dense(q, k, v, mask, scale=None):
    groups = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(groups, 2).transpose(1, 2) for t in (k, v))
    logits = q.transpose(1, 2) @ k.mT * (scale or q.shape[-1] ** -0.5)
    logits = logits.masked_fill(~mask, -torch.inf)
    return (logits.softmax(-1) @ v).transpose(1, 2), logits.logsumexp(-1).transpose(1, 2)


def inputs(*grid, heads=4, kv_heads=2):
    torch.manual_seed(0)
    sizes = ((heads, 8), (kv_heads, 8), (kv_heads, 4))
    return [torch.randn(2, *grid, *s, dtype=torch.float64, requires_grad=True) for s in sizes]


CASES = [
    (natten.na1d, (11,), ([4], [2], [2], [True])),
    (natten.na2d, (5, 6), ((3, 2), (2, 1), (1, 3), (False, True))),
    (natten.na3d, (3, 4, 4), ((2, 3, 2), (1, 1, 2), (1, 1, 2), (True, False, False))),
]


@pytest.mark.parametrize("more", (0, 3))
@pytest.mark.parametrize("call, grid, options", CASES)
def test_neighborhoods_with_additional_keys_are_attention_with_a_mask(call, grid, options, more):
    q, k, v = inputs(*grid)
    extra = [torch.randn(2, more, *t.shape[-2:], dtype=t.dtype, requires_grad=True) for t in (k, v)]
    names = dict(zip(("additional_keys", "additional_values"), extra, strict=True)) if more else {}
    out, lse = call(q, k, v, *options, scale=0.3, **names, return_lse=True)
    flat = [t.flatten(1, len(grid)) for t in (q, k, v)]
    mask = seen(grid, *options)
    mask = torch.cat([mask, mask.new_ones(len(mask), more)], 1)
    keys, values = (torch.cat([t, e], 1) for t, e in zip(flat[1:], extra, strict=True))
    wanted = dense(flat[0], keys, values, mask, 0.3)
    torch.testing.assert_close(out.flatten(1, len(grid)), wanted[0])
    torch.testing.assert_close(lse.flatten(1, len(grid)), wanted[1])
    leaves = [q, k, v, *(extra if more else ())]
    ours = torch.autograd.grad((out.sin().sum() + lse.cos().sum()), leaves)
    theirs = torch.autograd.grad((wanted[0].sin().sum() + wanted[1].cos().sum()), leaves)
    torch.testing.assert_close(ours, theirs)


def test_options_of_kernels_change_nothing():
    q, k, v = inputs(6)
    plain = natten.na1d(q, k, v, 3)
    same = natten.neighborhood_attention_generic(
        q, k, v, 3, None, None, None, 0.0, None, None, {"backend": "flex-fmha", "kv_tile_size": 4},
        "cutlass-fna", (4,), (4,), torch_compile=True, kernel_schedule="coop",
    )  # fmt: skip
    assert torch.equal(plain, same)
    natten.use_deterministic_algorithms()
    natten.set_memory_usage_preference("strict")
    assert natten.are_deterministic_algorithms_enabled() and natten.is_memory_usage_strict()
    natten.NattenContext.reset()
    assert natten.is_memory_usage_default() and not natten.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("causal", (False, True))
def test_packed_sequences_are_apart_and_causal_from_the_first_key(causal):
    q, k, v = (t[:1] for t in inputs(7))
    k, v = k[:, :6], v[:, :6]
    lengths = [torch.tensor([3, 4], dtype=torch.int32), torch.tensor([4, 2], dtype=torch.int32)]
    found = [natten.attention(q, k, v, causal, None, *lengths, return_lse=True)]
    names = "cumulative_seqlen_Q", "cumulative_seqlen_KV", "max_seqlen_Q", "max_seqlen_KV"
    packed = natten.generate_varlen_parameters(q, k, v, *lengths)
    packed = dict(zip(names, packed, strict=True))
    found.append(natten.attention(q, k, v, causal, **packed, return_lse=True))
    mask = torch.block_diag(*(torch.ones(*n) for n in ((3, 4), (4, 2)))).bool()
    if causal:
        mask &= torch.block_diag(*(torch.ones(*n).tril() for n in ((3, 4), (4, 2)))).bool()
    for each in found:
        torch.testing.assert_close(each, dense(q, k, v, mask))
    assert natten.generate_varlen_parameters(q, k, v) == (None, None, 0, 0)


def test_merged_sets_of_keys_are_their_union():
    q, k, v = inputs(6)
    parts = [(k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise((0, 1, 4, 6))]
    pieces = [natten.attention(q, *p, return_lse=True) for p in parts]
    out, lse = natten.merge_attentions(*zip(*pieces, strict=True))
    torch.testing.assert_close((out, lse), natten.attention(q, k, v, return_lse=True))


def test_layers_have_the_names_of_weights_and_results_of_natten():
    torch.manual_seed(0)
    layer = natten.NeighborhoodAttention2D(8, 2, (3, 2), is_causal=(False, True), qk_scale=0.5)
    assert {n: tuple(p.shape) for n, p in layer.named_parameters()} == {
        "qkv.weight": (24, 8), "qkv.bias": (24,), "proj.weight": (8, 8), "proj.bias": (8,),
    }  # fmt: skip
    x = torch.randn(2, 4, 3, 8)
    q, k, v = layer.qkv(x).view(2, 4, 3, 3, 2, 4).permute(3, 0, 1, 2, 4, 5)
    out = natten.na2d(q, k, v, (3, 2), is_causal=(False, True), scale=0.5)
    torch.testing.assert_close(layer(x), layer.proj(out.flatten(-2)))
    assert "kernel_size=(3, 2)" in repr(layer)
    for axes, cls in ((1, natten.NeighborhoodAttention1D), (3, natten.NeighborhoodAttention3D)):
        assert cls(8, 2, 2, qkv_bias=False)(torch.randn(1, *(3,) * axes, 8)).dim() == axes + 2


def test_errors_name_arguments_of_natten():
    q, k, v = inputs(6)
    wrong = [
        (dict(additional_keys=k), ValueError, "na1d: additional_keys and additional_values must"),
        (dict(backend="flex"), ValueError, 'na1d: backend must be one of "cutlass-fna"'),
        (dict(attention_kwargs={"is_causal": True}), TypeError, "na1d: attention_kwargs must have"),
        (dict(attention_kwargs={"q_tile_sise": 1}), TypeError, "did you mean"),
        (dict(kernel_size=7), ValueError, "na1d: "),
        (dict(additional_keys=k[..., :4], additional_values=v), ValueError, "additional_keys must"),
    ]
    for options, error, text in wrong:
        with pytest.raises(error, match=text):
            natten.na1d(q, k, v, **{"kernel_size": 3, **options})
    with pytest.raises(TypeError, match="na1d: key must"):
        natten.na1d(q, k.float(), v, 3)
    with pytest.raises(ValueError, match="na2d: query must have 5 dimensions"):
        natten.na2d(q, k, v, 3)
    with pytest.raises(ValueError, match="attention: cumulative_seqlen_Q, cumulative_seqlen_KV"):
        natten.attention(q[:1], k[:1], v[:1], cumulative_seqlen_Q=torch.tensor([0, 6]))
    with pytest.raises(ValueError, match="NeighborhoodAttention1D: embed_dim must be a multiple"):
        natten.NeighborhoodAttention1D(7, 2, 3)
    with pytest.raises(ValueError, match="NeighborhoodAttention2D: kernel_size must have 2 values"):
        natten.NeighborhoodAttention2D(8, 2, (3,))
