"""Helpers of composed attention: checks of token sets, gather and scatter of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    autocast_dtype,
    is_traced,
    require_device,
    require_integers,
    require_like,
    require_seed,
    require_shape,
    shown,
)
from omniattn.encoding.options import Options
from omniattn.functional.attention._common import autocast, check_shapes, full_shape
from omniattn.functional.attention._options import checked_codes
from omniattn.functional.masks.base import require_bool_mask


def score_options(
    op: str, q: Tensor, k: Tensor, options: Options, seed_name: str = "seed"
) -> dict[str, Any]:
    """Returns checked options of :func:`attention` for each part of a composition.

    The seed is drawn once: dropout is a function of the positions, so that all parts drop the same
    pairs as the whole.
    """
    checked_codes(op, q, full_shape(q, k), options)
    seed = require_seed(op, options.seed, q, seed_name) if options.dropout_p > 0 else None
    return {
        "scale": options.scale,
        "softcap": options.softcap,
        "dropout_p": options.dropout_p,
        "seed": seed,
    }


def self_attention_inputs(
    op: str, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Checks q, k and v of equal length; returns them in one dtype."""
    q, k, v = autocast(op, q, k, v)
    check_shapes(op, q, k, v)
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"{op}: q and k must have the same T, got q.shape={tuple(q.shape)}, "
            f"k.shape={tuple(k.shape)}"
        )
    return q, k, v


def second_set(
    op: str,
    first: tuple[Tensor, Tensor, Tensor],
    second: tuple[Tensor | None, Tensor | None, Tensor | None],
    names: Sequence[str],
) -> tuple[Tensor, Tensor, Tensor]:
    """Checks the second projections, all or none; defaults to the first ones."""
    given = [t is not None for t in second]
    if not any(given):
        return first
    if not all(given):
        raise ValueError(f"{op}: {', '.join(names)} must be given together, got {given}")
    found = []
    for name, t, like in zip(names, second, first, strict=True):
        assert t is not None
        if autocast_dtype(like) is not None and t.is_floating_point():
            t = t.to(like.dtype)
        require_like(op, name, t, like, "q")
        require_shape(op, name, t, tuple(like.shape))
        found.append(t)
    return found[0], found[1], found[2]


def require_real(op: str, real: Tensor, q: Tensor) -> None:
    """Requires a bool `key_padding` (B, T) on q's device."""
    require_bool_mask(op, "key_padding", real)
    require_device(op, "key_padding", real, q, "q")
    require_shape(op, "key_padding", real, tuple(q.shape[:2]))


def token_sets(op: str, name: str, index: Tensor, q: Tensor) -> Tensor:
    """Checks `index` (B, G): distinct positions in [0, T) or -1; returns it as int64."""
    require_integers(op, name, index)
    require_device(op, name, index, q, "q")
    if index.dim() != 2 or index.shape[0] != q.shape[0]:
        raise ValueError(
            f"{op}: {name} must have shape (B, G) with B={q.shape[0]}, "
            f"got {name}.shape={tuple(index.shape)}"
        )
    index = index.long()
    if not index.is_cpu or index.numel() == 0 or is_traced():
        return index
    low, high = (int(t) for t in index.aminmax())
    if low < -1 or high >= q.shape[1]:
        raise ValueError(
            f"{op}: {name} must be in [0, {q.shape[1]}), or -1 for none, "
            f"got {name} from {low} to {high}"
        )
    ordered = index.sort(-1).values
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()):
        raise ValueError(f"{op}: {name} must name no token of a row twice, got {shown(index)}")
    return index


def tokens_at(x: Tensor, index: Tensor) -> Tensor:
    """Gathers the tokens (B, G, H, D) of x (B, T, H, D) at index (B, G) >= 0."""
    return x.gather(1, index[..., None, None].expand(-1, -1, *x.shape[2:]))


def with_tokens(x: Tensor, index: Tensor, tokens: Tensor) -> Tensor:
    """Returns x (B, T, H, D) with `tokens` (B, G, H, D) at index (B, G); ignores -1."""
    length = x.shape[1]
    target = torch.where(index >= 0, index, length)[..., None, None].expand(tokens.shape)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1))
    return padded.scatter(1, target, tokens)[:, :length]
