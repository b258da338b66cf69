"""Recurrences: pairwise formulas, states, packed sequences, strong decays, errors, other code."""

import functools
import itertools

import pytest
import torch
from recurrence_cases import decays, draw, pairwise, qkv

from omniattn import functional as F
from omniattn import testing

BACKENDS = [None, "reference"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("v_heads", [2, 6])
def test_gated_linear_attention(backend, v_heads):
    q, k, v = qkv(v_heads=v_heads)
    g = decays(2, 70, v_heads, 8)
    o, _ = F.gated_linear_attention(q, k, v, g, backend=backend)
    torch.testing.assert_close(o, pairwise(q, k, v, g))
    of_heads = g[..., 0]
    o, _ = F.gated_linear_attention(q, k, v, of_heads, backend=backend)
    torch.testing.assert_close(o, pairwise(q, k, v, of_heads[..., None].expand_as(g)))


def test_retention():
    q, k, v = qkv()
    g = torch.tensor([1 - 2.0**-5, 1 - 2.0**-6], dtype=torch.float64).log()
    expected = pairwise(q, k, v, g[:, None].expand(2, 70, 2, 8))
    torch.testing.assert_close(F.retention(q, k, v)[0], expected)
    torch.testing.assert_close(F.retention(q, k, v, gamma=g.exp())[0], expected)


def normalised(q, k, v, gamma) -> torch.Tensor:
    """By pairs: the matrix of decays, its rows and those of the scores divided as in the paper."""
    steps = torch.arange(q.shape[1], dtype=q.dtype)
    decay = gamma[:, None, None] ** (steps[:, None] - steps).clamp(min=0)
    decay = decay.tril()
    decay = decay / decay.sum(-1, keepdim=True).sqrt()
    score = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5 * decay
    score = score / score.detach().sum(-1, keepdim=True).abs().clamp(min=1)
    return torch.einsum("bhij,bjhv->bihv", score, v)


@pytest.mark.parametrize("backend", BACKENDS)
def test_retention_of_the_paper(backend):
    q, k, v = qkv(v_heads=2)
    q = 3 * q  # so that some rows are divided and others are not
    gamma = torch.tensor([0.75, 1.0], dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (q, k, v, gamma)]
    options = {"gamma": gamma, "normalize": True, "backend": backend}
    o, final = F.retention(q, k, v, **options)
    expected = normalised(q, k, v, gamma)
    torch.testing.assert_close(o, expected)
    ours, theirs = (torch.autograd.grad(t.square().sum(), leaves) for t in (o, expected))
    torch.testing.assert_close(ours, theirs)
    state, parts = None, []
    for a, b in itertools.pairwise((0, 1, 1, 33, 70)):
        piece = (t[:, a:b] for t in (q, k, v))
        part, state = F.retention(*piece, initial_state=state, **options)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), o)
    torch.testing.assert_close(state, final)
    bounds = torch.tensor([0, 3, 3, 70])
    packed, ends = F.retention(q[:1], k[:1], v[:1], cu_seqlens=bounds, **options)
    for n, (a, b) in enumerate(itertools.pairwise(bounds.tolist())):
        alone, end = F.retention(*(t[:1, a:b] for t in (q, k, v)), **options)
        torch.testing.assert_close(packed[:, a:b], alone)
        torch.testing.assert_close(ends[n], end[0])


