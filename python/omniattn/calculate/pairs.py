"""Numbers of visible pairs of masks, and how far back masks reach."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from omniattn.checks.arguments import require_int, shown
from omniattn.encoding.masks import ANY_FAR, PARTS, MaskKind, Rule, Sizes, chunk_range, visible
from omniattn.functional.masks import Mask

#: Rows of a mask that are compared with all keys at once.
_ROWS = 256
#: Most pairs that a pattern without a closed form is asked about.
_MOST = 2**33


@dataclass(frozen=True)
class Pairs:
    """Visible pairs of one attention call.

    Args:
        count: pairs, summed over the batch and the query heads.
        reach: largest distance i - k of a visible pair, at least 0.
    """

    count: int
    reach: int


def pairs(mask: Mask, queries: int, keys: int | None = None, *, heads: int = 1) -> int:
    """Returns the exact number of pairs that a mask leaves, ``sum_i |N(i)|``.

    Windows, chunks, prefixes and their intersections are summed in O(queries); other patterns are
    enumerated, in O(queries * keys) time.

    Args:
        mask: a mask of `omniattn.functional.masks`.
        queries: number of queries.
        keys: number of keys, default `queries`. The last query is aligned with the last key.
        heads: number of query heads, whose pairs are summed.

    Example:
        >>> from omniattn.functional import masks
        >>> pairs(masks.Causal(), 1024) == 1024 * 1025 // 2
        True
        >>> pairs(masks.SlidingWindow(4095, 0), 100_000)
        401213440
    """
    keys = queries if keys is None else keys
    for name, value in (("queries", queries), ("keys", keys), ("heads", heads)):
        require_int("pairs", name, value, 0)
    if not isinstance(mask, Mask):
        raise TypeError(
            f"pairs: mask must be a mask of omniattn.functional.masks, got mask={shown(mask)}"
        )
    try:
        rules = mask.rules()
    except NotImplementedError:  # computed from positions, such as unions of masks
        return mask.count(queries, keys, heads=heads)
    return pairs_of_rules(rules, queries, keys, heads=heads).count


def keys_of(mask: Mask, query: int) -> Tensor:
    """Returns the positions of the keys that a query sees in a sequence that it ends.

    Example:
        >>> from omniattn.functional import masks
        >>> keys_of(masks.SlidingWindow(4, 0), 10)
        tensor([ 6,  7,  8,  9, 10])
    """
    require_int("keys_of", "query", query, 0)
    sizes = Sizes(query + 1, query + 1, torch.device("cpu"))
    seen = mask.pairs(sizes, (query, query + 1))
    return seen.reshape(-1, query + 1)[0].nonzero().flatten()


def pairs_of_rules(
    rules: Sequence[Rule], tq: int, tk: int, *, batch: int = 1, heads: int = 1
) -> Pairs:
    """Counts the pairs (batch, heads, tq, tk) that all rules allow."""
    if not tq or not tk:
        return Pairs(0, 0)
    offset = tk - tq
    bounds = _intervals(rules, tq, tk)
    if bounds is not None:
        first, last = bounds
        count = (last - first + 1).clamp(min=0)
        position = torch.arange(tq) + offset
        back = torch.where(count > 0, position - first, 0)
        copies = batch * heads // (count.numel() // tq)
        return Pairs(int(count.sum()) * copies, max(0, int(back.max())))
    if tq * tk > _MOST:
        raise ValueError(
            f"pairs: this pattern is enumerated and needs at most {_MOST} pairs, "
            f"got queries={tq}, keys={tk}"
        )
    total, reach = 0, 0
    for seen, distance in _stripes(rules, tq, tk, heads):
        copies = batch * heads // math.prod(seen.shape[:-2])
        total += int(seen.sum()) * copies
        any_head = seen.reshape(-1, *seen.shape[-2:]).any(0)
        reach = max(reach, int(torch.where(any_head, distance, 0).max()))
    return Pairs(total, reach)


def _stripes(
    rules: Sequence[Rule], tq: int, tk: int, heads: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (visible, i - k) of rows, both of shape (..., rows, tk)."""
    spans = {kind: (a, b) for kind, a, b, _ in rules if kind in PARTS}
    first_q, all_q = spans.get(MaskKind.QUERIES, (0, tq))
    first_k, all_k = spans.get(MaskKind.KEYS, (0, tk))
    rules = [rule for rule in rules if rule[0] not in PARTS]
    sizes = Sizes(all_q, all_k, torch.device("cpu"), heads)
    keys = torch.arange(first_k, first_k + tk)
    for first in range(first_q, first_q + tq, _ROWS):
        rows = (first, min(first + _ROWS, first_q + tq))
        seen = visible(rules, sizes, rows)
        if seen.shape[-2] == 1 or seen.shape[-1] == 1:
            seen = seen.expand(*seen.shape[:-2], rows[1] - rows[0], all_k)
        position = torch.arange(*rows)[:, None] + all_k - all_q
        yield seen[..., first_k : first_k + tk], position - keys


def _intervals(rules: Sequence[Rule], tq: int, tk: int) -> tuple[Tensor, Tensor] | None:
    """Returns the first and last visible key of each query, or None if keys have gaps."""
    q = torch.arange(tq)
    i = q + tk - tq
    first, last = torch.zeros_like(q), torch.full_like(q, tk - 1)
    for kind, a, b, side in rules:
        if kind in (MaskKind.WINDOW, MaskKind.WINDOW_TOP_LEFT):
            at = i if kind == MaskKind.WINDOW else q
            first = first if a < 0 else first.maximum(at - a)
            last = last if b < 0 else last.minimum(at + b)
        elif kind == MaskKind.CHUNK:
            near, far = chunk_range(b)
            first = first if far == ANY_FAR else first.maximum((i // a - far) * a)
            last = last.minimum((i // a - near + 1) * a - 1)
        elif kind == MaskKind.POOLED:
            last = last.minimum((q - b).div(a, rounding_mode="floor"))
        elif kind == MaskKind.KEY_LENGTHS:
            last = last.minimum(side[0][:, None] - 1)
        elif kind == MaskKind.PREFIX:
            last = last.minimum(i.maximum(side[0][:, None] - 1))
        else:
            return None
    return first.expand_as(last), last
