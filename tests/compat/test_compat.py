"""omniattn.compat: the functions of fla against loops with their arguments."""

import itertools

import libraries
import pytest
import torch
from torch.nn import functional as nnf

from omniattn import compat
from omniattn import functional as F
from omniattn.compat import fla

FLA = libraries.NAMES["fla"]
B, T, H, K, V = 2, 9, 2, 4, 6


def tensors():
    torch.manual_seed(0)
    q, k = torch.randn(2, B, T, H, K).unbind()
    v = torch.randn(B, T, H, V)
    a = -nnf.normalize(torch.randn(B, T, H, K), dim=-1)
    return {
        "q": q,
        "r": q,
        "k": k,
        "v": v,
        "g": nnf.logsigmoid(torch.randn(B, T, H)),
        "gk": nnf.logsigmoid(torch.randn(B, T, H, K)),
        "w": nnf.logsigmoid(torch.randn(B, T, H, K)),
        "beta": torch.rand(B, T, H),
        "u": torch.randn(H, K),
        "a": a,
        "b": -a * torch.rand(B, T, H, 1),
        "state": torch.randn(B, H, K, V),
    }


#: Name of what theirs is compared with -> the tensors in order.
CALLS = {
    "gla": ("q", "k", "v", "gk"),
    "retention": ("q", "k", "v"),
    "delta_rule": ("q", "k", "v", "beta"),
    "gated_delta_rule": ("q", "k", "v", "g", "beta"),
    "kda": ("q", "k", "v", "gk", "beta"),
    "rwkv6": ("r", "k", "v", "w", "u"),
    "rwkv7": ("r", "w", "k", "v", "a", "b"),
    "dplr_delta_rule": ("q", "k", "v", "a", "b", "gk"),
}


def theirs(name, arguments, **options):
    return getattr(FLA, f"chunk_{name}")(*arguments, **options)


def recurrent(name, given, **options):
    """The recurrent form, whose arguments may come in another order."""
    function = getattr(compat, f"fused_recurrent_{name}")
    if name == "gated_delta_rule":
        return function(given[0], given[1], given[2], given[3], beta=given[4], **options)
    return function(*given, **options)


@pytest.mark.parametrize("name", CALLS)
def test_as_documented(name):
    all_of = tensors()
    given = [all_of[key] for key in CALLS[name]]
    scale = {} if name != "rwkv7" else {"scale": 1.0}
    expected, state = theirs(name, given)[0], None
    chunk = getattr(compat, f"chunk_{name}")
    o, none = chunk(*given)
    assert none is None
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
    o, state = chunk(*given, output_final_state=True)
    assert state.shape == (B, H, K, V) and state.dtype == torch.float32
    torch.testing.assert_close(recurrent(name, given, **scale)[0], expected, rtol=1e-4, atol=1e-5)
    pieces, s = [], None
    for part in (slice(0, 4), slice(4, T)):
        piece = [t if key == "u" else t[:, part] for key, t in zip(CALLS[name], given, strict=True)]
        more, s = chunk(*piece, initial_state=s, output_final_state=True)
        pieces.append(more)
    torch.testing.assert_close(torch.cat(pieces, 1), o)
    torch.testing.assert_close(s, state)
    packed = [
        t if key == "u" else t.flatten(0, 1)[None]
        for key, t in zip(CALLS[name], given, strict=True)
    ]
    o_packed, s_packed = chunk(
        *packed, output_final_state=True, cu_seqlens=torch.tensor([0, T, 2 * T])
    )
    torch.testing.assert_close(o_packed.view_as(o), o)
    torch.testing.assert_close(s_packed, state)


