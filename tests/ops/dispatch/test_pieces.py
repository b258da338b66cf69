"""Derivatives evaluated piece by piece equal those of the definition, in far less memory."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from omniattn import functional as F
from omniattn.functional import masks, scores
from omniattn.ops.derivatives import attention_tiles, losses, recurrence_tangents, scans
from omniattn.ops.dispatch import chunks

B, TQ, TK, HEADS, KV_HEADS, D = 2, 9, 11, 4, 2, 3
F64 = torch.float64
SEED = {"dropout_p": 0.4, "seed": torch.tensor([5, 2])}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tiles, "ELEMENTS", 40)
    monkeypatch.setattr(attention_tiles, "_ROWS", (2, 4))
    monkeypatch.setattr(chunks, "TOKENS", 3)
    monkeypatch.setattr(scans, "ELEMENTS", 36)
    monkeypatch.setattr(recurrence_tangents, "TOKENS", 8)
    monkeypatch.setattr(recurrence_tangents, "SEGMENT", 3)


def _inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
    make = torch.Generator().manual_seed(3)
    return [torch.randn(s, generator=make, dtype=F64) for s in shapes]


def _qkv() -> list[Tensor]:
    return _inputs((B, TQ, HEADS, D), (B, TK, KV_HEADS, D), (B, TK, KV_HEADS, 5))


def _directions(inputs: list[Tensor]) -> tuple[Tensor, ...]:
    make = torch.Generator().manual_seed(4)
    return tuple(torch.randn(t.shape, generator=make, dtype=F64) for t in inputs)


def _product(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()


Loss = Callable[..., Tensor]


def _twice(loss: Loss, inputs: list[Tensor], along: tuple[Tensor, ...]) -> Any:
    leaves = [t.clone().requires_grad_() for t in inputs]
    first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(_product(first, along), leaves)


def _thrice(loss: Loss, inputs: list[Tensor], along: tuple[Tensor, ...]) -> Any:
    leaves = [t.clone().requires_grad_() for t in inputs]
    first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    second = torch.autograd.grad(_product(first, along), leaves, create_graph=True)
    return torch.autograd.grad(_product(second, along), leaves)


def _dual(loss: Loss, inputs: list[Tensor], along: tuple[Tensor, ...], leaf: bool = False) -> Any:
    with forward_ad.dual_level():
        leaves = [t.clone().requires_grad_(leaf) for t in inputs]
        duals = [forward_ad.make_dual(*pair) for pair in zip(leaves, along, strict=True)]
        found = torch.autograd.grad(loss(*duals), duals) if leaf else (loss(*duals),)
        return [forward_ad.unpack_dual(t).tangent for t in found]


def _penalty_in_checkpoint(loss: Loss, inputs: list[Tensor], along: tuple[Tensor, ...]) -> Any:
    leaves = [t.clone().requires_grad_() for t in inputs]

    def penalty(*leaves: Tensor) -> Tensor:
        return _product(torch.autograd.grad(loss(*leaves), leaves, create_graph=True), along)

    return torch.autograd.grad(checkpoint(penalty, *leaves, use_reentrant=False), leaves)


def _gradient(loss: Loss, count: int) -> Callable[..., tuple[Tensor, ...]]:
    return grad(loss, tuple(range(count)))


DERIVATIVES: dict[str, Callable[[Loss, list[Tensor], tuple[Tensor, ...]], Any]] = {
    "twice": _twice,
    "thrice": _thrice,
    "dual": _dual,
    "gradient of dual": lambda f, x, t: _dual(f, x, t, leaf=True),
    "penalty in checkpoint": _penalty_in_checkpoint,
    "jvp": lambda f, x, t: jvp(f, tuple(x), t)[1],
    "jvp of grad": lambda f, x, t: jvp(_gradient(f, len(x)), tuple(x), t)[1],
    "grad of jvp": lambda f, x, t: _gradient(lambda *x: jvp(f, x, t)[1], len(x))(*x),
    "vjp of grad": lambda f, x, t: vjp(_gradient(f, len(x)), *x)[1](t),
    "grad of grad": lambda f, x, t: _gradient(
        lambda *x: _product(_gradient(f, len(x))(*x), t), len(x)
    )(*x),
    "jvp of jvp of grad": lambda f, x, t: jvp(
        lambda *x: jvp(_gradient(f, len(x)), x, t)[1], tuple(x), t
    )[1],
    "vmap of tangents": lambda f, x, t: vmap(lambda *t: jvp(_gradient(f, len(x)), tuple(x), t)[1])(
        *(torch.stack((a, 2 * a)) for a in t)
    ),
    "vmap of inputs": lambda f, x, t: vmap(
        lambda *x: vjp(_gradient(f, len(x)), *x)[1](t), in_dims=(1, 1, *(0,) * (len(x) - 2))
    )(*(torch.stack((a, 2 * a), 1 if i < 2 else 0) for i, a in enumerate(x))),
}


def _assert_as_definition(
    name: str, loss: Callable[[str | None], Loss], inputs: list[Tensor], rtol: float
) -> None:
    """Requires derivative `name` of the loss of a backend to be that of the definition."""
    derive, along = DERIVATIVES[name], _directions(inputs)
    found, wanted = (derive(loss(backend), inputs, along) for backend in (None, "reference"))
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("mode", ["attention", "gated_delta_rule"])
def test_gradients_batched_by_autograd(mode: str) -> None:
    (x,) = _inputs((1, TQ, 2, D))

    def second(backend: str | None) -> Tensor:
        leaf = x.clone().requires_grad_()
        if mode == "attention":
            y = F.attention(leaf, leaf, leaf, backend=backend)
        else:
            g = -leaf[..., 0].abs()
            y = F.gated_delta_rule(leaf, leaf, leaf, g, -g, backend=backend)[0]
        (first,) = torch.autograd.grad(y.sin().sum(), leaf, create_graph=True)
        along = torch.stack((x, x.flip(1)))
        return torch.autograd.grad(first, leaf, along, is_grads_batched=True)[0]

    torch.testing.assert_close(second(None), second("reference"), rtol=1e-11, atol=1e-12)


def test_hessian_of_expanded_inputs() -> None:
    """Mapped tangents do not fit into the memory of an expanded value."""
    q, bias, x, skip = _inputs((1, TQ, 2, D), (2, 1, 1), (1, TQ, 2, 3), (2,))
    steps = x[..., 0].abs()

    def attention(b: Tensor, backend: str | None) -> Tensor:
        return F.attention(q, q, q, bias=b, backend=backend).sin().sum()

    def ssd(D: Tensor, backend: str | None) -> Tensor:
        A, B = -torch.ones(2, dtype=F64), x[:, :, :1]
        return F.ssd(x, steps, A, B, B, D=D, backend=backend)[0].sin().sum()

    for function, value in ((attention, bias), (ssd, skip)):
        found, wanted = (
            jacfwd(jacrev(lambda t, f=function, b=backend: f(t, b)))(value)
            for backend in (None, "reference")
        )
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", DERIVATIVES)
def test_transforms(name: str) -> None:
    inputs = [*_qkv(), *_inputs((B, HEADS, TQ, TK), (HEADS,))]

    def loss(backend: str | None) -> Loss:
        def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
            options: Any = {"bias": bias, "sinks": sinks, "causal": True, "softcap": 2.0}
            out, lse = F.attention(q, k, v, **options, return_lse=True, backend=backend)
            return out.sin().sum() + lse.square().sum()

        return run

    _assert_as_definition(name, loss, inputs, rtol=1e-11)


@pytest.mark.parametrize(("outer", "inner"), [*itertools.product((jacrev, jacfwd), repeat=2)])
def test_hessians(outer: Callable[..., Any], inner: Callable[..., Any]) -> None:
    q, k, v = _qkv()

    def loss(backend: str | None) -> Loss:
        def run(first: Tensor) -> Tensor:
            queries = torch.cat((first.expand(B, 1, HEADS, D), q[:, 1:]), 1)
            return F.attention(queries, k, v, backend=backend).sin().sum()

        return run

    found, wanted = (outer(inner(loss(backend)))(q[:1, :1]) for backend in (None, "reference"))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


OPTIONS: dict[str, Any] = {
    "window": {"window_size": (3, 1)},
    "top left": {"mask": masks.SlidingWindow(4, 0, top_left=True)},
    "hidden rows": {"mask": torch.arange(TQ)[:, None] > 4},
    "prefix": {"mask": masks.PrefixLM(torch.tensor([3, 8]))},
    "chunks": {"mask": masks.Chunked(4)},
    "documents": {"mask": masks.Documents(torch.arange(TQ) // 4, torch.arange(TK) // 5)},
    "padding": {"mask": masks.KeyPadding(torch.arange(TK) < torch.tensor([[7], [11]]))},
    "strided heads": {"mask": masks.Strided(3, 4)},
    "blocks": {"mask": masks.from_predicate(lambda b, h, q, k: (q * 7 + k * 3) % 5 > 1, TQ, TK)},
    "neighbors": {"mask": masks.Neighborhood(5)},
    "mask of heads": {"mask": torch.rand(B, HEADS, TQ, TK) > 0.4},
    "score_mod": {"score_mod": lambda s, b, h, q, k: s * (1 + 0.1 * h) - 0.2 * (q - k).abs() + b},
    "dropout": SEED | {"causal": True},
    "stick breaking": {"normalizer": "stick_breaking", "causal": True},
    "softpick": {"normalizer": "softpick", "causal": True},
}
#: Shape of a tensor and the option that it becomes.
TERMS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Any]]] = {
    "alibi": ((HEADS,), lambda t: {"alibi_slopes": t, "causal": True}),
    "distances": ((7, HEADS), lambda t: {"relative": scores.DistanceBias(t, 4)}),
    "buckets": ((8, HEADS), lambda t: {"relative": scores.T5Bias(t, max_distance=5)}),
    "rows of keys": ((9, HEADS, D), lambda t: {"relative_keys": scores.DistanceRows(t, 4)}),
    "rows": ((30, HEADS, D), lambda t: {"relative_queries": scores.DistanceRows(t, -12)}),
    "head scale": ((HEADS,), lambda t: {"head_scale": t}),
    "sinks": ((HEADS,), lambda t: {"sinks": t, "window_size": (2, 0)}),
    "bias of keys": ((B, 1, 1, TK), lambda t: {"bias": t}),
    "score_mod": ((HEADS, TK), lambda t: {"score_mod": lambda s, b, h, q, k: s * t[h, k] - q}),
    "sigmoid": ((HEADS, 1, 1), lambda t: {"bias": t, "normalizer": "sigmoid", "causal": True}),
    "relu2": ((HEADS, 1, 1), lambda t: {"bias": t, "normalizer": "relu2", "causal": True}),
}


@pytest.mark.parametrize("name", TERMS)
def test_terms(name: str) -> None:
    shape, options = TERMS[name]
    inputs = [*_qkv(), *_inputs(shape)]

    def loss(backend: str | None) -> Loss:
        def run(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
            return F.attention(q, k, v, **options(t), backend=backend).sin().sum()

        return run

    for derive in ("twice", "jvp"):
        _assert_as_definition(derive, loss, inputs, rtol=1e-11)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    inputs = _qkv()

    def loss(backend: str | None) -> Loss:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, lse = F.attention(q, k, v, **OPTIONS[name], return_lse=True, backend=backend)
            return out.sin().sum() + torch.where(lse.isfinite(), lse, 0).square().sum()

        return run

    for derive in ("twice", "jvp"):
        _assert_as_definition(derive, loss, inputs, rtol=1e-11)


@pytest.mark.parametrize("form", ["packed", "cached"])
def test_layouts(form: str) -> None:
    q, k, v = _qkv()
    bias = torch.randn(3 if form == "packed" else 1, HEADS, TQ, TK, dtype=F64)
    inputs = [q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)] if form == "packed" else [q, k, v]

    def loss(backend: str | None) -> Loss:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            options: Any = SEED | {"bias": bias, "causal": True, "backend": backend}
            if form == "cached":
                lengths = torch.tensor([6, 11])
                return F.attention_cached(q, k, v, lengths, **options).sin().sum()
            ends = torch.tensor([0, 9, 9, 18]), torch.tensor([0, 11, 13, 22])
            return F.attention_varlen(q, k, v, *ends, TQ, TK, **options).sin().sum()

        return run

    for derive in ("twice", "jvp of grad"):
        _assert_as_definition(derive, loss, inputs, rtol=1e-11)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ["cross_entropy", "jsd"])
def test_losses(name: str, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "ELEMENTS", 20)
    target = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(1))
    target[0, 1] = -100
    logits, teacher, weight = _inputs((2, 5, 7), (2, 5, 7), (7,))

    def loss(backend: str | None) -> Loss:
        options: Any = {"reduction": reduction, "backend": backend}

        def run(x: Tensor) -> Tensor:
            if name == "jsd":
                found = F.jsd(x, teacher, target, beta=0.3, **options)
            else:
                options.update(z_loss=0.1, label_smoothing=0.2, softcap=3.0)
                found = F.cross_entropy(x, target, class_weight=weight.exp(), **options)
            return found.square().sum()

        return run

    for derive in ("twice", "thrice", "jvp of grad", "grad of jvp"):
        _assert_as_definition(derive, loss, [logits], rtol=1e-10)


#: Shapes of inputs, and a function of them; decays and step sizes are made from any numbers.
_HEADS, _ROW = (B, 10, 2), (B, 10, 2, D)
RECURRENCES: dict[str, tuple[list[tuple[int, ...]], Callable[..., Any]]] = {
    "gated delta rule": (
        [_ROW, _ROW, (*_HEADS, 4), _HEADS, _HEADS, (B, 2, D, 4)],
        lambda q, k, v, g, b, s, **how: F.gated_delta_rule(
            q, k, v, -g.abs(), b.sigmoid(), initial_state=s, **how
        ),
    ),
    "gla": (
        [_ROW, _ROW, (*_HEADS, 4), _ROW],
        lambda q, k, v, g, **how: F.gated_linear_attention(q, k, v, -g.abs(), **how),
    ),
    "normalized": (
        [_ROW, _ROW, (B, 10, 4, 4)],
        lambda q, k, v, **how: F.linear_attention(
            q, k, v, feature_map="elu1", normalize=True, **how
        ),
    ),
    "rwkv6": (
        [_ROW, _ROW, (*_HEADS, 4), _ROW, (2, D)],
        lambda q, k, v, g, u, **how: F.rwkv6(q, k, v, -g.abs(), u, **how),
    ),
    "rwkv7": (
        [_ROW, _ROW, _ROW, (*_HEADS, 4), _ROW, _ROW],
        lambda q, w, k, v, a, b, **how: F.rwkv7(q, -w.abs(), k, v, a, b, **how),
    ),
    "rwkv4": (
        [(5,), (5,), (B, 10, 5), (B, 10, 5)],
        lambda w, u, k, v, **how: F.rwkv4(w.abs(), u, k, v, **how),
    ),
    "linear scan": ([(B, 10, 5)] * 2, lambda x, g, **how: F.linear_scan(x, -g.abs(), **how)),
    "selective scan": (
        [(B, 10, 4), (B, 10, 4), (4, D), (B, 10, D), (4, D), (4,), (B, 10, 4)],
        lambda u, dt, A, B, C, D, z, **how: F.selective_scan(
            u, dt.sigmoid(), -A.abs(), B, C, D, z, **how
        ),
    ),
    "ssd": (
        [(*_HEADS, 4), _HEADS, (2,), (B, 10, 1, D), (B, 10, 1, D)],
        lambda x, dt, A, B, C, **how: F.ssd(x, dt.sigmoid(), -A.abs(), B, C, **how),
    ),
}


def _assert_recurrence(name: str, derive: str, packed: bool) -> None:
    shapes, function = RECURRENCES[name]
    ends = torch.tensor([0, 7, 7, 10, 20])

    def joined(shape: tuple[int, ...]) -> tuple[int, ...]:
        if shape[:2] == (B, 10):
            return (1, 20, *shape[2:])
        return (len(ends) - 1, *shape[1:]) if shape[0] == B and len(shape) == 4 else shape

    inputs = _inputs(*(joined(s) for s in shapes) if packed else shapes)

    def loss(backend: str | None) -> Loss:
        def run(*x: Tensor) -> Tensor:
            found = function(*x, backend=backend, **({"cu_seqlens": ends} if packed else {}))
            outputs = found if isinstance(found, tuple) else (found,)
            return torch.stack([o[o.isfinite()].sin().sum() for o in outputs]).sum()

        return run

    _assert_as_definition(derive, loss, inputs, rtol=1e-10)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", RECURRENCES)
def test_recurrences(name: str, packed: bool) -> None:
    for derive in ("twice", "jvp of grad"):
        _assert_recurrence(name, derive, packed)


@pytest.mark.parametrize("derive", [name for name in DERIVATIVES if "inputs" not in name])
def test_transforms_of_recurrences(derive: str) -> None:
    _assert_recurrence("gated delta rule", derive, False)


@pytest.mark.parametrize("packed", [False, True])
def test_tangents_of_decays_in_long_sequences(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of the tangents of decays grow with the sequence, their differences in reach do not."""
    monkeypatch.setattr(recurrence_tangents, "TOKENS", 1024)
    monkeypatch.setattr(recurrence_tangents, "SEGMENT", 128)
    q, k, v, g = (t.float() for t in _inputs(*[(1, 2000, 1, 8)] * 4))
    ends = torch.tensor([0, 1500, 2000]) if packed else None

    def along_decays(dtype: torch.dtype) -> Tensor:
        rows = [t.to(dtype) for t in (q, k, v)]
        decays = -g.to(dtype).abs() - 0.1
        return jvp(
            lambda g: F.gated_linear_attention(*rows, g, cu_seqlens=ends)[0],
            (decays,),
            (torch.ones_like(decays),),
        )[1]

    exact = along_decays(F64)
    assert (along_decays(torch.float32) - exact).abs().max() <= 2e-5 * exact.abs().max()