def solved(q, k, v, g, beta) -> torch.Tensor:
    """The delta rule by its linear system: u_i + beta_i sum_{j<i} A_ij u_j = beta_i v_i."""
    total, steps = g.cumsum(1), torch.arange(q.shape[1])
    seen = (steps[:, None] >= steps)[:, :, None, None]
    weight = torch.where(seen, total[:, :, None] - total[:, None], -torch.inf).exp()
    keys = torch.einsum("bihd,bjhd,bijhd->bhij", k, k, weight).tril(-1)
    b = beta.mT[..., None]
    u = torch.linalg.solve(torch.eye(q.shape[1]).double() + b * keys, b * v.transpose(1, 2))
    score = torch.einsum("bihd,bjhd,bijhd->bhij", q, k, weight) * q.shape[-1] ** -0.5
    return (score @ u).transpose(1, 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_delta_rules(backend):
    q, k, v = qkv()
    beta, g = 2 * draw(2, 70, 2, seed=4).sigmoid(), decays(2, 70, 2, 8)
    of_heads = g[..., :1].expand_as(g)
    for o, decay in (
        (F.delta_rule(q, k, v, beta, backend=backend), torch.zeros_like(g)),
        (F.gated_delta_rule(q, k, v, g[..., 0], beta, backend=backend), of_heads),
        (F.kimi_delta_attention(q, k, v, g, beta, backend=backend), g),
    ):
        torch.testing.assert_close(o[0], solved(q, k, v, decay, beta))


def test_unit_keys():
    q, k, v = qkv()
    beta = draw(2, 70, 2, seed=4).sigmoid()
    expected = F.delta_rule(
        *(t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, 3 * k)), v, beta
    )
    torch.testing.assert_close(F.delta_rule(q, 3 * k, v, beta, l2norm=True), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("splits", [(0, 1, 2, 70), (0, 33, 64, 70), (0, 0, 70)])
def test_a_state_continues(backend, splits):
    q, k, v = qkv()
    g, beta = decays(2, 70, 2, 8), draw(2, 70, 2, seed=4).sigmoid()
    for rule, gates in (
        (F.gated_linear_attention, (g,)),
        (F.gated_delta_rule, (g[..., 0], beta)),
        (F.kimi_delta_attention, (g, beta)),
        (functools.partial(F.rwkv6, u=draw(2, 8, seed=6)), (g,)),
        (F.dplr_delta_rule, (-k, k * beta[..., None], g)),
    ):
        o, final = rule(q, k, v, *gates, backend=backend)
        state, parts = None, []
        for a, b in itertools.pairwise(splits):
            some = (t[:, a:b] for t in (q, k, v, *gates))
            part, state = rule(*some, initial_state=state, backend=backend)
            parts.append(part)
        torch.testing.assert_close(torch.cat(parts, 1), o)
        torch.testing.assert_close(state, final)


@pytest.mark.parametrize("causal", [True, False])
def test_no_sequences(causal):
    """There are no tokens and no states."""
    q, k, v = (t[:1] for t in qkv(0, v_heads=2))
    bounds = torch.tensor([0])
    weight = torch.ones(6, 8, dtype=q.dtype)
    for o, states in (
        F.retention(q, k, v, normalize=True, cu_seqlens=bounds),
        F.random_feature_attention(q, k, v, weight, causal=causal, cu_seqlens=bounds),
    ):
        assert torch.equal(o, torch.zeros_like(v))
        assert all(len(s) == 0 for s in ([states] if torch.is_tensor(states) else states))


def test_packed_sequences_are_apart():
    q, k, v = (t[:1] for t in qkv())
    g, beta = decays(1, 70, 2), draw(1, 70, 2, seed=4).sigmoid()
    start = draw(4, 2, 8, 5, seed=5)
    cu = torch.tensor([0, 20, 20, 65, 70])
    o, final = F.gated_delta_rule(q, k, v, g, beta, initial_state=start, cu_seqlens=cu)
    for n in range(4):
        a, b = int(cu[n]), int(cu[n + 1])
        part, state = F.gated_delta_rule(
            *(t[:, a:b] for t in (q, k, v, g, beta)), initial_state=start[n : n + 1]
        )
        torch.testing.assert_close(o[:, a:b], part)
        torch.testing.assert_close(final[n : n + 1], state)


@pytest.mark.parametrize("width", [None, 8])
def test_heads_do_not_depend_on_those_beside_them(width):
    """A thread takes several heads at once, as many as their number and that of threads suggest."""
    q, k, v = (t.float() for t in qkv(70, heads=5, v_heads=10))
    g = decays(*v.shape[:3], *([width] if width else [])).float()
    with testing.threads(1):
        inputs = [t.requires_grad_() for t in (q, k, v, g)]
        o, state = F.gated_linear_attention(*inputs)
        grads = torch.autograd.grad(o.square().sum(), inputs)
        for n in range(5):
            of_values = slice(2 * n, 2 * n + 2)
            heads = [slice(n, n + 1)] * 2 + [of_values] * 2
            some = [
                t[:, :, h].detach().requires_grad_() for t, h in zip(inputs, heads, strict=True)
            ]
            alone, last = F.gated_linear_attention(*some)
            assert torch.equal(o[:, :, of_values], alone)
            assert torch.equal(state[:, of_values], last)
            for whole, h, part in zip(
                grads, heads, torch.autograd.grad(alone.square().sum(), some), strict=True
            ):
                assert torch.equal(whole[:, :, h], part)


@pytest.mark.parametrize("least", [-0.0, -50.0, -1e4])
def test_strong_decays(least):
    """Sums of -50 over a chunk are far beyond what exp can undo; no factor may overflow."""
    q, k, v = (t.float() for t in qkv(130))
    pick = draw(2, 130, 2, 8, seed=3) > 0
    g = torch.where(pick, torch.tensor(least), torch.tensor(-0.01)).float()
    beta = draw(2, 130, 2, seed=4).sigmoid().float()
    for rule, gates in (
        (F.gated_linear_attention, (g,)),
        (F.kimi_delta_attention, (g, beta)),
        (F.rwkv6, (g, draw(2, 8, seed=6).float())),
        (F.dplr_delta_rule, (-k, k * beta[..., None], g)),
    ):
        inputs = [t.clone().requires_grad_() for t in (q, k, v, *gates)]
        wide = [t.detach().double().requires_grad_() for t in inputs]
        o, state = rule(*inputs)
        expected, final = rule(*wide, backend="reference")
        torch.testing.assert_close(o.double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state.double(), final, rtol=1e-4, atol=1e-5)
        grads = torch.autograd.grad(o.square().sum(), inputs)
        for ours, exact in zip(
            grads, torch.autograd.grad(expected.square().sum(), wide), strict=True
        ):
            torch.testing.assert_close(ours.double(), exact, rtol=1e-3, atol=1e-3)


def test_gated_delta_rule_of_transformers():
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, v = (t.float() for t in qkv(130, v_heads=2))
    g, beta = decays(2, 130, 2).float(), draw(2, 130, 2, seed=4).sigmoid().float()
    start = draw(2, 2, 8, 5, seed=5).float()
    for theirs in (module.torch_chunk_gated_delta_rule, module.torch_recurrent_gated_delta_rule):
        options = {"initial_state": start, "output_final_state": True}
        o, final = theirs(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, **options)
        ours = F.gated_delta_rule(q, k, v, g, beta, l2norm=True, initial_state=start)
        torch.testing.assert_close(ours, (o, final.float()), rtol=1e-4, atol=1e-5)


def call(**changed):
    q, k, v = qkv(4)
    given = {"q": q, "k": k, "v": v, "g": decays(2, 4, 2), "beta": torch.ones(2, 4, 2)}
    return F.gated_delta_rule(**(given | changed))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"q": torch.ones(2, 4, 8)}, ValueError, r"q must have shape \(B, T, H, K\), got q.shape"),
        ({"k": draw(2, 4, 2, 7)}, ValueError, r"k must have shape \(2, 4, 2, 8\), got k.shape="),
        (
            {"k": torch.ones(2, 4, 2, 8)},
            TypeError,
            r"k must have the dtype of q, got k.dtype=torch",
        ),
        ({"v": draw(2, 4, 3, 5)}, ValueError, r"Hv a multiple of its heads, got v.shape=\(2, 4, 3"),
        ({"g": decays(2, 4, 2, 8)}, ValueError, r"g must have shape \(2, 4, 2\), got g.shape="),
        (
            {"g": torch.ones(2, 4, 2).int()},
            TypeError,
            r"g must be floating-point, got g.dtype=torch",
        ),
        (
            {"beta": torch.ones(2, 4)},
            ValueError,
            r"beta must have shape \(2, 4, 2\), got beta.shape",
        ),
        (
            {"initial_state": draw(2, 2, 8, 4)},
            ValueError,
            r"initial_state must have shape \(2, 2, 8",
        ),
        ({"l2norm": 1}, TypeError, r"l2norm must be True or False"),
        ({"scale": float("nan")}, ValueError, r"scale must be .*, got scale=nan"),
        (
            {"cu_seqlens": torch.tensor([0, 4])},
            ValueError,
            r"B must be 1 with cu_seqlens, got q.sh",
        ),
        ({"cu_seqlens": torch.tensor([0.0, 4])}, TypeError, r"cu_seqlens must be integers, got cu"),
        ({"backend": "fast"}, ValueError, r"backend must be one of .*, got backend='fast'"),
    ],
)
def test_errors(changed, error, message):
    with pytest.raises(error, match=rf"^gated_delta_rule: .*{message}"):
        call(**changed)


