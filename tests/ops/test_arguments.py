"""Arguments that no function takes raise an error that names function, argument and value."""

import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from nested_tensors import nested
from torch.nn.attention.bias import causal_upper_left

from omniattn import functional as F
from omniattn.functional import masks, scores

X = torch.ones(2, 4)
Q = torch.ones(1, 3, 2, 4)
COS = torch.ones(3, 2)
CU = torch.tensor([0, 3])
ROUTING = F.softmax_top_k(X, 2)
TARGET = torch.tensor([1, 2])
ARRAY = np.ones(2)
SDPA = "scaled_dot_product_attention"


STATE = (-torch.ones(1, 1).cfloat(), torch.ones(1, 1).cfloat(), torch.ones(1))


def delta(backend=None, q=Q, v=Q, g=-Q, **options):
    return F.kimi_delta_attention(q, Q, v, g, Q[..., 0], backend=backend, **options)


def varlen(**options):
    return F.attention_varlen(Q[0], Q[0], Q[0], CU, CU, **options)


CASES = [
    (
        lambda: F.attention(Q, Q, Q, softcap="bad"),
        "attention: softcap must be .* got softcap='bad'",
    ),
    (lambda: F.attention(Q, Q, Q, softcap=math.nan), "attention: softcap .* >= 0, got softcap=nan"),
    (lambda: F.attention(Q, Q, Q, scale=ARRAY), "attention: scale must be a finite number, got"),
    (lambda: F.attention(Q, Q, Q, scale=True), "attention: scale must be .* got scale=True"),
    (
        lambda: F.attention(Q, Q, Q, softcap=1e-40),
        r"attention: scale, softcap and scale / softcap must be below 1.7e\+38 unless q is float64",
    ),
    (lambda: F.attention(Q, Q, Q, softcap=3e38), "attention: scale, softcap and scale / softcap"),
    (lambda: F.attention(Q, Q, Q, scale=-1e39), "attention: scale, softcap and .* got scale=-1e"),
    (
        lambda: F.attention(Q, Q, Q, backend=ARRAY),
        r"attention: backend must be one of .*, got backend=array\(",
    ),
    (
        lambda: F.linear(X, X, X[0].to_sparse()),
        "linear: bias must be strided, got bias.layout=torch.sparse_coo",
    ),
    (
        lambda: F.linear(X, X.to_sparse()),
        "linear: weight must be strided and not quantized, got weight.layout=torch.sparse_coo",
    ),
    (lambda: F.top_k(X.to_mkldnn(), 1), "top_k: scores must be strided .*=torch._mkldnn, scores."),
    (lambda: F.attention(Q, Q, Q, dropout_p=1.5), "attention: dropout_p .* >= 0 and <= 1, got"),
    (lambda: F.attention(Q, Q, Q, window_size=4), "attention: window_size .* got window_size=4"),
    (
        lambda: F.attention(Q, Q, Q, window_size=(-2, 0)),
        "attention: window_size must be two ints >= -1",
    ),
    (
        lambda: F.attention(Q, Q, Q, normalizer=ARRAY),
        'attention: normalizer must be one of "softmax"',
    ),
    (lambda: F.attention(Q, Q, Q, causal="no"), "attention: causal must be True or False, got"),
    (
        lambda: F.attention(Q, Q, Q, return_lse=1),
        "attention: return_lse must be True or False, got",
    ),
    (
        lambda: F.attention(Q, Q, Q, window_size=(2**40, 0)),
        "attention: window_size must be two ints >= -1 and <= 1099511627775, got window_size=",
    ),
    (
        lambda: F.attention(Q, Q, Q, scale=X.sum().requires_grad_()),
        "attention: scale must be a number, which gets no gradient; detach it, got scale=tensor",
    ),
    (lambda: F.attention(Q, Q, Q, scale=10**400), "attention: scale must be a finite number, got"),
    (lambda: F.attention_cached(Q, Q, Q, CU[1:], scale=math.inf), "attention_cached: scale must"),
    (lambda: varlen(max_seqlen_q=2.5), "attention_varlen: max_seqlen_q must be an int >= 0, got"),
    (lambda: varlen(softcap=-1.0), "attention_varlen: softcap must .* got softcap=-1.0"),
    (
        lambda: F.merge_attention(Q, [Q]),
        "merge_attention: outs must be a list of tensors, got outs=",
    ),
    (lambda: F.select_attention(Q, Q, Q, tau=0), "select_attention: tau .* number > 0, got tau=0"),
    (lambda: F.select_attention(Q, Q, Q, theta=math.nan), "select_attention: theta must be"),
    (
        lambda: F.scaled_dot_product_attention(Q, Q.double(), Q),
        f"{SDPA}: key must have .* of query",
    ),
    (lambda: F.scaled_dot_product_attention(Q, Q[..., 1:], Q), f"{SDPA}: query and key must have"),
    (lambda: F.scaled_dot_product_attention(Q, Q, Q[:, :, 1:]), f"{SDPA}: key and value must have"),
    (
        lambda: F.scaled_dot_product_attention(Q, Q, Q[:, 1:]),
        rf"{SDPA}: .* must be broadcastable .* got query.shape=\(1, 3, 2, 4\), key.shape=",
    ),
    (
        lambda: F.scaled_dot_product_attention(Q, Q[:, 1:], Q[:, 1:], enable_gqa=True),
        f"{SDPA}: the heads of query must be a multiple of those of key, got query.shape=",
    ),
    (
        lambda: F.scaled_dot_product_attention(X, X, X, enable_gqa=True),
        f"{SDPA}: query must have at least 3 dimensions with enable_gqa=True, got query.shape=",
    ),
    (lambda: F.scaled_dot_product_attention(X[0], X, X), f"{SDPA}: query must have at least 2"),
    (
        lambda: F.scaled_dot_product_attention(Q, Q, Q, causal_upper_left(2, 3)),
        rf"{SDPA}: attn_mask must be made for \(Tq, Tk\)=\(2, 2\), got attn_mask=CausalBias",
    ),
    (
        lambda: F.scaled_dot_product_attention(Q, Q, Q, causal_upper_left(2, 2), is_causal=True),
        f"{SDPA}: is_causal must be False with a CausalBias",
    ),
    (lambda: F.scaled_dot_product_attention(Q, Q, Q, is_causal=1), f"{SDPA}: is_causal must be"),
    (lambda: F.scaled_dot_product_attention(Q, Q, Q, enable_gqa=1), f"{SDPA}: enable_gqa must be"),
    (
        lambda: F.attention(Q, Q, Q, mask=causal_upper_left(3, 4)),
        r"attention: mask must be made for \(Tq, Tk\)=\(3, 3\), got mask=CausalBias of \(3, 4\)",
    ),
    (
        lambda: F.scaled_dot_product_attention(Q, Q, Q, 1),
        f"{SDPA}: attn_mask must be a torch.Tensor",
    ),
    (
        lambda: F.scaled_dot_product_attention(Q, Q, Q, X),
        f"{SDPA}: attn_mask must be broadcastable",
    ),
    (lambda: F.scaled_dot_product_attention(Q, Q, Q, scale="bad"), f"{SDPA}: scale must be"),
    (lambda: masks.Chunked(2.5), "Chunked: size must be an int >= 1, got size=2.5"),
    (lambda: masks.Fixed(2, 3), "Fixed: columns must be an int >= 0 and <= 2, got columns=3"),
    (lambda: masks.SlidingWindow(None), "SlidingWindow: left must be an int >= -1, got left=None"),
    (lambda: masks.Neighborhood(2), "Neighborhood: size must be odd, got size=2"),
    (lambda: masks.sliding_window(2, "torch"), "sliding_window: size must be two ints"),
    (lambda: masks.All(3), "All: masks must be a tuple of masks, got masks=3"),
    (lambda: scores.T5Bias(ARRAY), "T5Bias: table must be a torch.Tensor"),
    (lambda: scores.WindowBias(X, 3), "WindowBias: window must be two ints >= 1, got window=3"),
    (lambda: F.rms_norm(X, eps="bad"), "rms_norm: eps must be .* >= 0, got eps='bad'"),
    (
        lambda: F.rms_norm(X, eps=-1e-6),
        "rms_norm: eps must be a finite number >= 0, got eps=-1e-06",
    ),
    (lambda: F.rms_norm(X, offset=math.nan), "rms_norm: offset must be a finite number, got"),
    (
        lambda: F.group_norm(X, 2.0),
        "group_norm: num_groups must be an int >= 1, got num_groups=2.0",
    ),
    (
        lambda: F.group_norm(X, 2, center="no"),
        "group_norm: center must be True or False, got center",
    ),
    (lambda: F.apply_rotary(Q, Q, COS, COS, interleaved=[1]), "apply_rotary: interleaved must be"),
    (lambda: F.apply_rotary(Q, Q, COS, COS, inverse=1), "apply_rotary: inverse .* got inverse=1"),
    (lambda: F.geglu(X, approximate=ARRAY), 'geglu: approximate must be one of "none", "tanh"'),
    (lambda: F.mlp(X, X, X.T, activation=[1]), r"mlp: activation must .* got activation=\[1\]"),
    (lambda: F.mlp(X, X, X.T, dropout_p=1), "mlp: dropout_p must .* < 1, got dropout_p=1"),
    (lambda: F.mlp(X, X, X.T, recompute="no"), "mlp: recompute must be True or False, got"),
    (lambda: F.cross_entropy(X, TARGET, ignore_index=None), "cross_entropy: ignore_index must"),
    (
        lambda: F.cross_entropy(X, TARGET, ignore_index=2**70),
        "cross_entropy: ignore_index must fit into 64 bits, got ignore_index=11805",
    ),
    (
        lambda: F.cross_entropy(X, TARGET, reduction=[]),
        r"cross_entropy: reduction .*reduction=\[\]",
    ),
    (lambda: F.rope_frequencies(4, base=None), "rope_frequencies: base .* > 0, got base=None"),
    (lambda: F.rope_frequencies(4, seq_len="bad"), "rope_frequencies: seq_len must be an int >= 0"),
    (lambda: F.axial_frequencies(8, num_axes=ARRAY), "axial_frequencies: num_axes must be an int"),
    (lambda: F.mrope_axes(3), "mrope_axes: sections must be a sequence of ints, got sections=3"),
    (lambda: F.sinusoidal(CU, 4.5), "sinusoidal: dim must be an int >= 1, got dim=4.5"),
    (lambda: F.interpolate_grid(X, 2, (1, 1)), "interpolate_grid: old must be two ints >= 1, got"),
    (lambda: F.alibi_slopes(2.5), "alibi_slopes: num_heads must be an int >= 1, got num_heads=2.5"),
    (lambda: F.dropout(X, None), "dropout: p must be .* got p=None"),
    (
        lambda: F.dropout(X, 0.5, seed=PAIRS.long()),
        "dropout: seed must be .* got seed=a nested tensor of",
    ),
    (lambda: F.orthogonal_gaussian(2, 2, dtype=torch.int32), "orthogonal_gaussian: dtype must be"),
    (
        lambda: F.orthogonal_gaussian(2, 2, dtype="float"),
        "orthogonal_gaussian: dtype must be .* got dtype='float'",
    ),
    (
        lambda: F.orthogonal_gaussian(2, 2, generator=0),
        "orthogonal_gaussian: generator must be .* got generator=0",
    ),
    (lambda: F.normal_like(X, seed=1), "normal_like: seed must be .* got seed=1"),
    (lambda: F.top_k(X, 1.0), "top_k: k must be an int, got k=1.0"),
    (lambda: F.softmax_top_k(X, "2"), "softmax_top_k: k must be an int, got k='2'"),
    (lambda: F.softmax_top_k(X, 2, scale=math.nan), "softmax_top_k: scale must .* got scale=nan"),
    (
        lambda: F.softmax_top_k(X, 2, router_grad=None),
        'softmax_top_k: router_grad must be one of "',
    ),
    (lambda: F.sigmoid_top_k(X, 2, scale="1"), "sigmoid_top_k: scale must .* got scale='1'"),
    (lambda: F.sigmoid_top_k(X, 2, bias=1.0), "sigmoid_top_k: bias must .* got bias=1.0"),
    (lambda: F.noisy_top_k(X, X, 1, noise_eps=None), "noisy_top_k: noise_eps must be a finite"),
    (lambda: F.expert_counts(TARGET, 2.5), "expert_counts: experts must be an int >= 1, got"),
    (
        lambda: F.update_router_bias(X[0, :2], TARGET, "1"),
        "update_router_bias: rate must be a finite",
    ),
    (
        lambda: F.update_default_vectors(X, X, TARGET, decay=[]),
        "update_default_vectors: decay must",
    ),
    (lambda: F.default_vector_gradient(X, X, X), "default_vector_gradient: routing must be a"),
    (lambda: F.router_jitter(X, 0.1, seed=1), "router_jitter: seed must be .* got seed=1"),
    (lambda: F.drop_second_at_random(ROUTING, 1), "drop_second_at_random: seed must be"),
    (lambda: F.drop_over_capacity(X, 1), "drop_over_capacity: routing must be a Routing"),
    (lambda: F.drop_over_capacity(ROUTING, 1.5), "drop_over_capacity: capacity must be an int"),
    (lambda: F.expert_capacity(7, 4, 2, ARRAY), "expert_capacity: factor must be a finite number"),
    (
        lambda: F.dsa_indexer_loss(Q, Q[:, :, 0], None, Q.double(), Q),
        "dsa_indexer_loss: k must have the dtype of q, got k.dtype=torch.float32, q.dtype=",
    ),
    (lambda: delta("x", l2norm=True), "kimi_delta_attention: backend must be one of"),
    (lambda: delta(q=Q.to_sparse(), l2norm=True), "kimi_delta_attention: q must be strided, got"),
    (lambda: delta(v=Q.to_sparse()), "kimi_delta_attention: v must be strided, got v.layout="),
    (lambda: delta(g=-Q.to_sparse()), "kimi_delta_attention: g must be strided, got g.layout="),
    (
        lambda: F.retention(Q, Q, Q, cu_seqlens=CU.to_sparse()),
        "retention: cu_seqlens must be strided, got cu_seqlens.layout=torch.sparse_coo",
    ),
    (
        lambda: F.attention_varlen(Q[0], Q[0], Q[0], CU.to_sparse(), CU),
        "attention_varlen: cu_seqlens_q must be strided, got cu_seqlens_q.layout=",
    ),
    (lambda: F.na1d(Q.long(), Q, Q, 3), "na1d: query must be float64, .* got query.dtype=torch.i"),
    (lambda: F.na1d(Q, Q[..., 1:], Q, 3), "na1d: query and key must have the same B and D, got"),
    (lambda: F.na1d(Q, Q, Q, True), "na1d: kernel_size must be an int >= 1 and <= 3, got"),
    (lambda: F.na1d(Q, Q, Q, 3, scale="1"), "na1d: scale must be a finite number, got scale='1'"),
    (lambda: F.na1d(Q, Q, Q, 3, backend="x"), "na1d: backend must be one of"),
    (lambda: F.s4d_kernel(*STATE, length=True), "s4d_kernel: length must be an int >= 0 .*got"),
    (lambda: F.s4d_kernel(*STATE, torch.tensor(True)), "s4d_kernel: length must be an int >= 0"),
    (
        lambda: F.s4d_kernel(*STATE[:2], -STATE[2], 3),
        r"s4d_kernel: dt must be >= 0, got dt.min\(\)=-1",
    ),
    *(
        (partial(call, 10**20), f"{op}: {name} must fit into 64 bits or be a float, got {name}=1")
        for op, name, call in (
            ("mlstm", "scale", lambda n: F.mlstm(Q, Q, Q, Q[..., 0], Q[..., 0], scale=n)),
            ("linear_attention", "eps", lambda n: F.linear_attention(Q, Q, Q, eps=n)),
            ("selective_attention", "softcap", lambda n: F.selective_attention(Q, Q, Q, softcap=n)),
        )
    ),
]