@pytest.mark.parametrize("function", ["gla", "delta", "scan"])
def test_tangents_of_strong_decays(function: str) -> None:
    """A token's own product has no tangent along decays, not a rounding error in its place."""
    q, k, v = (t.float() for t in _inputs(*[(1, 100, 1, 8)] * 3))
    calls: dict[str, Callable[..., Tensor]] = {
        "gla": lambda q, k, v, g: F.gated_linear_attention(q, k, v, g)[0],
        "delta": lambda q, k, v, g: F.gated_delta_rule(q, k, v, g[..., 0], 0.1 * g[..., 0].exp())[
            0
        ],
        "scan": lambda q, k, v, g: F.linear_scan(v[:, :, 0], g[:, :, 0])[0],
    }

    def along_decays(dtype: torch.dtype) -> Tensor:
        rows, decays = [t.to(dtype) for t in (q, k, v)], torch.full_like(q, -10, dtype=dtype)
        run = partial(calls[function], *rows)
        return jvp(run, (decays,), (torch.ones_like(decays),))[1]

    exact = along_decays(F64)
    assert (along_decays(torch.float32) - exact).abs().max() <= 3e-5 * exact.abs().max()


@pytest.mark.parametrize("ends", [None, [0], [0, 0, 0], [0, 0, 12], [0, 5, 5, 12], [0, 12, 12]])
@pytest.mark.parametrize("name", ["gla", "gated delta rule", "rwkv6", "linear scan"])
def test_empty_sequences(name: str, ends: list[int] | None) -> None:
    length = 0 if ends is None else ends[-1]
    shapes, function = RECURRENCES[name]
    given = [s for s in shapes if len(s) < 4 or s[1] == 10]  # without initial states
    inputs = _inputs(*((1, length, *s[2:]) if s[:2] == (B, 10) else s for s in given))
    more = [None] if len(given) < len(shapes) else []

    def loss(backend: str | None) -> Loss:
        def run(*x: Tensor) -> Tensor:
            packed = {} if ends is None else {"cu_seqlens": torch.tensor(ends)}
            outputs = function(*x, *more, backend=backend, **packed)
            return torch.stack([o.sin().sum() for o in outputs]).sum()

        return run

    for derive in ("twice", "jvp of grad"):
        _assert_as_definition(derive, loss, inputs, rtol=1e-10)


