"""What no function takes is refused in its own words: function, argument and value."""

import inspect
import math
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_upper_left
from torch.utils._pytree import tree_map_only

from omniattn import functional as F
from omniattn.functional import masks, scores
from omniattn.testing import registry

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
        lambda: F.attention(Q, Q, Q, normaliser=ARRAY),
        'attention: normaliser must be one of "softmax"',
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
    (lambda: masks.Neighbourhood(2), "Neighbourhood: size must be odd, got size=2"),
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
    (lambda: F.s4d_kernel(*STATE, length=True), "s4d_kernel: length must be an int >= 0, got"),
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
    (lambda: F.attention(Q, Q, Q, relative=[LARGE]), r"got relative=\[array\(.*\.\.\.$"),
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


class Tagged(torch.Tensor):
    """A tensor with another name."""


class Asked(torch.Tensor):
    """Its values are elsewhere: what calls of functions get, by __torch_function__."""

    @staticmethod
    def of(t):
        self = t.new_empty(t.shape).as_subclass(Asked)
        self.values_elsewhere = t
        return self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda t: t.__dict__["values_elsewhere"], (args, kwargs))
        return func(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    """It has no memory: what calls of ops get, by __torch_dispatch__."""

    @staticmethod
    def __new__(cls, t):
        self = torch.Tensor._make_wrapper_subclass(
            cls, t.shape, strides=t.stride(), dtype=t.dtype, device=t.device
        )
        self.inner = t
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        return func(*args, **kwargs)


def calls_by_tensor(spec):
    """The first case of the op with each of its tensors, by the tensor's name; not parts of them
    that only the OpSpec has."""
    known = inspect.signature(spec.function).parameters
    calls = {}
    for case in spec.cases:
        call = spec.call(case, torch.float32)
        calls = {name: call for name in call.tensors if name in known} | calls
    return calls


@pytest.mark.parametrize("spec", registry().values(), ids=registry())
@pytest.mark.parametrize("kind", [lambda t: t.as_subclass(Tagged), Asked.of, Wrapped])
def test_a_subclass_is_its_tensor_or_refused(spec, kind):
    for name, call in calls_by_tensor(spec).items():
        torch.manual_seed(0)
        want = call.run(spec.function)
        tensors = {**call.tensors, name: kind(call.tensors[name])}
        torch.manual_seed(0)
        try:
            got = replace(call, tensors=tensors).run(spec.function)
        except RuntimeError as error:  # the dispatcher does not see what is in optional lists
            assert kind is Wrapped
            assert "with memory of its own" in str(error)
            continue
        got = [t.as_subclass(torch.Tensor) for t in got]
        torch.testing.assert_close(got, list(want), rtol=0, atol=0, msg=f"{spec.name}: {name}")


@pytest.mark.parametrize("spec", registry().values(), ids=registry())
@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_causal_bias_is_a_mask_alone(spec, backend):
    """It has memory, which is uninitialised."""
    for name, call in calls_by_tensor(spec).items():
        if name in ("mask", "attn_mask") and spec.family == "attention":
            continue
        shape = call.tensors[name].shape
        bias = causal_upper_left(*shape[-2:]) if len(shape) > 1 else causal_upper_left(1, *shape)
        call = replace(call, tensors={**call.tensors, name: bias})
        with pytest.raises((TypeError, ValueError)) as caught:
            call.run(partial(spec.function, backend=backend))
        assert re.match(rf"{spec.name}: .*{name}", str(caught.value))


def nested(t):
    return torch.nested.nested_tensor(list(t.detach()), layout=torch.jagged)


# Functions without an OpSpec that take tensors of tokens or of pairs.
ROWS = nested(torch.rand(2, 3, 4))
HEADS = nested(torch.rand(2, 3, 2, 4))
PAIRS = nested(torch.rand(2, 3))
STRIDED = torch.nested.nested_tensor([torch.rand(3)] * 2)
NESTED_CALLS = {
    "alibi_bias": lambda: F.alibi_bias(PAIRS, 3, 3),
    "cv_squared": lambda: F.cv_squared(ROWS),
    "dpo_loss": lambda: F.dpo_loss(PAIRS, PAIRS, PAIRS, PAIRS),
    "expert_choice": lambda: F.expert_choice(ROWS, 2),
    "fft_conv": lambda: F.fft_conv(ROWS, X),
    "interpolate_positions": lambda: F.interpolate_positions(ROWS, 3),
    "llama4_top_k": lambda: F.llama4_top_k(ROWS, 2),
    "load_balance_loss": lambda: F.load_balance_loss(ROWS, ROUTING),
    "masked_positions": lambda: F.masked_positions(ROWS.long()),
    "merge_attention": lambda: F.merge_attention([HEADS], [ROWS]),
    "noisy_top_k": lambda: F.noisy_top_k(ROWS, ROWS, 2),
    "normal_like": lambda: F.normal_like(ROWS),
    "orpo_loss": lambda: F.orpo_loss(PAIRS, PAIRS),
    "rotary_tables": lambda: F.rotary_tables(F.rope_frequencies(4), PAIRS.long()),
    "router_z_loss": lambda: F.router_z_loss(ROWS),
    "s4d": lambda: F.s4d(ROWS, ROWS, ROWS, ROWS, ROWS),
    "selective_scan": lambda: F.selective_scan(
        X[None], X[None], STRIDED.cfloat(), X[None], X[None]
    ),
    "sequence_log_prob": lambda: F.sequence_log_prob(HEADS, TARGET[None]),
    "sigmoid_top_k": lambda: F.sigmoid_top_k(ROWS, 2),
    "simpo_loss": lambda: F.simpo_loss(PAIRS, PAIRS),
    "softmax_top_k": lambda: F.softmax_top_k(ROWS, 2),
    "ssm_recurrence": lambda: F.ssm_recurrence(ROWS, X, X, X),
    "top_k_softmax": lambda: F.top_k_softmax(ROWS, 2),
}


@pytest.mark.parametrize("name", NESTED_CALLS)
def test_a_nested_tensor_is_refused_where_no_spec_says_so(name):
    with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
        NESTED_CALLS[name]()


@pytest.mark.parametrize("spec", registry().values(), ids=registry())
@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_nested_tensor_is_taken_or_refused(spec, backend):
    for name, call in calls_by_tensor(spec).items():
        t = call.tensors[name]
        if t.dim() < 2 or 0 in t.shape:  # no nested tensor has this form
            continue
        call = replace(call, tensors={**call.tensors, name: nested(t)})
        try:
            call.run(partial(spec.function, backend=backend))
        except (TypeError, ValueError) as error:
            assert re.match(f"({spec.name}|BoolMask): ", str(error)), error
