"""Functions of jagged nested tensors equal themselves on each sequence alone."""

import pytest
import torch

from omniattn import functional as F

LENGTHS = (5, 1, 9)
KEYS = (7, 2, 4)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def jagged(*size: int, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    rows = [torch.randn(n, *size, dtype=torch.float64) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)


def like(x: torch.Tensor, *size: int) -> torch.Tensor:
    values = torch.randn(len(x.values()), *size, dtype=x.dtype, requires_grad=True)
    return torch.nested.nested_tensor_from_jagged(values, x.offsets())


weight, bias = torch.randn(2, 8, dtype=torch.float64)
up, gate = torch.randn(2, 12, 8, dtype=torch.float64)
seed = torch.tensor([1, 2])

TOKEN_WISE = {
    "rms_norm": lambda x: F.rms_norm(x, weight),
    "rms_norm-residual": lambda x: F.rms_norm(x, weight, residual=2 * x),
    "layer_norm": lambda x: F.layer_norm(x, weight, bias),
    "layer_norm-residual": lambda x: F.layer_norm(x, residual=x),
    "group_norm": lambda x: F.group_norm(x, 2, weight),
    "rms_norm_gated": lambda x: F.rms_norm_gated(x, 2 * x, weight),
    "linear": lambda x: F.linear(x, up, gate[:, 0]),
    "random_features": lambda x: F.random_features(x, up),
    "mlp": lambda x: F.mlp(x, up, gate.T, up_bias=up[:, 0]),
    "glu_mlp": lambda x: F.glu_mlp(x=x, gate_weight=gate, up_weight=up, down_weight=up.T),
    "swiglu": lambda x: F.swiglu(x, 2 * x),
    "swiglu-packed": lambda x: F.swiglu(x),
    "geglu": lambda x: F.geglu(x, up=x),
    "reglu": lambda x: F.reglu(x),
    "bilinear": lambda x: F.bilinear(x, x),
    "glu": lambda x: F.glu(gate=x),
}


#: Losses of x and y (B, j, 8) and classes (B, j).
LOSSES = {
    "cross_entropy": lambda x, y, t, **o: F.cross_entropy(x, t, ignore_index=3, **o),
    "cross_entropy-soft": lambda x, y, t, **o: F.cross_entropy(x, y.softmax(-1), **o),
    "linear_cross_entropy": lambda x, y, t, **o: F.linear_cross_entropy(x, up, target=t, **o),
    "jsd": lambda x, y, t, **o: F.jsd(x, y, t, **o),
    "linear_jsd": lambda x, y, t, **o: F.linear_jsd(x, up, y, gate, target=t, **o),
    "linear_log_prob": lambda x, y, t, reduction: F.linear_log_prob(x, up, t),
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_all_tokens(name, reduction):
    x = jagged(8)
    y, classes = like(x, 8).detach(), torch.randint(8, (15,))
    t = torch.nested.nested_tensor_from_jagged(classes, x.offsets())
    got = LOSSES[name](x, y, t, reduction=reduction)
    want = LOSSES[name](x.values(), y.values(), classes, reduction=reduction)
    if got.is_nested:
        assert got.shape == x.shape[:2]
        got = got.values()
    assert torch.equal(got, want)
    assert torch.autograd.grad(got.sum(), x)[0].shape == x.shape
    with pytest.raises(ValueError, match=r"must be jagged with the boundaries of"):
        LOSSES[name](x, y.values(), classes, reduction=reduction)


@pytest.mark.parametrize("name", TOKEN_WISE)
def test_what_treats_each_token_alone(name):
    call, x = TOKEN_WISE[name], jagged(8)
    got, want = call(x), call(x.values())
    pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
    for y, w in pairs:
        assert y.shape[:2] == x.shape[:2]
        assert torch.equal(y.values(), w)
    total = sum(y.values().sum() for y in (got if isinstance(got, tuple) else (got,)))
    assert torch.autograd.grad(total, x)[0].shape == x.shape


def test_dropout_draws_the_bits_of_the_values():
    x = jagged(8)
    assert torch.equal(F.dropout(x, seed=seed).values(), F.dropout(x.values(), seed=seed))
    assert torch.equal(F.dropout(x, training=False).values(), x.values())


@pytest.mark.parametrize("normed", [False, True])
def test_rotary_tables_have_a_row_for_each_token_of_all_sequences(normed):
    q, positions = jagged(4, 8), torch.cat([torch.arange(n) for n in LENGTHS])
    k = like(q, 2, 8)
    cos, sin = F.rotary_tables(F.rope_frequencies(8), positions, torch.float64)
    norms = {"q_weight": weight, "k_weight": bias} if normed else {}
    rotate = F.qk_norm_rotary if normed else F.apply_rotary
    got = rotate(q, k, cos, sin, **norms)
    want = rotate(q.values()[None], k.values()[None], cos, sin, **norms)
    for y, w, x in zip(got, want, (q, k), strict=True):
        assert y.shape == x.shape
        assert torch.equal(y.values(), w[0])
    assert F.apply_rotary(q, None, cos, sin)[1] is None
    with pytest.raises(ValueError, match="k must be jagged with the boundaries of q"):
        rotate(q, jagged(2, 8, lengths=KEYS), cos, sin, **norms)


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("cross", [False, True])
def test_attention_of_each_sequence_alone(cross, options):
    q, k = jagged(4, 8), jagged(2, 8, lengths=KEYS if cross else LENGTHS)
    v = like(k, 2, 6)
    out, lse = F.attention(q, k, v, return_lse=True, **options)
    assert torch.equal(out.values(), F.attention(q, k, v, **options).values())
    assert out.shape == (3, q.shape[1], 4, 6)
    assert lse.shape == (3, 4, q.shape[1])
    rows = zip(q.unbind(), k.unbind(), v.unbind(), out.unbind(), lse.unbind(), strict=True)
    for a, b, c, o, s in rows:
        want, want_lse = F.attention(a[None], b[None], c[None], return_lse=True, **options)
        torch.testing.assert_close(o, want[0])
        torch.testing.assert_close(s, want_lse[0])
    grads = torch.autograd.grad(out.values().sum(), (q, k))
    assert [g.shape for g in grads] == [q.shape, k.shape]


def test_equal_lengths_are_the_same_boundaries():
    x, y = jagged(4, 8), jagged(4, 8)
    assert x.shape != y.shape
    same = torch.nested.nested_tensor_from_jagged(y.values(), x.offsets())
    for call in (F.swiglu, lambda x, y: F.attention(x, x, y), lambda x, y: F.retention(x, x, y)[0]):
        assert torch.equal(call(x, y).values(), call(x, same).values())


def test_attention_names_what_is_not_jagged():
    q = jagged(4, 8)
    with pytest.raises(ValueError, match="attention: k must be a jagged nested tensor"):
        F.attention(q, q.values()[None], q)
    with pytest.raises(ValueError, match="attention: k and v must have the same boundaries"):
        F.attention(q, q, jagged(4, 8, lengths=KEYS))


def gate_of(x: torch.Tensor, *size: int) -> torch.Tensor:
    """Logarithms of decays."""
    return torch.nested.nested_tensor_from_jagged(-like(x, *size).values().abs(), x.offsets())


constant = -torch.rand(2, 4, dtype=torch.float64)
readout = torch.randn(2, 3, 3, dtype=torch.float64)
memory = tuple(torch.randn(3, 3, 2, 24, dtype=torch.float64) / 2)
filters = torch.randn(8, 4, dtype=torch.float64)
recurrent = torch.randn(4, 2, 3, 3, dtype=torch.float64)

#: By name, a function and its arguments of q, k and v (B, j, 2, 4); those nested are of tokens.
RECURRENT = {
    "linear_attention": lambda q, k, v: (F.linear_attention, (q, k, v), {}),
    "linear_attention-gates": lambda q, k, v: (
        F.linear_attention,
        (q, k, v),
        {"g": gate_of(q, 2), "beta": like(q, 2), "feature_map": "relu"},
    ),
    "linear_attention-both": lambda q, k, v: (F.linear_attention, (q, k, v), {"causal": False}),
    "gated_linear_attention": lambda q, k, v: (
        F.gated_linear_attention,
        (q, k, v, gate_of(q, 2, 4)),
        {},
    ),
    "retention": lambda q, k, v: (F.retention, (q, k), {"v": v}),
    "retention-normalised": lambda q, k, v: (F.retention, (q, k, v), {"normalize": True}),
    "delta_rule": lambda q, k, v: (F.delta_rule, (q, k, v, like(q, 2)), {"l2norm": True}),
    "gated_delta_rule": lambda q, k, v: (
        F.gated_delta_rule,
        (q, k, v, gate_of(q, 2), like(q, 2)),
        {"l2norm": True},
    ),
    "kimi_delta_attention": lambda q, k, v: (
        F.kimi_delta_attention,
        (q, k, v),
        {"g": gate_of(q, 2, 4), "beta": like(q, 2), "l2norm": True},
    ),
    "gated_delta_product": lambda q, k, v: (
        F.gated_delta_product,
        (q, like(q, 2, 2, 4), like(q, 2, 2, 4), gate_of(q, 2), like(q, 2, 2)),
        {"l2norm": True},
    ),
    "comba": lambda q, k, v: (F.comba, (q, k, v, q, gate_of(q, 2), like(q, 2)), {}),
    "gated_delta_rule_2": lambda q, k, v: (
        F.gated_delta_rule_2,
        (q, k, v, gate_of(q, 2, 4), like(q, 2, 4), like(q, 2, 4)),
        {"l2norm": True},
    ),
    "gated_slot_attention": lambda q, k, v: (
        F.gated_slot_attention,
        (q, k, v, like(q, 2, 3), gate_of(q, 2, 3)),
        {},
    ),
    "lightnet_attention": lambda q, k, v: (F.lightnet_attention, (q, k, v), {}),
    "gated_oja_rule": lambda q, k, v: (
        F.gated_oja_rule,
        (q, k, v, gate_of(q, 2, 4), like(q, 2)),
        {},
    ),
    "abc_attention": lambda q, k, v: (F.abc_attention, (q, k, v, like(q, 2, 3)), {}),
    "preconditioned_delta_rule": lambda q, k, v: (
        F.preconditioned_delta_rule,
        (q, k, v, gate_of(q, 2), like(q, 2), gate_of(q, 2), like(q, 2).square()),
        {"l2norm": True},
    ),
    "ttt_linear": lambda q, k, v: (
        F.ttt_linear,
        (q, k, v, constant, constant, like(q, 2).square() / 8),
        {"lr": like(q, 2), "mini_batch_size": 2},
    ),
    "titans_linear": lambda q, k, v: (
        F.titans_linear,
        (q, k, v, like(q, 2).square() / 8, like(q, 2).square() / 8),
        {"eta": like(q, 2), "mini_batch_size": 2},
    ),
    "titans_mlp": lambda q, k, v: (
        F.titans_mlp,
        (q, k, v, like(q, 2).square() / 8, like(q, 2).square() / 8),
        {"eta": like(q, 2), "mini_batch_size": 2, "hidden": [3], "initial_state": memory},
    ),
    "atlas_linear": lambda q, k, v: (
        F.atlas_linear,
        (q, k, v, like(q, 2, 3).square() / 8, like(q, 2), like(q, 2).square() / 8),
        {"eta": like(q, 2), "mini_batch_size": 2},
    ),
    "mesa_net": lambda q, k, v: (
        F.mesa_net,
        (q, k, v, gate_of(q, 2), like(q, 2).square(), constant.abs() + 0.3),
        {"l2norm": True},
    ),
    "cyclic_flow_attention": lambda q, k, v: (
        F.cyclic_flow_attention,
        (q, k, v, gate_of(q, 2), like(q, 2).sigmoid(), like(q, 2).sigmoid(), readout),
        {},
    ),
    "gated_kalmanet": lambda q, k, v: (
        F.gated_kalmanet,
        (q, k, v, gate_of(q, 2), gate_of(k, 2), like(q, 2).sigmoid()),
        {},
    ),
    "log_linear_attention": lambda q, k, v: (
        F.log_linear_attention,
        (q, k, v, gate_of(q, 2), like(q, 2, 5)),
        {},
    ),
    "dplr_delta_rule": lambda q, k, v: (F.dplr_delta_rule, (q, k, v, q, k, gate_of(q, 2)), {}),
    "rwkv6": lambda q, k, v: (F.rwkv6, (q, k, v, gate_of(q, 2, 4), constant), {}),
    "rwkv6-constant": lambda q, k, v: (F.rwkv6, (q, k, v, constant, constant), {}),
    "rwkv7": lambda q, k, v: (F.rwkv7, (q, gate_of(q, 2, 4), k, v, q, k), {}),
    "linear_scan": lambda q, k, v: (F.linear_scan, (q.flatten(2), gate_of(q, 8)), {}),
    "rwkv4": lambda q, k, v: (
        F.rwkv4,
        (-constant.flatten(), constant.flatten(), k.flatten(2), v.flatten(2)),
        {},
    ),
    "slstm": lambda q, k, v: (F.slstm, (like(q, 4, 2, 3), recurrent), {}),
    "ssd": lambda q, k, v: (F.ssd, (v, gate_of(q, 2), -torch.ones(2), q, k), {"z": v}),
    "mamba3": lambda q, k, v: (
        F.mamba3,
        (q, k, v, gate_of(q, 2), like(q, 2), like(q, 2), constant),
        {"k_bias": constant, "angles": like(q, 2, 2)},
    ),
    "mlstm": lambda q, k, v: (F.mlstm, (q, k, v, like(q, 2)), {"f": like(q, 2)}),
    "longhorn_scan": lambda q, k, v: (
        F.longhorn_scan,
        (q.flatten(2), k.flatten(2), like(q, 1), like(q, 1)),
        {"z": v.flatten(2)},
    ),
    "selective_scan": lambda q, k, v: (
        F.selective_scan,
        (q.flatten(2), k.flatten(2), constant.mT.reshape(8, 1), like(q, 1), like(q, 1)),
        {"z": v.flatten(2), "delta_softplus": True},
    ),
    "selective_scan-constant": lambda q, k, v: (
        F.selective_scan,
        (q.flatten(2), k.flatten(2), constant.view(8, 1), constant.view(8, 1)),
        {"C": like(q, 1), "delta_softplus": True},
    ),
    "causal_conv1d": lambda q, k, v: (
        F.causal_conv1d,
        (q.flatten(2), filters),
        {"return_final_state": True},
    ),
    "dynamic_conv1d": lambda q, k, v: (
        F.dynamic_conv1d,
        (q.flatten(2), k),
        {"return_final_state": True},
    ),
}


def states(of: object) -> list[torch.Tensor]:
    return list(of) if isinstance(of, tuple) else [of]


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrences_of_each_sequence_alone(name):
    q, k, v = (jagged(2, 4) for _ in range(3))
    k, v = (torch.nested.nested_tensor_from_jagged(t.values(), q.offsets()) for t in (k, v))
    function, args, options = RECURRENT[name](q, k, v)
    out, final = function(*args, **options)
    assert out.shape[:2] == q.shape[:2]
    for n, (found, state) in enumerate(
        zip(out.unbind(), zip(*states(final), strict=True), strict=True)
    ):

        def alone(t, n=n):
            if isinstance(t, tuple):  # a state, with an entry for each sequence
                return tuple(part[n : n + 1] for part in t)
            return t.unbind()[n][None] if isinstance(t, torch.Tensor) and t.is_nested else t

        named = {key: alone(t) for key, t in options.items()}
        want, last = function(*map(alone, args), **named)
        torch.testing.assert_close(found, want[0])
        for a, b in zip(state, states(last), strict=True):
            torch.testing.assert_close(a, b[0])
    total = out.values().square().sum()
    nested = [t for t in (*args, *options.values()) if isinstance(t, torch.Tensor) and t.is_nested]
    leaves = [t for t in (q, k, v) if any(t is u for u in nested)]
    assert all(g.shape == t.shape for g, t in zip(grads(total, leaves), leaves, strict=True))


def grads(total: torch.Tensor, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(total, leaves) if leaves else ()


def test_states_continue_jagged_sequences():
    x = jagged(8)
    _, state = F.causal_conv1d(x, filters, return_final_state=True)
    got = F.causal_conv1d(x, filters, initial_state=state)
    for row, before, found in zip(x.unbind(), state, got.unbind(), strict=True):
        want = F.causal_conv1d(row[None], filters, initial_state=before[None])
        torch.testing.assert_close(found, want[0])


def test_recurrences_name_what_is_not_jagged():
    q = jagged(2, 4)
    dense, other = torch.randn(3, 5, 2, 4, dtype=torch.float64), jagged(2, 4, lengths=KEYS)
    for wrong in (dense, other):
        with pytest.raises(ValueError, match="retention: k must be jagged with the bound"):
            F.retention(q, wrong, q)
    with pytest.raises(ValueError, match="cu_seqlens must be None where q is nested, got"):
        F.retention(q, q, q, cu_seqlens=q.offsets())
    with pytest.raises(TypeError, match=r"retention: k must not be nested .* k.layout="):
        F.retention(dense, q, q)
    with pytest.raises(TypeError, match=r"causal_conv1d: weight must not be nested"):
        F.causal_conv1d(q.flatten(2), q)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_functions_that_take_no_nested_tensors_say_so(layout):
    dense = torch.randn(3, 5, 2, 4, dtype=torch.float64)
    rows = [torch.randn(n, 2, 4, dtype=torch.float64) for n in LENGTHS]
    x, cu = torch.nested.nested_tensor(rows, layout=layout), torch.tensor([0, 2])
    for name, call in {
        "q": lambda: F.attention_varlen(x, x, x, cu, cu),
        "k": lambda: F.attention(dense, x, x),
        "bias": lambda: F.attention(dense, dense, dense, bias=x),
        "weight": lambda: F.linear(dense, x),
        "initial_state": lambda: F.retention(dense, dense, dense, initial_state=x),
        "x": lambda: F.uniform_like(x),
        "scores": lambda: F.top_k(x, 1),
    }.items():
        with pytest.raises(TypeError, match=f"{name} must not be nested .*{name}.layout={layout}"):
            call()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors_are_refused():
    x = torch.nested.nested_tensor([torch.randn(n, 8) for n in LENGTHS])
    heads = torch.nested.nested_tensor([torch.randn(n, 2, 4) for n in LENGTHS])
    for name, call in {
        "linear: x": lambda: F.linear(x, torch.randn(3, 8)),
        "causal_conv1d: x": lambda: F.causal_conv1d(x, torch.randn(8, 4)),
        "retention: q": lambda: F.retention(heads, heads, heads),
        "retention: k": lambda: F.retention(jagged(2, 4), heads, heads),
        "attention: q": lambda: F.attention(heads, heads, heads),
        "scaled_dot_product_attention: query": lambda: F.scaled_dot_product_attention(
            heads, heads, heads
        ),
    }.items():
        with pytest.raises(ValueError, match=f"{name} must be .*jagged.*layout=torch.strided"):
            call()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_scaled_dot_product_attention_takes_what_torch_s_takes(is_causal, kv_heads):
    q = jagged(4, 8)
    k, v = like(q, kv_heads, 8), like(q, kv_heads, 6)
    by_heads = [t.transpose(1, 2) for t in (q, k, v)]
    options = {"is_causal": is_causal, "enable_gqa": kv_heads == 2, "scale": 0.3}
    out = F.scaled_dot_product_attention(*by_heads, **options)
    assert out.shape == (3, 4, q.shape[1], 6)
    torch_s = torch.nn.functional.scaled_dot_product_attention
    for a, b, c, o in zip(*(t.unbind() for t in (*by_heads, out)), strict=True):
        torch.testing.assert_close(o, torch_s(a, b, c, **options))
    grads = torch.autograd.grad(out.transpose(1, 2).values().sum(), (q, k, v))
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


def test_scaled_dot_product_attention_of_wrong_jagged_tensors():
    q = jagged(4, 8)
    t = q.transpose(1, 2)
    few = like(q, 2, 8).transpose(1, 2)
    sdpa = F.scaled_dot_product_attention
    for message, call in {
        r"query must be a jagged nested tensor \(B, H, j, D\)": lambda: sdpa(q, q, q),
        "key must be a jagged": lambda: sdpa(t, torch.zeros(3, 4, 5, 8), t),
        "attn_mask must be None where query is nested": lambda: sdpa(t, t, t, torch.ones(5, 5)),
        "the heads must be equal where enable_gqa=False, got": lambda: sdpa(t, few, few),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_one_graph_for_all_lengths():
    torch._dynamo.reset()

    def block(x):
        x, _ = F.rms_norm(x, weight, residual=x)
        heads = x.unflatten(-1, (2, 4))
        y, _ = F.retention(heads, heads, F.attention(heads, heads, heads, causal=True))
        return F.linear(F.causal_conv1d(y.flatten(2), filters), up)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in (LENGTHS, KEYS):
        x = jagged(8, lengths=lengths)
        torch.testing.assert_close(compiled(x).values(), block(x).values())