@pytest.mark.parametrize(("call", "message"), CASES, ids=range(len(CASES)))
def test_names_function_argument_and_value(call, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert re.match(message, str(caught.value))


LARGE = np.zeros((50, 40), np.float32)
ONE_LINE = [
    (lambda: F.swiglu(LARGE), r"got gate=ndarray of shape \(50, 40\) and float32$"),
    (lambda: F.swiglu(LARGE.tolist()), r"got gate=\[\[0.0, 0.0.*\.\.\.$"),
    (lambda: F.top_k(X, torch.zeros(9)), r"got k=Tensor of shape \(9,\) and torch.float32$"),
    (lambda: F.attention(Q, Q, Q, mask=LARGE), r"got mask=ndarray of shape \(50, 40\) and"),
    (
        lambda: F.attention(Q, Q, Q, relative=[LARGE]),
        r"got relative=\[ndarray of shape \(50, 40\) and float32\]$",
    ),
    (lambda: F.dropout(X, 0.5, seed=torch.arange(9)), r"Tensor of shape \(9,\) and torch.int64$"),
]


@pytest.mark.parametrize(("call", "message"), ONE_LINE, ids=range(len(ONE_LINE)))
def test_errors_show_sizes_and_one_line(call, message):
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        call()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_a_predicate_as_a_mask_is_told_how_to_become_one():
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(b, h, q, k):
        return k <= q

    block_mask = create_block_mask(causal, None, None, 2, 2, device="cpu")
    with pytest.raises(TypeError, match=r"must be a Tensor or a Mask .*from_block_mask\(mask\)"):
        F.attention(Q, Q, Q, mask=block_mask)
    with pytest.raises(TypeError, match=r"from_predicate\(mask, Tq, Tk\)"):
        F.select_attention(Q, Q, Q, mask=causal)


AUTOCAST_CASES = [
    (lambda: F.linear(X, None), "linear: weight must be a torch.Tensor, got weight=None"),
    (lambda: F.linear(X, X, 1.0), "linear: bias must be a torch.Tensor, got bias=1.0"),
    (lambda: F.linear(X, X.long()), "linear: weight must have the dtype of x"),
    (lambda: F.linear_cross_entropy(X, None, TARGET), "linear_cross_entropy: weight must be a"),
    (lambda: F.rms_norm(X, X[0].long()), "rms_norm: weight must have the dtype of x"),
    (lambda: F.swiglu(X, X.cfloat()), "swiglu: up must have the dtype of gate"),
]


@pytest.mark.parametrize(("call", "message"), AUTOCAST_CASES, ids=range(len(AUTOCAST_CASES)))
def test_autocast_casts_floating_tensors_only(call, message):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=message):
        call()


def test_takes_numbers_of_numpy_and_tensors():
    torch.testing.assert_close(
        F.attention(Q, Q, Q, scale=np.float32(0.5), window_size=(np.int64(1), 0)),
        F.attention(Q, Q, Q, scale=torch.tensor(0.5), window_size=[1, 0]),
    )
    assert torch.equal(varlen(max_seqlen_q=CU[1], max_seqlen_k=np.int64(3)), varlen())


PAIRS = nested(torch.rand(2, 3))
