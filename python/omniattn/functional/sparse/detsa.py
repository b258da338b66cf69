"""Deterministic sparse attention: a window, representatives of earlier keys, global tokens."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn import reference
from omniattn.checks.arguments import require_bool, require_choice, use_reference
from omniattn.encoding.masks import Sizes
from omniattn.encoding.options import FormOptions, pack, spelled_out
from omniattn.functional.attention._common import autocast, check_shapes
from omniattn.functional.attention.attention import attention
from omniattn.functional.attention.lse import merge_attention
from omniattn.functional.masks import (
    Causal,
    GlobalTokens,
    Mask,
    SlidingWindow,
    deterministic_sparse,
)
from omniattn.functional.masks.tokens import (
    OfPositions,
    index_tuple,
    require_global_tokens,
    require_representatives,
)
from omniattn.functional.sparse._common import score_options
from omniattn.reference.precision import widen

__all__ = ["detsa_attention"]

Levels = tuple[tuple[int, int], ...]


@spelled_out(FormOptions, last=("backend",))
def detsa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    stride: int,
    global_index: tuple[int, ...] = (0,),
    anchor: str = "relative",
    representative: str = "token",
    count_bias: bool = False,
    levels: Levels | None = None,
    backend: str | None = None,
    **options: Unpack[FormOptions],
) -> Tensor:
    """Causal attention to a window, to one key of each `stride` before it, and to global tokens.

    ``O_i = sum_j softmax_j(scale q_i . k_j) v_j`` over ``i - window <= j <= i``, representatives of
    the keys before them, and the global keys j <= i. Before the window the keys form groups of
    `stride`, counted from the window back or, if "absolute", from the first key on; only complete
    absolute groups count. A group's representative is its first token (absolute: its last), or the
    means of its keys and of its values; an earliest relative group of fewer keys has their means.

    Args:
        q: (B, Tq, Hq, D), float64, float32, bfloat16 or float16.
        k: (B, Tk, Hkv, D), Hkv a divisor of Hq. Query q is at position q + Tk - Tq of the keys.
        v: (B, Tk, Hkv, Dv).
        window: number of keys before the query that are seen individually.
        stride: keys per group.
        global_index: keys that are seen individually at any distance.
        anchor: "relative" or "absolute"; absolute groups are the same for all queries.
        representative: "token" or "mean".
        count_bias: the logit of a mean gets + ln of the number of its keys.
        levels: ((n1, s1), (n2, s2), ...) in place of stride, for the relative anchor: n1 groups of
            s1 keys, before them n2 of s2, and nothing before these.
        scale: None is 1 / sqrt(D).
        softcap, dropout_p, seed: see :func:`attention`; means are dropped by their numbers, with
            the next offset of the seed.
        backend: see :func:`attention`.

    Returns:
        O (B, Tq, Hq, Dv) of q's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`attention`; options that do not go
            together.

    Note:
        "token" is a mask, `masks.deterministic_sparse`; "mean" also attends to the means, rounded
        to the dtype of k and v, and merges by lse. Deterministic; gradients to q, k and v. As in
        `attention`, NaN in a query reaches gradients of keys that it does not see.

    Reference:
        No paper; the strided pattern of Child et al., 2019, arXiv:1904.10509, anchored to the
        query, with pooled groups as in Liu et al., 2018, arXiv:1801.10198.

    Example:
        >>> q = torch.ones(1, 9, 2, 4)
        >>> detsa_attention(q, q, q, window=2, stride=3, representative="mean").shape
        torch.Size([1, 9, 2, 4])
    """
    op = "detsa_attention"
    record = pack(op, options, FormOptions)
    q, k, v = autocast(op, q, k, v)
    check_shapes(op, q, k, v)
    require_choice(op, "representative", representative, ("token", "mean"))
    require_bool(op, "count_bias", count_bias)
    if count_bias and representative == "token":
        raise ValueError(
            f'{op}: count_bias needs representative="mean", got representative="token"'
        )
    require_representatives(op, window, stride, anchor, levels)
    global_index = index_tuple(op, "global_index", global_index)
    if global_index:
        require_global_tokens(op, global_index, None, ("global_index", "global_every"))
    how = score_options(op, q, k, record)
    if use_reference(op, backend, q):
        return reference.detsa_attention(
            *(q, k, v),
            window=window,
            stride=stride,
            global_index=global_index,
            anchor=anchor,
            representative=representative,
            count_bias=count_bias,
            levels=levels,
            **how,
        )
    how["backend"] = backend
    if representative == "token":
        mask = deterministic_sparse(window, stride, global_index, anchor=anchor, levels=levels)
        out: Tensor = attention(q, k, v, mask=mask, **how)
        return out
    near: tuple[Tensor, Tensor] = attention(
        q, k, v, mask=_single_keys(window, global_index), return_lse=True, **how
    )
    length = k.shape[1]
    if anchor == "absolute":
        groups = _Groups(length, window, ((stride, None),), aligned=True)
    else:
        sizes = ((stride, None),) if levels is None else tuple((s, n) for n, s in levels)
        groups = _Groups(length, window, sizes)
    counts = groups.counts()
    if not counts:
        return near[0]
    keys, values = groups.means(k), groups.means(v)
    bias = None
    if count_bias:
        bias = torch.tensor(counts, device=q.device).to(widen(q).dtype).log()[None, None, None]
    if how["seed"] is not None:  # distinct dropout bits for means and keys
        how["seed"] = how["seed"] + how["seed"].new_tensor([0, 1])
    far = attention(q, keys, values, mask=_kept(groups), bias=bias, return_lse=True, **how)
    return merge_attention(*zip(near, far, strict=True))[0]


@functools.lru_cache(maxsize=64)
def _single_keys(window: int, global_index: tuple[int, ...]) -> Mask:
    mask: Mask = SlidingWindow(window, 0)
    if global_index:
        mask = (SlidingWindow(window, -1) | GlobalTokens(global_index, queries=False)) & Causal()
    return mask


@functools.lru_cache(maxsize=64)
def _kept(groups: _Groups) -> _Groups:
    """Returns an equal mask from the cache, whose blocks may be computed already."""
    return groups


@dataclass(frozen=True)
class _Groups(OfPositions):
    """Mask of the group means that a query sees.

    Column j of a size s is the mean of the keys j .. j + s - 1, or aligned, of s j .. s j + s - 1.
    After the columns of all sizes, column r is the mean of the first r + 1 keys, for groups that
    begin before the first key.

    Args:
        keys: Tk.
        window: keys before the query that are in no group.
        sizes: (size, number of groups or None for all), from the window back.
        aligned: groups are counted from the first key on.
    """

    keys: int
    window: int
    sizes: tuple[tuple[int, int | None], ...]
    aligned: bool = False

    def widths(self) -> list[int]:
        return sorted({size for size, _ in self.sizes if size <= self.keys})

    def cut(self) -> int:
        """Returns the number of means of the first keys."""
        return 0 if self.aligned else min(max(size for size, _ in self.sizes) - 1, self.keys)

    def columns(self, size: int) -> int:
        return self.keys // size if self.aligned else self.keys - size + 1

    def counts(self) -> list[int]:
        """Returns the number of keys in each mean."""
        whole = [size for size in self.widths() for _ in range(self.columns(size))]
        return whole + list(range(1, self.cut() + 1))

    def means(self, x: Tensor) -> Tensor:
        """Returns the means (B, columns, H, D) of x (B, Tk, H, D), in its dtype."""
        wide, step = widen(x), 1
        parts = []
        for size in self.widths():
            step = size if self.aligned else 1
            parts.append(wide.unfold(1, size, step).mean(-1))
        if self.cut():
            number = torch.arange(1, self.cut() + 1, device=x.device).to(wide.dtype)
            parts.append(wide[:, : self.cut()].cumsum(1) / number[:, None, None])
        return torch.cat(parts, 1).to(x.dtype)

    def pairs(self, sizes: Sizes, queries: tuple[int, int] | None = None) -> Tensor:
        before = replace(sizes, tk=self.keys).positions(queries) - self.window
        parts = [self._whole(before, size) for size in self.widths()]
        if self.cut():
            parts.append(self._cut(before))
        return torch.cat(parts, 1)

    def _whole(self, before: Tensor, size: int) -> Tensor:
        """Returns the visible columns of a size; `before` (rows, 1) keys precede the window."""
        j = torch.arange(self.columns(size), device=before.device)
        if self.aligned:
            return size * (j + 1) <= before
        seen = torch.zeros(before.shape[0], j.shape[0], dtype=torch.bool, device=before.device)
        start = 0
        for width, count in self.sizes:
            back = before - j - start
            if width == size:
                here = (back > 0) & (back % size == 0)
                seen = seen | (here if count is None else here & (back <= size * count))
            start += width * (count or 0)
        return seen

    def _cut(self, before: Tensor) -> Tensor:
        count = torch.arange(1, self.cut() + 1, device=before.device)
        left = torch.zeros_like(before)
        start = 0
        for size, number in self.sizes:
            rest = before - start
            inside = (rest > 0) & (rest % size > 0)
            if number is not None:
                inside = inside & (rest < size * number)
            left = torch.where(inside, rest % size, left)
            start += size * (number or 0)
        return count == left