@pytest.mark.parametrize("name", ["gla", "retention", "rwkv6", "dplr_delta_rule"])
def test_from_the_end_to_the_start(name):
    function = getattr(compat, f"fused_recurrent_{name}")
    all_of = tensors()
    given = [all_of[key] for key in CALLS[name]]
    o, state = function(*given, reverse=True, output_final_state=True)
    turned = [t if key == "u" else t.flip(1) for key, t in zip(CALLS[name], given, strict=True)]
    expected, last = function(*turned, output_final_state=True)
    assert torch.equal(o, expected.flip(1)) and torch.equal(state, last)
    packed = [t if key == "u" else t[:1] for key, t in zip(CALLS[name], given, strict=True)]
    options = {"reverse": True, "output_final_state": True}
    bounds, before = torch.tensor([0, 4, 4, T]), torch.randn(3, H, K, V)
    o, state = function(*packed, initial_state=before, cu_seqlens=bounds, **options)
    for n, (a, b) in enumerate(itertools.pairwise(bounds.tolist())):
        piece = [t if key == "u" else t[:, a:b] for key, t in zip(CALLS[name], packed, strict=True)]
        alone, last = function(*piece, initial_state=before[n : n + 1], **options)
        torch.testing.assert_close(o[:, a:b], alone)
        torch.testing.assert_close(state[n], last[0])


@pytest.mark.parametrize("name", ["gla", "gated_delta_rule", "kda"])
def test_states_with_values_first(name):
    all_of = tensors()
    given, state = [all_of[key] for key in CALLS[name]], all_of["state"]
    options = {"output_final_state": True}
    chunk = getattr(compat, f"chunk_{name}")
    o, last = chunk(*given, initial_state=state, **options)
    turned, other = chunk(*given, initial_state=state.mT, state_v_first=True, **options)
    assert torch.equal(o, turned) and torch.equal(last, other.mT)
    former = chunk(*given, initial_state=state.mT, transpose_state_layout=True, **options)
    assert torch.equal(o, former[0]) and torch.equal(last, former[1].mT)


def test_gates_and_betas_before_their_activations():
    x = tensors()
    rate, bias = torch.randn(H), torch.randn(H * K)
    g, raw = torch.randn(B, T, H), torch.randn(B, T, H, K)
    given = x["q"], x["k"], x["v"]
    logits = torch.randn(B, T, H)
    options = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "A_log": rate}
    o = compat.chunk_gated_delta_rule(
        *given, g, logits, dt_bias=bias[:H], allow_neg_eigval=True, **options
    )[0]
    decay = -rate.exp() * nnf.softplus(g + bias[:H])
    expected = compat.chunk_gated_delta_rule(*given, decay, 2 * logits.sigmoid())[0]
    torch.testing.assert_close(o, expected)
    for bound in (None, -5.0):
        step, scale = raw + bias.view(H, K), rate.exp()[:, None]
        decay = -scale * nnf.softplus(step) if bound is None else bound * (scale * step).sigmoid()
        expected = compat.chunk_kda(*given, decay, logits.sigmoid())[0]
        for function in (compat.chunk_kda, compat.fused_recurrent_kda):
            o = function(*given, raw, logits, dt_bias=bias, lower_bound=bound, **options)[0]
            torch.testing.assert_close(o, expected)
    both = compat.fused_recurrent_gated_delta_rule(*given, g=x["g"], gk=x["gk"], beta=x["beta"])[0]
    torch.testing.assert_close(
        both, compat.chunk_kda(*given, x["gk"] + x["g"][..., None], x["beta"])[0]
    )
    with pytest.raises(ValueError, match=r"fused_recurrent_gated_delta_rule: gk must have shape"):
        compat.fused_recurrent_gated_delta_rule(*given, x["g"], x["beta"])


def test_betas_of_channels():
    """Each channel of the values by itself, with its beta."""
    x = tensors()
    beta, state = torch.rand(B, T, H, V), x["state"]
    plain, gated = compat.fused_recurrent_delta_rule, compat.fused_recurrent_gated_delta_rule
    kda = compat.fused_recurrent_kda
    for function, gates in (
        (plain, {}),
        (gated, {"g": x["g"]}),
        (gated, {"gk": x["gk"]}),
        (kda, {"g": x["gk"]}),
    ):
        options = {**gates, "output_final_state": True}
        o, last = function(x["q"], x["k"], x["v"], beta=beta, initial_state=state, **options)
        for c in range(V):
            channel = slice(c, c + 1)
            one, end = function(
                *(x["q"], x["k"], x["v"][..., channel]),
                beta=beta[..., c],
                initial_state=state[..., channel],
                **options,
            )
            torch.testing.assert_close(o[..., channel], one)
            torch.testing.assert_close(last[..., channel], end)
    with pytest.raises(ValueError, match="fused_recurrent_delta_rule: beta must have shape"):
        plain(x["q"], x["k"], x["v"], beta[..., :3])