@pytest.mark.parametrize("bounds", [[0, 3, 2, 4], [0, 5], [-1, 4]])
def test_sequences_grow_to_the_last_step(bounds):
    q, k, v = (t[:1] for t in qkv(4))
    with pytest.raises(ValueError, match="retention: cu_seqlens must grow from 0 to the number"):
        F.retention(q, k, v, cu_seqlens=torch.tensor(bounds))


KEYS, PLAIN = torch.ones(1, 3, 2, 4), torch.full((1, 3, 2), -0.5)
#: Functions with the log-decays given, and the name of that argument.
DECAYING = {
    "gated_linear_attention": ("g", lambda g: F.gated_linear_attention(KEYS, KEYS, KEYS, g)),
    "linear_attention": ("g", lambda g: F.linear_attention(KEYS, KEYS, KEYS, g=g)),
    "gated_delta_rule": ("g", lambda g: F.gated_delta_rule(KEYS, KEYS, KEYS, g, PLAIN)),
    "kimi_delta_attention": (
        "g",
        lambda g: F.kimi_delta_attention(KEYS, KEYS, KEYS, g[..., None].expand(KEYS.shape), PLAIN),
    ),
    "dplr_delta_rule": ("g", lambda g: F.dplr_delta_rule(KEYS, KEYS, KEYS, KEYS, KEYS, g)),
    "rwkv6": (
        "w",
        lambda g: F.rwkv6(KEYS, KEYS, KEYS, g[..., None].expand(KEYS.shape), KEYS[0, 0]),
    ),
    "rwkv7": (
        "w",
        lambda g: F.rwkv7(KEYS, g[..., None].expand(KEYS.shape), KEYS, KEYS, KEYS, KEYS),
    ),
}


