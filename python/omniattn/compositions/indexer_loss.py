"""dsa_indexer_loss where no library has a kernel: products of torch, of some queries at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from omniattn.ops import _library
from omniattn.reference.indexer import divergence, normalised, sum_of_heads
from omniattn.reference.precision import widen

__all__ = ["dsa_indexer_loss", "dsa_indexer_loss_backward"]

#: Products of queries and keys that are in memory at a time: 16 MiB in fp32.
PRODUCTS = 1 << 22


class _Part(NamedTuple):
    """A part of the queries (B, t, ., .) and the keys that they may see: all (B, s, .), or the keys
    of their lists (B, t, s, .)."""

    queries: slice
    q_idx: Tensor
    keys_idx: Tensor
    w: Tensor | None
    lists: Tensor | None
    seen: Tensor  #: (B | 1, t, s)
    products: Tensor  #: of the indexer (B, t, H, s), 0 where a key is not seen


class _Call:
    """The arguments of both passes."""

    def __init__(
        self,
        q_idx: Tensor,
        k_idx: Tensor,
        w: Tensor | None,
        q: Tensor,
        k: Tensor,
        lse: Tensor,
        indices: Tensor | None,
        key_padding: Tensor | None,
        scale: float,
        causal: bool,
        relu: bool,
    ) -> None:
        self.q_idx, self.k_idx, self.w = widen(q_idx), widen(k_idx), w
        self.q, self.k = widen(q), widen(k)
        self.lse = lse.masked_fill(lse == -torch.inf, 0).transpose(1, 2)  # of heads without keys
        self.indices, self.real, self.scale, self.causal = indices, key_padding, scale, causal
        self.activation: Any = "relu" if relu else None
        self.keys = "bsd" if indices is None else "btsd"

    def parts(self) -> Iterator[_Part]:
        (batch, tq, heads, dim), tk = self.q_idx.shape, self.k_idx.shape[1]
        (hkv, width), hq = self.k.shape[2:], self.q.shape[2]
        per_row = max(heads, hq) * tk
        if self.indices is not None:
            per_row = (max(heads, hq) + hkv * width + dim) * self.indices.shape[2]
        step = max(1, PRODUCTS // max(1, batch * per_row))
        for first in range(0, tq, step):
            yield self._part(slice(first, min(first + step, tq)))

    def _part(self, queries: slice) -> _Part:
        tq, tk = self.q_idx.shape[1], self.k_idx.shape[1]
        key = torch.arange(tk, device=self.k.device)[None, None]
        if self.indices is not None:
            key = self.indices[:, queries].long()
        seen = (key >= 0) & (key < tk)
        if self.causal:
            seen = seen & (key <= torch.arange(tk - tq, tk, device=key.device)[queries, None])
        key = key.masked_fill(~seen, 0)
        if self.real is not None and tk > 0:
            real = self.real[:, None].expand(-1, key.shape[1], -1)
            seen = seen & real.gather(2, key.expand(len(real), -1, -1))
        rows, w = self.q_idx[:, queries], None if self.w is None else self.w[:, queries]
        lists = None if self.indices is None else key
        keys = self._keys(self.k_idx, lists)
        products = torch.einsum(f"bthd,{self.keys}->bths", rows, keys)
        return _Part(
            queries, rows, keys, w, lists, seen, products.masked_fill(~seen[:, :, None], 0)
        )

    def _keys(self, k: Tensor, lists: Tensor | None) -> Tensor:
        """k (B, Tk, ...), or its rows at lists (B, t, n)."""
        if lists is None:
            return k
        if k.shape[1] == 0:
            return k.new_zeros(*lists.shape, *k.shape[2:])
        return k.flatten(0, 1)[lists + _firsts(k)]

    def scores(self, part: _Part) -> Tensor:
        return sum_of_heads(part.products, part.w, self.activation)

    def target(self, part: _Part) -> Tensor:
        """p (B, t, s)."""
        keys = self._keys(self.k, part.lists)
        rows = self.q[:, part.queries].unflatten(2, (max(keys.shape[-2], 1), -1))
        wide = self.keys.replace("d", "hd")
        logits = torch.einsum(f"bthgd,{wide}->bthgs", rows, keys).flatten(2, 3) * self.scale
        weights = (logits - self.lse[:, part.queries, :, None]).exp().sum(2)
        return normalised(weights.masked_fill(~part.seen, 0))


def _firsts(k: Tensor) -> Tensor:
    """The first row of each batch entry (B, 1, 1)."""
    return torch.arange(0, k.shape[0] * k.shape[1], k.shape[1], device=k.device)[:, None, None]


def dsa_indexer_loss(q_idx: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    call = _Call(q_idx, *arguments)
    batch, tq = q_idx.shape[:2]
    loss = call.q_idx.new_empty(batch, tq)
    count = 0 if call.indices is None else call.indices.shape[2]
    kept = call.q_idx.new_ones(batch, tq, 2 + count)
    for part in call.parts():
        scores, target = call.scores(part), call.target(part)
        loss[:, part.queries] = divergence(target, scores, part.seen)
        log_sum = scores.masked_fill(~part.seen, -torch.inf).logsumexp(-1)
        nothing = target.sum(-1) == 0
        kept[:, part.queries, 0] = log_sum.masked_fill(nothing, torch.inf)
        if count > 0:
            kept[:, part.queries, 2:] = target
    return loss, kept


def dsa_indexer_loss_only(*arguments: Any) -> Tensor:
    return dsa_indexer_loss(*arguments)[0]


def dsa_indexer_loss_backward(
    grad_loss: Tensor,
    q_idx: Tensor,
    k_idx: Tensor,
    w: Tensor | None,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    indices: Tensor | None,
    key_padding: Tensor | None,
    kept: Tensor,
    scale: float,
    causal: bool,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    call = _Call(q_idx, k_idx, w, q, k, lse, indices, key_padding, scale, causal, relu)
    dq, dk = torch.empty_like(call.q_idx), torch.zeros_like(call.k_idx)
    dw = q_idx.new_empty(0) if w is None else torch.empty_like(w)
    for part in call.parts():
        rows, x = part.queries, part.products
        target = call.target(part) if indices is None else kept[:, rows, 2:]
        softmax = (call.scores(part) - kept[:, rows, :1]).exp()
        g = (grad_loss[:, rows, None] * (softmax - target)).masked_fill(~part.seen, 0)
        dx = g[:, :, None] if part.w is None else g[:, :, None] * part.w[..., None]
        dx = dx * (x > 0) if relu else dx.expand_as(x)
        if part.w is not None:
            dw[:, rows] = (g[:, :, None] * (x.relu() if relu else x)).sum(-1)
        dq[:, rows] = torch.einsum(f"bths,{call.keys}->bthd", dx, part.keys_idx)
        found = torch.einsum(f"bths,bthd->{call.keys}", dx, part.q_idx)
        if part.lists is None:
            dk += found
        elif dk.shape[1] > 0:
            places = (part.lists + _firsts(dk)).flatten()
            dk.view(-1, dk.shape[2]).index_add_(0, places, found.flatten(0, 2))
    return dq.to(q_idx.dtype), dk.to(k_idx.dtype), dw


for _suffix in ("", "_raw"):
    _library.compose(f"dsa_indexer_loss{_suffix}", dsa_indexer_loss)
_library.compose("dsa_indexer_loss_only", dsa_indexer_loss_only)
_library.compose("dsa_indexer_loss_backward", dsa_indexer_loss_backward)