def test_linear_attention():
    x = tensors()
    q, k, v = x["q"].exp(), x["k"].exp(), x["v"]
    scores = torch.einsum("bthk,bshk->bhts", q, k).tril()
    plain = torch.einsum("bhts,bshv->bthv", scores * 0.3, v)
    divided = torch.einsum("bhts,bshv->bthv", scores / scores.sum(-1, keepdim=True), v)
    torch.testing.assert_close(
        compat.chunk_linear_attn(q, k, v, scale=0.3, normalize=False)[0], plain
    )
    half = [t.bfloat16() for t in (q, k, v)]  # the result alone is rounded, not the scaled q
    o, _ = compat.chunk_linear_attn(*half, scale=0.3, normalize=False)
    want, _ = compat.chunk_linear_attn(*(t.double() for t in half), scale=0.3, normalize=False)
    torch.testing.assert_close(o.double(), want, rtol=1.02 * 2**-8, atol=1e-5)
    o, (matrix, total) = compat.chunk_linear_attn(q, k, v, output_final_state=True)
    torch.testing.assert_close(o, divided)
    torch.testing.assert_close(matrix, torch.einsum("bthk,bthv->bhkv", k, v))
    torch.testing.assert_close(total, k.sum(1, keepdim=True))
    first, state = compat.chunk_linear_attn(q[:, :4], k[:, :4], v[:, :4], output_final_state=True)
    second, _ = compat.fused_recurrent_linear_attn(
        q[:, 4:], k[:, 4:], v[:, 4:], initial_state=state, normalize=True
    )
    torch.testing.assert_close(torch.cat((first, second), 1), divided)
    # A state without sums of keys has none so far.
    sums = torch.zeros_like(state[1])
    for given in (state[0], (state[0], None)):
        torch.testing.assert_close(
            compat.chunk_linear_attn(q, k, v, initial_state=given)[0],
            compat.chunk_linear_attn(q, k, v, initial_state=(state[0], sums))[0],
        )


def test_options_of_gates_need_the_gates():
    x = tensors()
    rest = (x["q"], x["k"], x["v"])
    name = "fused_recurrent_gated_delta_rule"
    with pytest.raises(ValueError, match=f"{name}: g must be given with use_gate_in_kernel"):
        compat.fused_recurrent_gated_delta_rule(*rest, use_gate_in_kernel=True)
    with pytest.raises(ValueError, match=f"{name}: allow_neg_eigval needs use_beta_sigmoid"):
        compat.fused_recurrent_gated_delta_rule(*rest, g=x["g"], allow_neg_eigval=True)
    with pytest.raises(ValueError, match="chunk_kda: A_log must be given with use_gate_in_kernel"):
        compat.chunk_kda(*rest, x["gk"], x["beta"], use_gate_in_kernel=True)
    bounded = {"use_gate_in_kernel": True, "lower_bound": -5.0}
    torch.testing.assert_close(
        compat.chunk_kda(*rest, x["gk"], x["beta"], **bounded),
        compat.chunk_kda(*rest, -5 * x["gk"].sigmoid(), x["beta"]),
    )


#: Names of the same function, and the tensors in order.
ALIASES = {
    "gla": (("fused_chunk_gla",), ("q", "k", "v", "gk")),
    "linear_attn": (("fused_chunk_linear_attn",), ("q", "k", "v")),
    "retention": (("fused_chunk_retention",), ("q", "k", "v")),
    "delta_rule": (("fused_chunk_delta_rule",), ("q", "k", "v", "beta")),
    "simple_gla": (
        ("fused_recurrent_simple_gla", "fused_chunk_simple_gla"),
        ("q", "k", "v", "g"),
    ),
    "iplr_delta_rule": (("fused_recurrent_iplr_delta_rule",), ("q", "k", "v", "a", "b")),
}


