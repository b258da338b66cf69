"""The loss of the lightning indexer, for some queries at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.utils.checkpoint import checkpoint

from omniattn.functional._checks import widen
from omniattn.functional.attention import attention
from omniattn.functional.attention_lse import attention_weights
from omniattn.functional.masks import KeyPadding
from omniattn.functional.selected_attention import selected_attention
from omniattn.reference.attention import default_scale
from omniattn.reference.indexer import (
    divergence,
    indexer_scores,
    normalised,
    sum_of_heads,
    visible_keys,
)

__all__ = ["loss_by_queries"]

#: Products of queries and keys that are in memory at a time: 16 MiB, which malloc keeps when freed.
_PRODUCTS = 1 << 22
#: The fewest queries of a part with all keys: each part packs the keys again.
_LEAST = 8

#: Scores, target and which keys are seen, of queries first .. last - 1.
Rows = tuple[Tensor, Tensor, Tensor]
RowsOf = Callable[[int, int, Tensor, Tensor, Tensor | None], Rows]


def loss_by_queries(
    q_idx: Tensor,
    k_idx: Tensor,
    w: Tensor | None,
    q: Tensor,
    k: Tensor,
    lse: Tensor | None,
    indices: Tensor | None,
    *,
    scale: float | None,
    causal: bool,
    activation: Literal["relu"] | None,
    key_padding: Tensor | None,
    backend: str | None,
) -> Tensor:
    """The definition in O(T) memory: parts are computed again in the backward."""
    tq, tk = q_idx.shape[1], k_idx.shape[1]
    per_row = len(q_idx) * q_idx.shape[2] * (tk if indices is None else indices.shape[2])
    if indices is None:
        target = _Attention(q, k, lse, scale, causal, key_padding, backend)
        rows_of: RowsOf = functools.partial(_all_keys, target, causal, activation)
        size = max(_LEAST, _PRODUCTS // max(per_row, 1))
    else:
        lists = _real_keys(indices, tq, tk, causal, key_padding)
        chosen = _Selected(q, k, lse, lists, scale, backend)
        rows_of = functools.partial(_listed_keys, chosen, activation)
        # Beside the products of each index head, the keys of each query are copied.
        copied = lists.shape[0] * lists.shape[2] * (k.shape[2] * k.shape[3] + q.shape[2])
        size = max(1, _PRODUCTS // max(per_row + copied, 1))

    def part(first: int, last: int, q_idx: Tensor, k_idx: Tensor, w: Tensor | None) -> Tensor:
        scores, found, seen = rows_of(first, last, q_idx, k_idx, w)
        return divergence(found.to(scores.dtype), scores, seen)

    inputs = (widen(q_idx), widen(k_idx), None if w is None else widen(w))
    if size >= tq:
        return part(0, tq, *inputs)
    again = torch.is_grad_enabled() and peek_interpreter_stack() is None  # see _by_queries.py
    losses = []
    for first in range(0, tq, size):
        rows = functools.partial(part, first, min(first + size, tq))
        if again:
            loss = checkpoint(rows, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            loss = rows(*inputs)
        losses.append(loss)
    return torch.cat(losses, 1)


class _Attention:
    """The target over all keys, without gradient."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        lse: Tensor | None,
        scale: float | None,
        causal: bool,
        key_padding: Tensor | None,
        backend: str | None,
    ) -> None:
        # In full precision: rounded weights differ from the lse.
        self.q, self.k = widen(q.detach()), widen(k.detach())
        self.scale, self.causal, self.backend = scale, causal, backend
        self.real = key_padding
        if lse is None:
            mask = None if key_padding is None else KeyPadding(key_padding)
            _, lse = attention(
                *(self.q, self.k, self.k[..., :1]),
                causal=causal,
                mask=mask,
                scale=scale,
                return_lse=True,
                backend=backend,
            )
        self.lse = lse.detach().to(self.q.dtype)

    def weights(self, first: int, last: int, keys: int) -> Tensor:
        """p (B, last - first, keys), the first `keys` keys, for some heads at a time."""
        batch, _, heads, _ = self.q.shape
        kv_heads = self.k.shape[2]
        group = heads // max(kv_heads, 1)
        per_head = max(batch * (last - first) * keys * group, 1)
        step = max(1, _PRODUCTS // per_head)
        mask = None if self.real is None else KeyPadding(self.real[:, :keys])
        total = self.q.new_zeros(batch, last - first, keys)
        for kv in range(0, kv_heads, step):
            own = slice(kv * group, (kv + step) * group)
            p = attention_weights(
                self.q[:, first:last, own],
                self.k[:, :keys, kv : kv + step],
                self.lse[:, own, first:last],
                causal=self.causal,
                mask=mask,
                scale=self.scale,
                backend=self.backend,
            )
            total = total + p.sum(1)
        return normalised(total)


def _all_keys(
    target: _Attention,
    causal: bool,
    activation: Literal["relu"] | None,
    first: int,
    last: int,
    q_idx: Tensor,
    k_idx: Tensor,
    w: Tensor | None,
) -> Rows:
    tq, tk = q_idx.shape[1], k_idx.shape[1]
    keys = max(0, min(last + tk - tq, tk)) if causal else tk
    rows, columns = q_idx[:, first:last], k_idx[:, :keys]
    scores = indexer_scores(rows, columns, None if w is None else w[:, first:last], activation)
    real = None if target.real is None else target.real[:, :keys]
    seen = visible_keys(rows, columns, causal, real)
    return scores, target.weights(first, last, keys), seen


def _real_keys(
    indices: Tensor, tq: int, tk: int, causal: bool, key_padding: Tensor | None
) -> Tensor:
    """The lists (B, Tq, n) int64, -1 also for keys that their query does not see."""
    lists = indices.long()
    seen = (lists >= 0) & (lists < tk)
    if causal:
        seen = seen & (lists <= torch.arange(tk - tq, tk, device=lists.device)[:, None])
    lists = lists.masked_fill(~seen, -1)
    if key_padding is None or tk == 0:
        return lists
    real = key_padding.gather(1, lists.clamp(min=0).flatten(1)).view(lists.shape)
    return lists.masked_fill(~real, -1)


def _keys_of(k: Tensor, lists: Tensor) -> Tensor:
    """Rows of k (B, Tk, D) at lists (B, Tq, n), any row for -1: (B, Tq, n, D)."""
    if k.shape[1] == 0:
        return k.new_zeros(*lists.shape, k.shape[2])
    first = torch.arange(0, k.shape[0] * k.shape[1], k.shape[1], device=k.device)
    rows = lists.clamp(min=0) + first[:, None, None]
    return k.flatten(0, 1).index_select(0, rows.flatten()).view(*lists.shape, k.shape[2])


class _Selected:
    """The target over the keys of lists, without gradient."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        lse: Tensor | None,
        lists: Tensor,
        scale: float | None,
        backend: str | None,
    ) -> None:
        self.q, self.k, self.lists = widen(q.detach()), widen(k.detach()), lists
        self.scale = default_scale(q.shape[3]) if scale is None else scale
        if lse is None:
            _, lse = selected_attention(
                *(self.q, self.k, self.k[..., :1], lists[:, None]),
                block_size=1,
                scale=self.scale,
                return_lse=True,
                backend=backend,
            )
        self.lse = lse.detach().to(self.q.dtype)

    def weights(self, first: int, last: int) -> Tensor:
        """p (B, last - first, n)."""
        lists, kv_heads, dim = self.lists[:, first:last], self.k.shape[2], self.k.shape[3]
        keys = _keys_of(self.k.flatten(2), lists).unflatten(3, (kv_heads, dim))
        rows = self.q[:, first:last].unflatten(2, (kv_heads, -1))  # (B, rows, Hkv, group, D)
        logits = (rows @ keys.permute(0, 1, 3, 4, 2)).flatten(2, 3) * self.scale
        lse = self.lse[:, :, first:last].transpose(1, 2)[..., None]
        # A query without keys has lse = -inf.
        p = (logits - lse.masked_fill(lse == -torch.inf, 0)).exp()
        return normalised(p.masked_fill((lists < 0)[:, :, None], 0).sum(2))


def _listed_keys(
    chosen: _Selected,
    activation: Literal["relu"] | None,
    first: int,
    last: int,
    q_idx: Tensor,
    k_idx: Tensor,
    w: Tensor | None,
) -> Rows:
    lists = chosen.lists[:, first:last]
    products = q_idx[:, first:last] @ _keys_of(k_idx, lists).transpose(2, 3)
    scores = sum_of_heads(products, None if w is None else w[:, first:last], activation)
    return scores, chosen.weights(first, last), lists >= 0
