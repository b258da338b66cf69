"""torch's scaled_dot_product_attention, computed by this package's attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omniattn.checks.arguments import is_causal_bias, require_bool, shown
from omniattn.checks.jagged import is_jagged
from omniattn.encoding.options import Options
from omniattn.functional.attention._common import (
    autocast,
    causal_mask,
    full_shape,
    require_bias,
    require_broadcastable,
)
from omniattn.functional.attention._options import run
from omniattn.functional.attention.attention import attention
from omniattn.functional.masks import BoolMask, Mask, SlidingWindow

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: str | None = None,
) -> Tensor:
    """Drop-in for torch.nn.functional.scaled_dot_product_attention, computed by :func:`attention`.

    Args:
        query: (..., Hq, Tq, D) or (Tq, D). All three may be jagged nested tensors (B, H, j, D), as
            `transpose(1, 2)` makes them of (B, j, H, D), without attn_mask.
        key: (..., Hkv, Tk, D) or (Tk, D). All dimensions before T of the three are broadcast.
        value: (..., Hkv, Tk, Dv) or (Tk, Dv).
        attn_mask: bool (True = attend) or additive float, broadcastable to (..., Hq, Tq, Tk), or a
            `torch.nn.attention.bias.CausalBias` of (Tq, Tk).
        dropout_p: applied whenever positive, as in torch. The mask of dropped weights is drawn from
            torch's generator, but is not torch's own.
        is_causal: query i sees keys up to i: aligned top-left, as in torch. With an attn_mask both
            apply, as in the CPU kernel of torch before 2.14, which refuses the two together.
        scale: None is 1 / sqrt(D).
        enable_gqa: key and value may have fewer heads, each a number that divides Hq.
        backend: see :func:`attention`.

    Returns:
        (..., Hq, Tq, Dv) of the query's dtype; 0 for a query that sees no key.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`attention`.

    Example:
        >>> q = torch.zeros(1, 1, 2, 4)
        >>> scaled_dot_product_attention(q, q, torch.ones(1, 1, 2, 1)).flatten()
        tensor([1., 1.])
    """
    op = "scaled_dot_product_attention"
    require_bool(op, "is_causal", is_causal)
    require_bool(op, "enable_gqa", enable_gqa)
    mask: Mask | None = SlidingWindow(-1, 0, top_left=True) if is_causal else None
    if is_jagged(query):
        if attn_mask is not None:
            raise ValueError(
                f"{op}: attn_mask must be None where query is nested, "
                f"got attn_mask={shown(attn_mask)}"
            )
        more = {"mask": mask, "scale": scale, "dropout_p": dropout_p, "backend": backend}
        return _of_jagged(op, query, key, value, enable_gqa, more)
    query, key, value = autocast(op, query, key, value, ("query", "key", "value"))
    lead = _leading_shape(op, query, key, value, enable_gqa)
    *batch, heads = lead or (1,)
    full = (*batch, heads, query.shape[-2], key.shape[-2])
    bias: Tensor | None = None
    if is_causal_bias(attn_mask):
        if is_causal:
            raise ValueError(f"{op}: is_causal must be False with a CausalBias, got is_causal=True")
        mask = causal_mask(op, "attn_mask", attn_mask, full)
    elif attn_mask is not None:
        if not isinstance(attn_mask, Tensor) or attn_mask.dtype != torch.bool:
            require_bias(op, "attn_mask", attn_mask, query, "query")
        require_broadcastable(op, "attn_mask", attn_mask, query, full, "query")
        if attn_mask.dtype == torch.bool:
            dense = BoolMask(_mask_of_batch(attn_mask, full))
            mask = dense if mask is None else mask & dense
        else:
            bias = _mask_of_batch(attn_mask, full)
    q, k, v = (_of_batch(t if t.dim() > 2 else t[None], batch) for t in (query, key, value))
    if q.shape[1] != heads:
        q = q.expand(-1, heads, -1, -1)
    if k.shape[1] != v.shape[1]:
        k, v = (t.repeat_interleave(heads // max(t.shape[1], 1), 1) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    options = Options(mask=mask, bias=bias, scale=scale, dropout_p=dropout_p)
    out, _ = run(op, q, k, v, full_shape(q, k), options, False, backend)
    return out.transpose(1, 2).reshape(*lead, query.shape[-2], value.shape[-1])


def _of_jagged(
    op: str, query: Any, key: Any, value: Any, enable_gqa: bool, options: dict[str, Any]
) -> Tensor:
    """Computes attention of jagged nested query, key and value (B, H, j, D)."""
    for name, t in (("query", query), ("key", key), ("value", value)):
        jagged = t.is_nested and t.layout == torch.jagged
        if not jagged or t.dim() != 4 or t._ragged_idx != 2:
            got = f"layout={t.layout}" if t.is_nested and not jagged else f"shape={t.shape}"
            raise ValueError(
                f"{op}: {name} must be a jagged nested tensor (B, H, j, D) where query is nested, "
                f"got {name}.{got}"
            )
    if not enable_gqa and not query.shape[1] == key.shape[1] == value.shape[1]:
        raise ValueError(
            f"{op}: the heads must be equal where enable_gqa=False, got query.shape={query.shape}, "
            f"key.shape={key.shape}, value.shape={value.shape}"
        )
    out: Tensor = attention(*(t.transpose(1, 2) for t in (query, key, value)), **options)
    return out.transpose(1, 2)


def _leading_shape(
    op: str, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[int, ...]:
    """Checks the shapes; returns (..., H) of the result, or () if all three are (T, D)."""
    least = 3 if enable_gqa else 2
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.dim() < least:
            raise ValueError(
                f"{op}: {name} must have at least {least} dimensions with "
                f"enable_gqa={enable_gqa}, got {name}.shape={tuple(t.shape)}"
            )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"{op}: query and key must have the same D, "
            f"got query.shape={tuple(query.shape)}, key.shape={tuple(key.shape)}"
        )
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"{op}: key and value must have the same Tk, "
            f"got key.shape={tuple(key.shape)}, value.shape={tuple(value.shape)}"
        )
    shapes: list[tuple[int, ...]] = [t.shape[:-2] for t in (query, key, value)]
    if enable_gqa:
        heads = query.shape[-3]
        for name, t in (("key", key), ("value", value)):
            if t.shape[-3] != heads and (t.shape[-3] == 0 or heads % t.shape[-3] != 0):
                raise ValueError(
                    f"{op}: the heads of query must be a multiple of those of {name}, "
                    f"got query.shape={tuple(query.shape)}, {name}.shape={tuple(t.shape)}"
                )
        shapes = [(*shape[:-1], heads) for shape in shapes]
    if shapes[0] == shapes[1] == shapes[2]:
        return tuple(shapes[0])
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        raise ValueError(
            f"{op}: the leading dimensions of query, key and value must be broadcastable (heads "
            f"may be grouped with enable_gqa), got query.shape={tuple(query.shape)}, "
            f"key.shape={tuple(key.shape)}, value.shape={tuple(value.shape)}"
        ) from None


def _mask_of_batch(mask: Tensor, full: tuple[int, ...]) -> Tensor:
    """Reshapes a mask broadcastable to (..., H, Tq, Tk) to broadcast to (prod(...), H, Tq, Tk)."""
    mask = mask[(None,) * (len(full) - mask.dim())]
    return mask if len(full) == 4 else _of_batch(mask, full[:-3])


def _of_batch(t: Tensor, batch: Sequence[int]) -> Tensor:
    """Reshapes t, broadcastable to (*batch, H, T, D), to (prod(batch), H, T, D)."""
    if t.shape[:-3] != tuple(batch):
        t = t.expand(*batch, *t.shape[-3:])
    return t if t.dim() == 4 else t.reshape(math.prod(batch), *t.shape[-3:])