@pytest.mark.parametrize("name", ALIASES)
def test_other_names_of_the_chunk_form(name):
    others, keys = ALIASES[name]
    all_of = tensors()
    given = [all_of[key] for key in keys]
    options = {"scale": 0.3, "output_final_state": True}
    expected = getattr(compat, f"chunk_{name}")(*given, **options)
    for other in others:
        found = getattr(compat, other)(*given, **options)
        torch.testing.assert_close(found, expected)
        assert getattr(compat, other)(*given)[0].shape == (B, T, H, V)


def test_decays_of_whole_heads():
    """By pairs, e^(G_i - G_j) of the sums of g; lightning attention: e^(-8 h / H (1 - l / L))."""
    x = tensors()
    q, k, v, g = x["q"], x["k"], x["v"], x["g"]
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * K**-0.5

    def pairs(total):
        weight = (total[:, :, None] - total[:, None]).movedim(3, 1).exp().tril()
        return torch.einsum("bhij,bjhv->bihv", scores * weight, v)

    expected = pairs(g.cumsum(1))
    torch.testing.assert_close(compat.chunk_simple_gla(q, k, v, g)[0], expected)
    o, attentions = compat.parallel_simple_gla(q, k, v, g)
    assert attentions is None
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(
        compat.parallel_retention(q, k, v)[0], compat.chunk_retention(q, k, v)[0]
    )
    rate = -torch.arange(H) * 8 / H * (1 - 3 / 12)
    expected = pairs(rate * torch.arange(1.0, T + 1)[None, :, None])
    torch.testing.assert_close(compat.chunk_lightning_attn(q, k, v, 3, 12)[0], expected)
    o, state = compat.fused_recurrent_lightning_attn(q, k, v, 3, 12, output_final_state=True)
    torch.testing.assert_close(o, expected)
    gamma, same = compat.chunk_simple_gla(q, k, v, g_gamma=rate, output_final_state=True)
    torch.testing.assert_close((gamma, same), (o, state))
    plain = compat.fused_chunk_simple_gla(q, k, v)[0]
    torch.testing.assert_close(plain, torch.einsum("bhij,bjhv->bihv", scores.tril(), v))
    with pytest.raises(ValueError, match="chunk_simple_gla: g must be None where g_gamma is given"):
        compat.chunk_simple_gla(q, k, v, g, rate)
    with pytest.raises(ValueError, match=r"chunk_simple_gla: g_gamma must have shape \(2,\)"):
        compat.chunk_simple_gla(q, k, v, g_gamma=torch.ones(3))
    with pytest.raises(ValueError, match="chunk_lightning_attn: num_layers must be an int >= 1"):
        compat.chunk_lightning_attn(q, k, v, 0, 0)
    with pytest.raises(ValueError, match="attn: layer_idx must be an int >= 0 and <= 11, got"):
        compat.fused_recurrent_lightning_attn(q, k, v, 12, 12)
    for function in (compat.parallel_simple_gla, compat.parallel_retention):
        o, matrix = function(q, k, v, scale=0.7, output_attentions=True)
        torch.testing.assert_close(torch.einsum("bhij,bjhv->bihv", matrix, v), o)
        assert (matrix.triu(1) == 0).all() and function(q, k, v)[1] is None
        with pytest.raises(NotImplementedError, match="cu_seqlens must be None with output_att"):
            function(q[:1], k[:1], v[:1], output_attentions=True, cu_seqlens=torch.tensor([0, T]))


def test_identity_plus_low_rank():
    x = tensors()
    given = [x[key] for key in ("q", "k", "v", "a", "b")]
    expected = compat.chunk_dplr_delta_rule(*given, torch.zeros(B, T, H, K))[0]
    torch.testing.assert_close(compat.chunk_iplr_delta_rule(*given)[0], expected)