@pytest.mark.parametrize("name", ["gla", "gated delta rule"])
def test_tangents_of_infinite_decays(name: str) -> None:
    x, g, b = _inputs(_ROW, _ROW, _HEADS)
    g = -g.abs()
    g[:, 4] = -torch.inf

    def loss(backend: str | None) -> Loss:
        def run(x: Tensor, g: Tensor) -> Tensor:
            if name == "gla":
                return F.gated_linear_attention(x, x, x, g, backend=backend)[0].sin().sum()
            steps = b.sigmoid()
            return F.gated_delta_rule(x, x, x, g[..., 0], steps, backend=backend)[0].sin().sum()

        return run

    for derive in ("twice", "jvp of grad"):
        _assert_as_definition(derive, loss, [x, g], rtol=1e-10)


def test_half_precision_sums_in_fp32() -> None:
    """Gradients of keys, summed over the tiles, are rounded once."""
    inputs = [t.bfloat16() for t in _qkv()]

    def loss(backend: str | None) -> Loss:
        return lambda *x: F.attention(*x, backend=backend).float().sin().sum()

    along = tuple(t.bfloat16() for t in _directions(inputs))
    exact = [t.double() for t in inputs]
    best = _twice(loss("reference"), exact, tuple(t.double() for t in along))
    ours, theirs = (_twice(loss(backend), inputs, along) for backend in (None, "reference"))
    for a, b, x in zip(ours, theirs, best, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a - x).abs().max() <= 2 * (b - x).abs().max() + 2**-8 * x.abs().max()