@pytest.mark.parametrize("name", DECAYING)
def test_states_that_would_grow_are_refused(name):
    argument, call = DECAYING[name]
    g = PLAIN.clone()
    assert call(g)[0].isfinite().all()
    g[0, 1, 1] = 0.0
    assert call(g)[0].isfinite().all()
    g[0, 1, 1] = 0.25
    with pytest.raises(ValueError, match=rf"^{name}: {argument} must be <= 0, got {argument}.max"):
        call(g)
    g[0, 1, 1] = torch.nan
    assert call(g)[0].isnan().any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: F.retention(KEYS, KEYS, KEYS, gamma=x), r"retention: gamma must be >= 0, got g"),
        (lambda x: F.retention(KEYS, KEYS, KEYS, gamma=-x), r"retention: gamma must be <= 1, got "),
        (
            lambda x: F.rwkv4(x, x, KEYS[0, ..., :2], KEYS[0, ..., :2]),
            r"rwkv4: w must be >= 0, got w.min\(\)=-2",
        ),
        (lambda x: F.rwkv_quadratic(KEYS, KEYS, KEYS, x), r"rwkv_quadratic: w must be >= 0"),
        (lambda x: F.rwkv_recurrent(KEYS, KEYS, KEYS, x), r"rwkv_recurrent: w must be >= 0"),
    ],
)
def test_decays_of_the_wrong_sign_are_refused(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call(torch.full((2,), -2.0))


@pytest.mark.parametrize("missing", ["beta", "g"])
def test_a_missing_factor_is_no_call_of_another_recurrence(missing):
    q, k, v = (t.float() for t in qkv())
    factor = torch.zeros(2, 70, 2)
    with pytest.raises(TypeError, match=f"gated_delta_rule: {missing} must be a torch.Tensor"):
        F.gated_delta_rule(q, k, v, **{"g": factor, "beta": factor, missing: None})


def test_decays_of_channels_are_not_those_of_heads():
    q, k, v = (t.float() for t in qkv())
    of_heads, of_channels = torch.zeros(2, 70, 2), torch.zeros(2, 70, 2, 8)
    with pytest.raises(ValueError, match="gated_delta_rule: g must have shape"):
        F.gated_delta_rule(q, k, v, of_channels, of_heads)
    with pytest.raises(ValueError, match="kimi_delta_attention: g must have shape"):
        F.kimi_delta_attention(q, k, v, of_heads, of_heads)


def test_values_are_not_read_while_a_call_is_traced():
    """Neither under a transform nor by a compiler; its own graph must hold no such branch."""
    g = torch.full((1, 3, 2), 0.25)
    call = lambda g: F.gated_linear_attention(KEYS, KEYS, KEYS, g)[0].sum()  # noqa: E731
    assert torch.func.grad(call)(g).isfinite().all()
    exported = torch.export.export(_Decaying(), (g,))
    assert exported.module()(g).isfinite().all()


OF_BATCHES = {
    "gated_linear_attention": lambda x: F.gated_linear_attention(x, x, x, -x.abs())[0],
    "rwkv4": lambda x: F.rwkv4(x[0, 0, 0].abs(), x[0, 0, 0], x[:, :, 0], x[:, :, 0])[0],
    "selective_scan": lambda x: F.selective_scan(
        x[:, :, 0], x[:, :, 0].abs(), -x[0, 0, 0, :, None].abs(), x[:, :, 0, :1], x[:, :, 0, :1]
    )[0],
}


@pytest.mark.parametrize("name", OF_BATCHES)
def test_one_exported_graph_for_all_batches(name):
    class Module(torch.nn.Module):
        def forward(self, x):
            return OF_BATCHES[name](x)

    x, batch = draw(3, 6, 2, 4), torch.export.Dim("B", min=2)
    program = torch.export.export(Module(), (x[:2],), dynamic_shapes={"x": {0: batch}}).module()
    torch.testing.assert_close(program(x), OF_BATCHES[name](x))


class _Decaying(torch.nn.Module):
    def forward(self, g):
        return F.gated_linear_attention(KEYS, KEYS, KEYS, g)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_states_are_computed_in_fp32_whatever_dtype_they_come_in(dtype):
    q, k, v = (t.float() for t in qkv(20))
    state = draw(2, 2, 8, 5, seed=5).to(dtype).requires_grad_()
    o, final = F.retention(q, k, v, initial_state=state)
    expected = F.retention(q, k, v, initial_state=state.float())
    assert final.dtype == torch.float32
    assert torch.equal(o, expected[0]) and torch.equal(final, expected[1])
    assert torch.autograd.grad(o.sum(), state)[0].dtype == dtype
    with pytest.raises(TypeError, match="retention: initial_state must be floating-point, got"):
        F.retention(q, k, v, initial_state=torch.ones(2, 2, 8, 5, dtype=torch.int64))