@pytest.mark.parametrize("use_norm", [True, False])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_based(use_norm, scale):
    x = tensors()
    u = torch.einsum("bihd,bjhd->bhij", x["q"], x["k"]) * (K**-0.5 if scale is None else scale)
    weight = (1 + u + u * u / 2).tril()
    weight = weight / weight.sum(-1, keepdim=True) if use_norm else weight
    expected = torch.einsum("bhij,bjhv->bihv", weight, x["v"])
    for function in (compat.parallel_based, compat.fused_chunk_based):
        o = function(x["q"], x["k"], x["v"], scale, use_norm)
        torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
    first = [x[key].transpose(1, 2) for key in ("q", "k", "v")]
    turned = compat.parallel_based(*first, scale, use_norm, head_first=True)
    torch.testing.assert_close(turned.transpose(1, 2), expected, rtol=1e-4, atol=1e-5)


def test_rwkv_4_and_7():
    torch.manual_seed(0)
    w, u, k, v = *torch.randn(2, 5), *torch.randn(2, B, T, 5)
    state = torch.tensor([0.0, 0.0, -1e38]).view(1, 3, 1, 1).expand(B, 3, 1, 5)
    found, expected = (
        library.fused_recurrent_rwkv4(w, u, k, v, state) for library in (compat, FLA)
    )
    for ours, other in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, other)
    x = tensors()
    kk, rate = -x["a"], torch.rand(B, T, H, K)
    o = compat.fused_mul_recurrent_rwkv7(x["r"], x["w"], x["k"], x["v"], kk, rate)[0]
    expected = compat.chunk_rwkv7(x["r"], x["w"], x["k"], x["v"], -kk, kk * rate)[0]
    assert torch.equal(o, expected)


@pytest.mark.parametrize("reverse", [False, True])
def test_decays_of_values(reverse):
    """S_t = diag(exp(gk_t)) S_{t-1} diag(exp(gv_t)) + k_t v_t^T, as fla's kernel."""
    x = tensors()
    gv = nnf.logsigmoid(torch.randn(B, T, H, V))
    s, expected = x["state"], []
    for t in reversed(range(T)) if reverse else range(T):
        s = x["gk"][:, t, ..., None].exp() * s * gv[:, t, :, None].exp()
        s = s + x["k"][:, t, ..., None] * x["v"][:, t, :, None]
        expected.append((s * x["q"][:, t, ..., None]).sum(-2) * K**-0.5)
    given = x["q"], x["k"], x["v"], x["gk"], gv
    o, final = compat.fused_recurrent_gla(
        *given, initial_state=x["state"], output_final_state=True, reverse=reverse
    )
    expected = torch.stack(expected[::-1] if reverse else expected, 1)
    torch.testing.assert_close((o, final), (expected, s), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["chunk_hgrn", "fused_recurrent_hgrn"])
def test_hgrn(name):
    """h_t = exp(g_t) h_{t-1} + x_t, as fla's naive form."""
    torch.manual_seed(0)
    x, g, h = torch.randn(B, T, K), nnf.logsigmoid(torch.randn(B, T, K)), torch.randn(B, K)
    function, start, expected = getattr(compat.fla, name), h, []
    for t in range(T):
        h = g[:, t].exp() * h + x[:, t]
        expected.append(h)
    o, final = function(x, g, start, output_final_state=True)
    torch.testing.assert_close((o, final), (torch.stack(expected, 1), h))
    assert function(x, g)[1] is None