_MEMORY = """
import resource, torch
from torch.func import grad, jvp
from omniattn.functional import attention, gated_linear_attention, linear_attention

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def loss(q, k, v):
    return {function}.square().sum()

def run(tokens):
    x = tuple(torch.randn(1, tokens, 4, 32, requires_grad=True) for _ in range(3))
    first = torch.autograd.grad(loss(*x), x, create_graph=True)
    torch.autograd.grad(sum(g.square().sum() for g in first), x)
    x = tuple(t.detach() for t in x)
    jvp(grad(loss, (0, 1, 2)), x, x)

torch.set_num_threads(1)
run(512)
before = peak()
run({tokens})
print(peak() - before)
"""


@pytest.mark.parametrize(
    ("function", "tokens", "mib"),
    [
        # A score matrix has 256 MiB; the derivatives of the definition took some 20 of them.
        ("attention(q, k, v, causal=True)", 4096, 256),
        # 1024 states have 16 MiB, and those of all temporaries of the definition some 20 times as
        # much.
        ("linear_attention(q, k, v)[0]", 1024, 100),
        pytest.param("attention(q, k, v, causal=True)", 16384, 1024, marks=pytest.mark.slow),
        pytest.param(
            "gated_linear_attention(q, k, v, -q.abs())[0]", 16384, 1024, marks=pytest.mark.slow
        ),
    ],
)
def test_memory(function: str, tokens: int, mib: int) -> None:
    code = _MEMORY.replace("{function}", function).replace("{tokens}", str(tokens))
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, check=True, capture_output=True, text=True
    )
    assert int(done.stdout) / 1024 < mib
