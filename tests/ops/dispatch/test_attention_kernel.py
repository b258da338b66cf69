"""The kernel for tangents of attention: values of the definition, without the tiles."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from derivatives import DERIVATIVES, F64, OF_KERNELS, refuse_pieces
from torch import Tensor

from omniattn import functional as F
from omniattn.functional import masks, scores
from omniattn.ops.derivatives import attention_kernel, attention_tiles
from omniattn.testing.environment import threads

pytestmark = pytest.mark.skipif(
    not attention_kernel._PRESENT, reason="the emulated kernels of CUDA have none for tangents"
)


@pytest.fixture(autouse=True)
def _without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tiles, "ELEMENTS", 0)
    refuse_pieces(monkeypatch)


def _randn(*shape: int, dtype: torch.dtype = F64, seed: int = 0) -> Tensor:
    make = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=make, dtype=F64).to(dtype)


def _qkv(sizes: tuple[int, ...], dtype: torch.dtype = F64, seed: int = 0) -> tuple[Tensor, ...]:
    batch, tq, tk, heads, kv_heads, d, dv = sizes
    shapes = ((batch, tq, heads, d), (batch, tk, kv_heads, d), (batch, tk, kv_heads, dv))
    return tuple(_randn(*s, dtype=dtype, seed=seed + i) for i, s in enumerate(shapes))


def _loss(options: dict[str, Any], backend: str | None) -> Callable[..., Tensor]:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = F.attention(q, k, v, **options, return_lse=True, backend=backend)
        return out.sin().sum() + torch.where(lse.isfinite(), lse, 0).square().sum()

    return loss


#: Sizes B, Tq, Tk, Hq, Hkv, D, Dv, around tiles of 96 queries and 128 keys.
SIZES = [
    (1, 1, 1, 1, 1, 1, 1),
    (2, 70, 70, 4, 2, 16, 16),
    (1, 97, 129, 3, 1, 17, 33),
    (1, 200, 300, 2, 2, 64, 8),
    (9, 5, 3, 4, 4, 3, 5),
    (2, 3, 0, 2, 1, 4, 4),
    (2, 0, 3, 2, 1, 4, 4),
    (0, 3, 3, 2, 1, 4, 4),
]


def _compare(derive: str, options: dict[str, Any], sizes: tuple[int, ...]) -> None:
    x, t = _qkv(sizes), _qkv(sizes, seed=9)
    found, wanted = (DERIVATIVES[derive](_loss(options, b), x, t) for b in (None, "reference"))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("derive", OF_KERNELS)
def test_sizes(derive: str, sizes: tuple[int, ...], causal: bool) -> None:
    _compare(derive, {"causal": causal}, sizes)


OPTIONS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.7},
    "window": {"window_size": (20, 3)},
    "hidden rows": {"mask": torch.arange(130)[:, None] > 60},
    "sparse": {"mask": masks.from_predicate(lambda b, h, q, k: (q * 7 + k) % 5 > 3, 130, 150)},
    "documents": {"mask": masks.Documents(torch.arange(130) // 40, torch.arange(150) // 50)},
    "mask of heads": {"mask": _randn(2, 2, 130, 150) > 1},
    "bias": {"bias": _randn(2, 2, 130, 150)},
    "infinite bias": {"bias": torch.where(_randn(1, 1, 130, 150) > 0, -torch.inf, 0.0).to(F64)},
    "alibi": {"alibi_slopes": torch.tensor([0.1, 0.2], dtype=F64), "causal": True},
    "distances": {"relative": scores.DistanceBias(_randn(9, 2), 4)},
    "sinks": {"sinks": _randn(2), "causal": True},
    "head scale": {"head_scale": _randn(2)},
    "dropout": {"dropout_p": 0.4, "seed": torch.tensor([5, 2]), "causal": True},
}


@pytest.mark.parametrize("derive", ["vjp of grad", "grad of jvp"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, derive: str) -> None:
    _compare(derive, OPTIONS[name], (2, 130, 150, 2, 1, 8, 12))


@pytest.mark.parametrize("form", ["packed", "cached"])
def test_layouts(form: str) -> None:
    x, t = _qkv((2, 130, 150, 2, 1, 8, 12)), _qkv((2, 130, 150, 2, 1, 8, 12), seed=9)
    ends = torch.tensor([0, 97, 97, 260]), torch.tensor([0, 150, 170, 300])

    def loss(backend: str | None) -> Callable[..., Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if form == "cached":
                lengths = torch.tensor([140, 150])
                out = F.attention_cached(q, k, v, lengths, causal=True, backend=backend)
            else:
                q, k, v = (t.flatten(0, 1) for t in (q, k, v))
                out = F.attention_varlen(q, k, v, *ends, 163, 150, causal=True, backend=backend)
            return out.sin().sum()

        return run

    for derive in OF_KERNELS:
        found, wanted = (
            DERIVATIVES[derive](loss(backend), x, t) for backend in (None, "reference")
        )
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("wanted", [s for n in (1, 2) for s in itertools.combinations("qkv", n)])
def test_wanted_gradients(wanted: tuple[str, ...]) -> None:
    """Any subset of first gradients, and then of second ones, with or without that of grad_out."""
    x, t = (_qkv((1, 100, 140, 2, 1, 8, 8), seed=s) for s in (0, 9))
    grad_out = _randn(1, 100, 2, 8)

    def second(backend: str | None, of: str, with_grad_out: bool) -> tuple[Tensor, ...]:
        leaves = [
            a.clone().requires_grad_(n in {*wanted, *of}) for n, a in zip("qkv", x, strict=True)
        ]
        given = grad_out.clone().requires_grad_(with_grad_out)
        named = dict(zip("qkv", leaves, strict=True))
        out = F.attention(*leaves, causal=True, backend=backend)
        first = torch.autograd.grad(out, [named[n] for n in wanted], given, create_graph=True)
        weights = [b for n, b in zip("qkv", t, strict=True) if n in wanted]
        targets = [named[n] for n in of] + [given] * with_grad_out
        return torch.autograd.grad(first, targets, weights, allow_unused=True)

    for of, with_grad_out in (("qkv", False), *((of, True) for of in ("", "q", "k", "v"))):
        found, best = (second(b, of, with_grad_out) for b in (None, "reference"))
        for a, b in zip(found, best, strict=True):
            b = torch.zeros_like(a) if b is None else b
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_gradgradcheck() -> None:
    x = [t.requires_grad_() for t in _qkv((1, 3, 4, 2, 1, 2, 3))]
    torch.autograd.gradgradcheck(lambda *x: F.attention(*x, causal=True, return_lse=True), x)


@pytest.mark.parametrize("heads", [1, 9])  # keys of few heads are split, many heads are not
def test_bits_do_not_depend_on_threads(heads: int) -> None:
    sizes = (1, 300, 400, heads, heads, 24, 40)
    x, t = (_qkv(sizes, torch.float32, seed=s) for s in (0, 9))
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(DERIVATIVES["vjp of grad"](_loss({"causal": True}, None), x, t))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("derive", ["jvp", "vjp of grad", "jvp of grad"])
def test_error(derive: str, dtype: torch.dtype) -> None:
    """The error is at most twice that of the eager form in the same dtype."""
    sizes = (1, 130, 150, 2, 1, 64, 32)
    x, t = (_qkv(sizes, dtype, seed=s) for s in (0, 9))
    exact = [tuple(a.double() for a in each) for each in (x, t)]

    def loss(backend: str | None) -> Callable[..., Tensor]:
        run = _loss({"causal": True}, backend)
        return lambda *x: run(*x).double()

    best = DERIVATIVES[derive](loss("reference"), *exact)
    ours, eager = (DERIVATIVES[derive](loss(b), x, t) for b in (None, "reference"))
    if derive == "jvp":
        ours, eager, best = ((t,) for t in (ours, eager, best))
    for a, b, e in zip(ours, eager, best, strict=True):
        floor = torch.finfo(dtype).eps * e.abs().max()
        assert (a - e).abs().max() <= 2 * (b - e).abs().max() + floor


def test_bad_arguments() -> None:
    q, k, v = _qkv((1, 4, 4, 2, 2, 8, 8))
    out, lse, tail = torch.ops.omniattn.attention_raw(q, k, v, [], None, [], [], [0.3, 0.0])

    def call(**changed: Any) -> Any:
        given = {"tangent_q": q, "grad_out": out, "score": [], "grad_lse": lse} | changed
        return torch.ops.omniattn.attention_tangents(
            *(q, k, v, given["tangent_q"], None, None, given["grad_out"], given["grad_lse"]),
            *(None, None, [], None, out, lse, tail, [], given["score"], [0.3, 0.0, 5.0]),
        )

    with pytest.raises(RuntimeError, match="tangent_q must have shape"):
        call(tangent_q=q[:, :3])
    with pytest.raises(RuntimeError, match="grad_lse must be float64"):
        call(grad_lse=lse.float())
    with pytest.raises(RuntimeError, match="grad_out must be given"):
        call(grad_out=None)
    with pytest.raises(RuntimeError, match="the score must be a softmax"):
        call(score=[1, -1, 2])