@pytest.mark.parametrize("kind", ["gated_delta_rule", "kda"])
def test_preconditioned_rules(kind):
    torch.manual_seed(0)
    x = tensors()
    q, k, v, beta = (x[name] for name in ("q", "k", "v", "beta"))
    g = x["gk"] if kind == "kda" else x["g"]
    center = torch.randn(v.shape[2])
    rows = (q, k, v, g, beta, x["g"], beta.square(), center)
    want, state = F.preconditioned_delta_rule(*rows, x=1.7, l2norm=True)
    named = dict(
        zip(("q", "k", "v", "g", "beta", "g_atk", "beta_atk", "log_atk_scale"), rows, strict=True)
    )
    named |= {"x": 1.7, "output_final_state": True}
    for form in ("chunk", "fused_recurrent"):
        call = getattr(fla, f"{form}_precond_{kind}")
        torch.testing.assert_close(call(**named), (want, *state))
        _, s, a = call(**named, transpose_state_layout=True)
        torch.testing.assert_close(s, state[0].mT)
        assert call(**named | {"output_final_state": False})[1:] == (None, None)
        again = call(**named, initial_state=s, initial_A_state=a, transpose_state_layout=True)
        after = F.preconditioned_delta_rule(*rows, x=1.7, l2norm=True, initial_state=state)
        torch.testing.assert_close(again, (after[0], after[1][0].mT, after[1][1]))
        with pytest.raises(ValueError, match=f"{call.__name__}: initial_A_state must have shape"):
            call(**named, initial_A_state=a[:, :, 1:])
        with pytest.raises(ValueError, match=f"{call.__name__}: g_atk must have shape"):
            call(**named | {"g_atk": g[:, 1:]})
    for name, value in (("cp_context", 1), ("head_first", True)):
        with pytest.raises(NotImplementedError, match=f"{name} is not supported"):
            getattr(fla, f"chunk_precond_{kind}")(**named, **{name: value})


def test_mesa_net():
    torch.manual_seed(0)
    x = tensors()
    rows = [nnf.normalize(x["q"], dim=-1), nnf.normalize(x["k"], dim=-1), x["v"]]
    gates, lamb = (x["g"], x["beta"]), torch.rand(H, K) + 0.25
    want, (kk, kv) = F.mesa_net(*rows, *gates, lamb)
    found = fla.chunk_mesa_net(*rows, *gates, lamb, output_final_state=True)
    torch.testing.assert_close(found, (want, kk, kv))
    assert fla.chunk_mesa_net(*rows, *gates, lamb)[1:] == (None, None)
    again = fla.chunk_mesa_net(*rows, *gates, lamb, h_kk_init=kk)[0]
    both, _ = F.mesa_net(*rows, *gates, lamb, initial_state=(kk, 0 * kv))
    torch.testing.assert_close(again, both)
    q, k, v, g, beta = (t[:, 0] for t in (*rows, *gates))
    step = fla.mesa_net_decoding_one_step(q, k, v, g, lamb, beta, kk, kv)
    first = (t[:, :1] for t in (*rows, *gates))
    o, state = F.mesa_net(*first, lamb, initial_state=(kk, kv))
    torch.testing.assert_close(step, (o[:, 0], *state))
    with pytest.raises(ValueError, match="chunk_mesa_net: max_CG_iteration must be"):
        fla.chunk_mesa_net(*rows, *gates, lamb, max_CG_iteration=0)
    with pytest.raises(ValueError, match="chunk_mesa_net: h_kk_init must have shape"):
        fla.chunk_mesa_net(*rows, *gates, lamb, h_kk_init=kv[..., 1:])


@pytest.mark.parametrize("call", [fla.chunk_gka, fla.fused_recurrent_gka])
def test_gated_kalmanet(call):
    x = tensors()
    rows = nnf.normalize(x["q"], dim=-1), nnf.normalize(x["k"], dim=-1), x["v"]
    gates = {"g": x["g"], "gk": 2 * x["g"], "alpha": x["beta"]}
    want, state = F.gated_kalmanet(*rows, *gates.values(), scale=0.3, ridge_ratio=0.1)
    options = {"scale": 0.3, "ridge_ratio": 0.1}
    o, final = call(*rows, **gates, **options, output_final_state=True)
    torch.testing.assert_close((o, *final), (want, *state))
    assert call(*rows, **gates)[1] is None
    again = F.gated_kalmanet(*rows, initial_state=state)[0]
    torch.testing.assert_close(call(*rows, initial_state=state)[0], again)
    name = call.__name__
    with pytest.raises(ValueError, match=f"{name}: num_iter must be"):
        call(*rows, num_iter=0)
    for wrong in gates:
        with pytest.raises(ValueError, match=f"{name}: {wrong} must have shape"):
            call(*rows, **gates | {wrong: gates[wrong][:, 1:]})


