"""Derivatives evaluated piece by piece equal those of the definition, in far less memory."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from derivatives import DERIVATIVES, F64, Loss, assert_as_definition, directions, normal, twice
from torch import Tensor
from torch.func import jacfwd, jacrev

from omniattn import functional as F
from omniattn.functional import masks, scores
from omniattn.ops.derivatives import attention_tiles, losses
from omniattn.ops.dispatch import chunks

B, TQ, TK, HEADS, KV_HEADS, D = 2, 9, 11, 4, 2, 3
SEED = {"dropout_p": 0.4, "seed": torch.tensor([5, 2])}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tiles, "ELEMENTS", 40)
    monkeypatch.setattr(attention_tiles, "_ROWS", (2, 4))
    monkeypatch.setattr(chunks, "TOKENS", 3)


def _qkv() -> list[Tensor]:
    return normal((B, TQ, HEADS, D), (B, TK, KV_HEADS, D), (B, TK, KV_HEADS, 5))


@pytest.mark.parametrize("mode", ["attention", "gated_delta_rule"])
def test_gradients_batched_by_autograd(mode: str) -> None:
    (x,) = normal((1, TQ, 2, D))

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
    q, bias, x, skip = normal((1, TQ, 2, D), (2, 1, 1), (1, TQ, 2, 3), (2,))
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
    inputs = [*_qkv(), *normal((B, HEADS, TQ, TK), (HEADS,))]

    def loss(backend: str | None) -> Loss:
        def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
            options: Any = {"bias": bias, "sinks": sinks, "causal": True, "softcap": 2.0}
            out, lse = F.attention(q, k, v, **options, return_lse=True, backend=backend)
            return out.sin().sum() + lse.square().sum()

        return run

    assert_as_definition(name, loss, inputs, rtol=1e-11)


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
    inputs = [*_qkv(), *normal(shape)]

    def loss(backend: str | None) -> Loss:
        def run(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
            return F.attention(q, k, v, **options(t), backend=backend).sin().sum()

        return run

    for derive in ("twice", "jvp"):
        assert_as_definition(derive, loss, inputs, rtol=1e-11)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    inputs = _qkv()

    def loss(backend: str | None) -> Loss:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, lse = F.attention(q, k, v, **OPTIONS[name], return_lse=True, backend=backend)
            return out.sin().sum() + torch.where(lse.isfinite(), lse, 0).square().sum()

        return run

    for derive in ("twice", "jvp"):
        assert_as_definition(derive, loss, inputs, rtol=1e-11)


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
        assert_as_definition(derive, loss, inputs, rtol=1e-11)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ["cross_entropy", "jsd"])
def test_losses(name: str, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "ELEMENTS", 20)
    target = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(1))
    target[0, 1] = -100
    logits, teacher, weight = normal((2, 5, 7), (2, 5, 7), (7,))

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
        assert_as_definition(derive, loss, [logits], rtol=1e-10)


def test_half_precision_sums_in_fp32() -> None:
    """Gradients of keys, summed over the tiles, are rounded once."""
    inputs = [t.bfloat16() for t in _qkv()]

    def loss(backend: str | None) -> Loss:
        return lambda *x: F.attention(*x, backend=backend).float().sin().sum()

    along = tuple(t.bfloat16() for t in directions(inputs))
    exact = [t.double() for t in inputs]
    best = twice(loss("reference"), exact, tuple(t.double() for t in along))
    ours, theirs = (twice(loss(backend), inputs, along) for backend in (None, "reference"))
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
