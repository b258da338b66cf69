"""Functions of fla.ops for attention and for several keys a token, and of fla.ops.utils."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.compat import fla

B, T, H, K, V = 2, 9, 2, 4, 3
CU = torch.tensor([0, 4, 4, 9], dtype=torch.int32)


def tensors():
    torch.manual_seed(0)
    q, k = torch.randn(2, B, T, H, K, dtype=torch.float64).unbind()
    return {
        "q": q,
        "k": nnf.normalize(k, dim=-1),
        "v": torch.randn(B, T, H, V, dtype=torch.float64),
        "g": nnf.logsigmoid(torch.randn(B, T, H, dtype=torch.float64)),
        "gk": nnf.logsigmoid(torch.randn(B, T, H, K, dtype=torch.float64)),
        "beta": torch.rand(B, T, H, dtype=torch.float64),
    }


def each(call, *given):
    """Results of a call for each packed sequence of CU."""
    edges = CU.tolist()
    parts = pairwise(edges)
    return torch.cat([call(*(t[:1, a:b] for t in given)) for a, b in parts if a < b], 1)


def test_attention_of_fla():
    x = tensors()
    qkv = [x[name] for name in "qkv"]
    sinks = torch.randn(H, dtype=torch.float64)

    def attend(q, k, v):
        return functional.attention(q, k, v, causal=True, window_size=(2, 0), sinks=sinks)

    found = fla.parallel_attn(*qkv, window_size=3, sink_bias=sinks)
    torch.testing.assert_close(found, attend(*qkv))
    packed = [t[:1] for t in qkv]
    found = fla.parallel_attn(*packed, window_size=3, sink_bias=sinks, cu_seqlens=CU)
    torch.testing.assert_close(found, each(attend, *qkv))
    found = fla.parallel_forgetting_attn(*packed, x["g"][:1], scale=0.4, cu_seqlens=CU)

    def forgetting(q, k, v, g):
        return functional.forgetting_attention(q, k, v, g, scale=0.4)

    torch.testing.assert_close(found, each(forgetting, *qkv, x["g"]))
    torch.testing.assert_close(fla.parallel_attn(*qkv, x["g"], 0.4), forgetting(*qkv, x["g"]))
    found = fla.parallel_wall_attn(*qkv, x["gk"], g_scalar=x["g"], sink_bias=sinks)
    wall = functional.wall_attention(*qkv, x["gk"], x["g"], sinks=sinks)
    torch.testing.assert_close(found, wall)

    def second(q, r, k, v):
        return functional.parallax_attention(q, r, k, v, window_size=(2, 0), scale=0.4)

    x["r"] = x["k"].flip(1)
    qrkv = [x[name] for name in "qrkv"]
    torch.testing.assert_close(fla.parallel_parallax(*qrkv, 0.4, 3), second(*qrkv))
    found = fla.parallel_parallax(*(t[:1] for t in qrkv), 0.4, 3, CU)
    torch.testing.assert_close(found, each(second, *qrkv))
    w, beta, g = x["k"].flip(1), 2 * x["beta"], x["g"]
    o, keys = fla.parallel_path_attn(*qkv, w, beta, g, use_cache=True)
    path = functional.path_attention(*qkv, w, beta, g * K**-0.5, return_keys=True)
    torch.testing.assert_close((o, keys), path)
    assert fla.parallel_path_attn(*qkv, w, beta)[1] is None


def test_sparse_attention_of_fla():
    x = tensors()
    q, k, v = (x[name] for name in "qkv")
    gates = torch.rand(3, B, T, H, dtype=torch.float64)
    options = {"block_size": 2, "block_counts": 3, "window_size": 3}
    whole = fla.parallel_nsa(q, k, v, *gates, **options)
    packed = fla.parallel_nsa(*(t[:1] for t in (q, k, v, *gates)), **options, cu_seqlens=CU)

    def nsa(q, k, v, *gates):
        return fla.parallel_nsa(q, k, v, *gates, **options)

    torch.testing.assert_close(packed, each(nsa, q, k, v, *gates))
    # All blocks, given by their numbers: the second branch is dense.
    index = torch.arange(5).expand(B, T, H, 5)
    found = fla.parallel_nsa(q, k, v, *gates, index, block_size=2, window_size=3)
    branches = fla.parallel_nsa(q, k, v, *gates, **(options | {"block_counts": 5}))
    torch.testing.assert_close(found, branches)
    dense = functional.attention(q, k, v, causal=True)
    found = fla.parallel_nsa(q, k, v, None, gates[1], None, index, block_size=2)
    torch.testing.assert_close(found, gates[1][..., None] * dense)
    assert not torch.allclose(whole, dense)
    rows = [t[:1] for t in (q, k, v)]
    dense = each(lambda *each: functional.attention(*each, causal=True), q, k, v)
    for topk in (1, 9):  # 1 means all in fla
        found = fla.parallel_moba(*rows, CU, 5, chunk_size=2, topk=topk)
        torch.testing.assert_close(found, dense)
    found = fla.parallel_moba(*rows, CU, 5, chunk_size=2, topk=2)
    torch.testing.assert_close(
        found, each(lambda *t: functional.moba_attention(*t, block_size=2, topk=2), q, k, v)
    )


def test_several_keys_of_a_token():
    x = tensors()
    q, k, v, g, beta = (x[name] for name in ("q", "k", "v", "g", "beta"))
    edges = torch.tensor([0, 1, 3])
    for decays in (g[:1, :3], None):
        o, state = fla.chunk_gated_delta_product(
            *(q[:1, :3], k[:1], v[:1], decays, beta[:1], 3), cu_seqlens=edges,
            output_final_state=True,
        )  # fmt: skip
        parts = (t[:1].unflatten(1, (3, 3)) for t in (k, v))
        wanted = functional.gated_delta_product(
            q[:1, :3], *parts, decays, beta[:1].unflatten(1, (3, 3)), cu_seqlens=edges
        )
        torch.testing.assert_close((o, state), wanted)
    p = k.flip(-1)
    wanted = functional.comba(q, k, v, p, g, beta)[0]
    torch.testing.assert_close(fla.chunk_comba(q, k, v, p, g, beta)[0], wanted)
    torch.testing.assert_close(fla.fused_recurrent_comba(q, k, p, v, g, beta)[0], wanted)
    one = torch.ones_like(beta)
    torch.testing.assert_close(
        fla.fused_recurrent_comba(q, k, None, v, g)[0], functional.comba(q, k, v, k, g, one)[0]
    )
    b, w = torch.rand_like(k), torch.rand_like(v)
    rates, offsets = torch.randn(H).double(), torch.randn(H * K).double()
    gates = {"A_log": rates, "dt_bias": offsets, "use_gate_in_kernel": True, "state_v_first": True}
    decays = -rates.exp()[:, None] * nnf.softplus(x["gk"] + offsets.view(H, K))
    o, state = functional.gated_delta_rule_2(q, k, v, decays, b, w)
    for function in (fla.chunk_gdn2, fla.fused_recurrent_gdn2):
        found = function(q, k, v, x["gk"], b, w, output_final_state=True, **gates)
        torch.testing.assert_close(found, (o, state.mT))


@pytest.mark.parametrize("packed", [False, True])
def test_states_of_chunks(packed):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2 - packed, 140, 1, 4).unbind()
    g, beta = nnf.logsigmoid(torch.randn_like(k)), torch.rand(2 - packed, 140, 1)
    given = [q, nnf.normalize(k, dim=-1), v, g, beta]
    first = torch.randn(2, 1, 4, 4)
    options = {"initial_state": first, "output_final_state": True}
    if packed:
        options["cu_seqlens"] = torch.tensor([0, 70, 140])
    o, state, states = fla.chunk_kda(*given, **options, return_intermediate_states=True)
    torch.testing.assert_close((o, state), fla.chunk_kda(*given, **options))
    if packed:
        assert states.shape == (1, 4, 1, 4, 4)
        torch.testing.assert_close(states[0, ::2], first)
        part, begin, after = [t[:, 70:134] for t in given], first[1:], states[:, 3]
    else:
        assert states.shape == (2, 3, 1, 4, 4)
        torch.testing.assert_close(states[:, 0], first)
        part, begin, after = [t[:, :128] for t in given], first, states[:, 2]
    found = fla.chunk_kda(*part, initial_state=begin, output_final_state=True)[1]
    torch.testing.assert_close(after, found)


def test_rebased_adds_its_epsilon():
    x = tensors()
    q, k, v = (x[name] for name in "qkv")
    weights = torch.einsum("bihd,bjhd->bhij", q, k).square() * torch.ones(T, T).tril()
    for use_scale in (True, False):
        scaled = weights / K if use_scale else weights
        o = torch.einsum("bhij,bjhd->bihd", scaled, v)
        total = scaled.sum(-1).transpose(1, 2)
        options = {"use_scale": use_scale, "eps": 0.1}
        found = fla.parallel_rebased(q, k, v, **options)
        torch.testing.assert_close(found, o / (total[..., None] + 0.1))
        both = fla.parallel_rebased(q, k, v, **options, return_both=True)
        torch.testing.assert_close(both, (o.transpose(1, 2), total.transpose(1, 2)))
        found = fla.parallel_rebased(q, k, v, **options, use_normalize=False)
        torch.testing.assert_close(found, o)


def test_parts_of_packed_sequences():
    x = torch.randn(1, 9, 2, 3)
    pooled = fla.mean_pooling(x, 2, CU)
    bounds = ((0, 2), (2, 4), (4, 6), (6, 8), (8, 9))
    torch.testing.assert_close(pooled, torch.stack([x[:, a:b].mean(1) for a, b in bounds], 1))
    assert fla.mean_pooling(x[:, :0], 2).shape == (1, 0, 2, 3)
    for side in ("left", "right"):
        padded = fla.unpack_sequence(x[0], CU, side)
        assert padded.shape == (3, 5, 2, 3) and (padded[1] == 0).all()
        start = 1 if side == "left" else 0
        torch.testing.assert_close(padded[0, start : start + 4], x[0, :4])
        torch.testing.assert_close(fla.pack_sequence(padded, CU, side), x[0])
    with pytest.raises(ValueError, match="cu_seqlens must be boundaries of 2 sequences"):
        fla.pack_sequence(padded[:2], CU)
    g, rates = torch.randn(2, 4, 3), torch.randn(3)
    wanted = -rates.exp() * nnf.softplus(g + 1)
    torch.testing.assert_close(fla.fused_gdn_gate(g, rates, torch.ones(3)), wanted)
    torch.testing.assert_close(fla.fused_beta_sigmoid(g, 2.0), 2 * g.sigmoid())
    torch.testing.assert_close(fla.rotate_half(torch.arange(4.0)), torch.tensor([-2.0, -3, 0, 1]))


def test_deltaformer_reads_no_padding():
    q, k, v = torch.randn(3, 2, 6, 2, 4).unbind()
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    found = fla.deltaformer_attn(q, k, v, attention_mask=mask)
    torch.testing.assert_close(found[:1], fla.deltaformer_attn(q[:1], k[:1], v[:1]))
    alone = fla.deltaformer_attn(*(t[1:, 2:] for t in (q, k, v)))
    torch.testing.assert_close(found[1:, 2:], alone)
    assert (found[1, :2] == 0).all()


def test_warnings_and_errors_name_arguments_of_fla():
    x = tensors()
    q, k, v, g = (x[name] for name in ("q", "k", "v", "gk"))
    with pytest.warns(DeprecationWarning, match="transpose_state_layout is called state_v_first"):
        found = fla.chunk_gla(q, k, v, g, output_final_state=True, transpose_state_layout=True)
    wanted = fla.chunk_gla(q, k, v, g, output_final_state=True, state_v_first=True)
    torch.testing.assert_close(found, wanted)
    for call, text in (
        (lambda: fla.parallel_nsa(q, k, v), "parallel_nsa: block_indices must be given"),
        (lambda: fla.parallel_attn(q, k, v, cu_seqlens=CU), "parallel_attn: q must have shape"),
        (lambda: fla.parallel_moba(q, k, v, CU, 5, 2, 1), "must have shape"),
        (
            lambda: fla.chunk_gated_delta_product(q, k, v, None, x["beta"], 2),
            "k must have num_householder times as many tokens as q",
        ),
        (
            lambda: fla.chunk_gla(q, k, v, g, state_v_first=True, transpose_state_layout=True),
            "transpose_state_layout must be left out",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    for call, text in (
        (lambda: fla.parallel_wall_attn(q, k, v, g, window_size=3), "window_size is not supp"),
        (
            lambda: fla.parallel_attn(q, k, v, x["g"], sink_bias=torch.zeros(H)),
            "sink_bias must be None where g is given",
        ),
    ):
        with pytest.raises(NotImplementedError, match=text):
            call()