@pytest.mark.parametrize("call", [fla.chunk_cyfa, fla.fused_recurrent_cyfa])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cyclic_flow_attention(call, dtype):
    x = tensors()
    rows = [x[name].to(dtype) for name in "qkv"]
    gates, readout = (x["g"], x["beta"], x["beta"].flip(1)), torch.randn(H, 5, 5)
    weights = torch.rand(2, K) + 0.5
    norms = {"q_norm_weight": weights[0], "k_norm_weight": weights[1]}
    norms |= {"q_norm_eps": 1e-5, "k_norm_eps": 0.1}
    normed = [
        (nnf.rms_norm(t.float(), (K,), eps=eps) * weight).to(dtype)
        for t, weight, eps in zip(rows[:2], weights, (1e-5, 0.1), strict=True)
    ]
    want, state = F.cyclic_flow_attention(*normed, rows[2], *gates, readout, scale=0.3)
    o, final = call(*rows, *gates, readout, **norms, scale=0.3, output_final_state=True)
    torch.testing.assert_close((o, *final), (want, *state))
    assert call(*rows, *gates, readout, **norms)[1] is None
    again = F.cyclic_flow_attention(*normed, rows[2], *gates, readout, initial_state=state)[0]
    found = call(*rows, *gates, readout, **norms, initial_state=final)[0]
    torch.testing.assert_close(found, again)
    name = call.__name__
    for wrong, value, text in (
        ("q_norm_weight", weights[0, 1:], "must have shape"),
        ("k_norm_eps", -1.0, "must be"),
    ):
        with pytest.raises(ValueError, match=f"{name}: {wrong} {text}"):
            call(*rows, *gates, readout, **norms | {wrong: value})
    with pytest.raises(ValueError, match=f"{name}: delta must have shape"):
        call(*rows, gates[0], gates[1][:, 1:], gates[2], readout, **norms)


def test_titans():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, B, T, H, K).unbind()
    w, b, start = torch.randn(H, K), torch.randn(H, K), torch.randn(B, H, K, K)
    theta, alpha, eta = torch.rand(3, B, T, H).unbind()
    want, (last, _, _) = F.titans_linear(
        *(q, k, v, theta / 8, alpha, eta, w, b),
        eps=1e-5,
        mini_batch_size=4,
        initial_state=(start, 0 * start, start),
    )
    rows = [t.transpose(1, 2) for t in (q, k, v)]
    gates = [t.transpose(1, 2)[..., None] for t in (theta / 8, alpha, eta)]
    o, final = fla.chunk_titans_linear(*rows, w, b, *gates, 1e-5, 4, start, True)
    torch.testing.assert_close((o.transpose(1, 2), final), (want, last))
    assert fla.chunk_titans_linear(*rows, w, b, *gates, 1e-5, 4, start, False)[1] is None
    with pytest.raises(ValueError, match="chunk_titans_linear: chunk_size must be"):
        fla.chunk_titans_linear(*rows, w, b, *gates, 1e-5, 0, start, True)
    with pytest.raises(ValueError, match="chunk_titans_linear: eta must have shape"):
        fla.chunk_titans_linear(*rows, w, b, *gates[:2], eta, 1e-5, 4, start, True)


