"""Replaces the rotary function of transformers' attention layers by this package's."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from omniattn import functional
from omniattn.hf.common.probe import Finding, Forward, Left
from omniattn.hf.common.rescope import rescoped

__all__ = ["rotary_forward"]


@functools.cache
def rotary_forward(kind: Any) -> Finding:
    """Returns an attention layer's forward that calls our rotary function."""
    forward, name = inspect.unwrap(kind.forward), "apply_rotary_pos_emb"
    if not isinstance(forward, FunctionType):
        return None
    used = [each for each in forward.__code__.co_names if each.startswith(name)]
    if not used:
        return None
    if used != [name]:
        return Left(f"it calls {' and '.join(used)}")
    original = forward.__globals__.get(name)
    if original is None or list(inspect.signature(original).parameters)[:4] != list(_ROTARY):
        return Left(f"its {name} does not take {', '.join(_ROTARY)}")
    layout = _layout(forward, original)
    if layout is None:
        return Left(f"it calls {name} with arguments that ours does not have")
    rotary = next((ours for ours in _ROTARIES if _same_rotary(original, ours, layout)), None)
    if rotary is None:
        return Left(f"its {name} computes something else")
    return rescoped(kind.forward, {name: rotary})


_ROTARY = ("q", "k", "cos", "sin")
_LAYOUTS: tuple[dict[str, int], ...] = ({}, {"unsqueeze_dim": 1}, {"unsqueeze_dim": 2})


def _layout(forward: FunctionType, original: Forward) -> dict[str, int] | None:
    """Returns the keyword unsqueeze_dim, if any, with which `forward` calls `original`.

    1 is for heads (B, H, T, D), 2 for (B, T, H, D). Returns None for any other arguments.
    """
    signature, found = inspect.signature(original), []
    try:
        source = textwrap.dedent(inspect.getsource(forward))
    except OSError:
        return None  # a forward without source
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or getattr(call.func, "id", None) != original.__name__:
            continue
        keywords = {str(keyword.arg): keyword.value for keyword in call.keywords}
        given = signature.bind_partial(*call.args, **keywords).arguments
        others = {name: node for name, node in given.items() if name not in _ROTARY}
        found.append({name: getattr(node, "value", None) for name, node in others.items()})
    return next((each for each in _LAYOUTS if found and found == [each] * len(found)), None)


def _rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotates q, k (B, H, T, D), or (B, T, H, D) if unsqueeze_dim=2, by cos, sin (B, T, Dr/2)."""
    heads_first = unsqueeze_dim == 1
    if q.dtype != k.dtype:  # under autocast: each in its own dtype
        table = (cos, sin, unsqueeze_dim, interleaved)
        return _rotate(q, q, *table)[0], _rotate(k, k, *table)[0]
    q, k_or_none = functional.apply_rotary(
        q.transpose(1, 2) if heads_first else q,
        k.transpose(1, 2) if heads_first else k,
        cos,
        sin,
        interleaved=interleaved,
        backend="reference" if cos.requires_grad else None,  # LightGlue learns its tables
    )
    assert k_or_none is not None
    return (q.transpose(1, 2), k_or_none.transpose(1, 2)) if heads_first else (q, k_or_none)


def _once(table: Tensor) -> Tensor:
    """Returns the first half of a table whose halves are equal."""
    return table[..., : table.shape[-1] // 2]


def _rotary_half(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    return _rotate(q, k, cos, sin, unsqueeze_dim)


def _rotary_half_twice(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    return _rotate(q, k, _once(cos), _once(sin), unsqueeze_dim)


def _rotary_pairs_twice(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    return _rotate(q, k, _once(cos), _once(sin), unsqueeze_dim, interleaved=True)


def _rotary_pairs_each(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    return _rotate(q, k, cos[..., ::2], sin[..., ::2], unsqueeze_dim, interleaved=True)


#: Our rotary functions -> layout of their tables as a function of the angles.
_ROTARIES: dict[Forward, Callable[[Tensor], Tensor]] = {
    _rotary_half_twice: lambda angles: torch.cat([angles, angles], -1),
    _rotary_half: lambda angles: angles,
    _rotary_pairs_twice: lambda angles: torch.cat([angles, angles], -1),
    _rotary_pairs_each: lambda angles: angles.repeat_interleave(2, -1),
}


def _same_rotary(original: Forward, ours: Forward, layout: dict[str, int]) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, 3, 8, generator=generator)
    if layout.get("unsqueeze_dim") == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    angles = _ROTARIES[ours](torch.randn(1, 3, 4, generator=generator))
    cos, sin = angles.cos(), angles.sin()
    try:
        expected = original(q, k, cos, sin, **layout)
    except (RuntimeError, ValueError):
        return False  # tables of another shape
    try:
        original(q, k, cos[:, 1:], sin[:, 1:], **layout)
    except (RuntimeError, ValueError):
        pass
    else:
        return False  # it skips prefix tokens (DINOv3)
    return all(
        torch.allclose(a, e, rtol=1e-5, atol=1e-6)
        for a, e in zip(ours(q, k, cos, sin, **layout), expected, strict=True)
    )
