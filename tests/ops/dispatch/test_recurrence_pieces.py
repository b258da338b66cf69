"""Derivatives of recurrences, evaluated chunk by chunk, equal those of the definition."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from derivatives import DERIVATIVES, F64, Loss, assert_as_definition, normal
from torch import Tensor
from torch.func import jvp

from omniattn import functional as F
from omniattn.ops.derivatives import recurrence_tangents, scans
from omniattn.ops.dispatch import chunks

B, D = 2, 3


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "TOKENS", 3)
    monkeypatch.setattr(scans, "ELEMENTS", 36)
    monkeypatch.setattr(recurrence_tangents, "TOKENS", 8)
    monkeypatch.setattr(recurrence_tangents, "SEGMENT", 3)


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

    inputs = normal(*(joined(s) for s in shapes) if packed else shapes)

    def loss(backend: str | None) -> Loss:
        def run(*x: Tensor) -> Tensor:
            found = function(*x, backend=backend, **({"cu_seqlens": ends} if packed else {}))
            outputs = found if isinstance(found, tuple) else (found,)
            return torch.stack([o[o.isfinite()].sin().sum() for o in outputs]).sum()

        return run

    assert_as_definition(derive, loss, inputs, rtol=1e-10)


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
    q, k, v, g = (t.float() for t in normal(*[(1, 2000, 1, 8)] * 4))
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
    q, k, v = (t.float() for t in normal(*[(1, 100, 1, 8)] * 3))
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
    inputs = normal(*((1, length, *s[2:]) if s[:2] == (B, 10) else s for s in given))
    more = [None] if len(given) < len(shapes) else []

    def loss(backend: str | None) -> Loss:
        def run(*x: Tensor) -> Tensor:
            packed = {} if ends is None else {"cu_seqlens": torch.tensor(ends)}
            outputs = function(*x, *more, backend=backend, **packed)
            return torch.stack([o.sin().sum() for o in outputs]).sum()

        return run

    for derive in ("twice", "jvp of grad"):
        assert_as_definition(derive, loss, inputs, rtol=1e-10)


@pytest.mark.parametrize("name", ["gla", "gated delta rule"])
def test_tangents_of_infinite_decays(name: str) -> None:
    x, g, b = normal(_ROW, _ROW, _HEADS)
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
        assert_as_definition(derive, loss, [x, g], rtol=1e-10)