@pytest.mark.parametrize("call", [fla.chunk_ttt_linear, fla.fused_chunk_ttt_linear])
def test_ttt_linear(call):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, B, T, H, K).unbind()
    w, b, eta = torch.randn(H, K), torch.randn(H, K), torch.rand(B, T, H) / 8
    weights, bias = torch.randn(B, H, K, K) / 4, torch.randn(B, H, K)
    start = weights, bias, 0 * weights, 0 * bias
    options = {"scale": 0.7, "eps": 1e-5}
    want, (last, own, dw, db) = F.ttt_linear(
        q, k, v, w, b, eta, mini_batch_size=4, initial_state=start, **options
    )
    o, final, final_bias = call(
        *(q, k, v, w, b, eta[..., None]),
        chunk_size=4,
        initial_state=weights,
        initial_state_bias=bias[:, :, None],
        output_final_state=True,
        **options,
    )
    step = eta[:, -1, :, None]
    torch.testing.assert_close(o, want)
    torch.testing.assert_close(final, last - step[..., None] * dw)
    torch.testing.assert_close(final_bias[:, :, 0], own - step * db)
    plain = call(q, k, v, w, b, 0.1)
    torch.testing.assert_close(plain[0], F.ttt_linear(q, k, v, w, b, 0 * eta + 0.1)[0])
    assert plain[1:] == (None, None)
    with pytest.raises(ValueError, match=f"{call.__name__}: chunk_size must be"):
        call(q, k, v, w, b, 0.1, chunk_size=0)
    with pytest.raises(ValueError, match=f"{call.__name__}: initial_state_bias must have shape"):
        call(q, k, v, w, b, 0.1, initial_state_bias=bias)


def test_what_changes_results_is_refused_and_what_does_not_is_taken():
    x = tensors()
    given = x["q"], x["k"], x["v"], x["gk"]
    o = compat.chunk_gla(*given, cu_seqlens_cpu=torch.tensor([0, T]), chunk_size=64)[0]
    assert torch.equal(o, compat.chunk_gla(*given)[0])
    for call, name in (
        (lambda: compat.chunk_gla(*given, head_first=True), "head_first"),
        (lambda: compat.fused_recurrent_gated_delta_rule(*given[:3], gv=x["v"]), "gv"),
        (lambda: compat.fused_recurrent_gla(*given, cp_context=1), "cp_context"),
    ):
        with pytest.raises(NotImplementedError, match=f": {name}.* is not supported") as caught:
            call()
        if name == "gv":  # a parameter of fla, not a misspelled one
            assert "did you mean" not in str(caught.value)
    with pytest.raises(ValueError, match="allow_neg_eigval needs use_beta_sigmoid_in_kernel=True"):
        compat.chunk_kda(*given, x["beta"], allow_neg_eigval=True)


def test_gradients():
    x = {name: t.double().requires_grad_() for name, t in tensors().items()}
    loss = sum(
        getattr(compat, f"chunk_{name}")(*(x[key] for key in keys))[0].square().sum()
        for name, keys in CALLS.items()
    )
    loss.backward()
    assert all(t.grad.abs().max() > 0 for name, t in x.items() if name != "state")


@pytest.mark.parametrize(
    "name",
    ["chunk_linear_attn", "fused_recurrent_linear_attn", "parallel_based", "chunk_retention"],
)
def test_tensors_and_scales_are_checked_first(name):
    x, call = tensors(), getattr(compat, name)
    for scale in ("1", [1.0], float("inf")):
        with pytest.raises((TypeError, ValueError), match=f"{name}: scale must be a finite number"):
            call(x["q"], x["k"], x["v"], scale=scale)
    with pytest.raises(TypeError, match=f"{name}: q must be a torch.Tensor, got q=None"):
        call(None, x["k"], x["v"])


@pytest.mark.parametrize("name", CALLS)
def test_errors_name_the_alias_and_its_arguments(name):
    x, names, call = tensors(), CALLS[name], getattr(compat, f"chunk_{name}")
    for n in range(len(names)):
        given = [x[each] for each in names]
        for wrong, error in ((given[n].int(), TypeError), (given[n][:, :-1], ValueError)):
            with pytest.raises(error, match=rf"^chunk_{name}: .*got \w+\."):
                call(*given[:n], wrong, *given[n + 1 :])
    if name == "dplr_delta_rule":
        with pytest.raises(ValueError, match="chunk_dplr_delta_rule: gk must be <= 0"):
            call(*given[:-1], -given[-1])
