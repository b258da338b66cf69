"""Parallax, and its composition by blocks of queries for devices without a kernel.

    P = softmax(scale q k^T);  s = r k^T;  m_i = sum_j P_ij s_ij
    W = P (1 + m - s), 0 where hidden;  O = W v

The backward makes P and s of a block again. With dW = dO v^T and e_i = sum_j P_ij dW_ij

    ds = P (e - dW);  dP = (dW - e) (1 + m - s) + e (1 + m)

whose last term the softmax's derivative drops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from omniattn.compositions._python_ops import implement
from omniattn.compositions._rows import heads_first, of_rows, rows_of
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.reference.attention.parallax import parallax_attention as definition
from omniattn.reference.precision import compute_dtype

__all__ = ["parallax_attention"]

#: Logits of a block of queries; smaller blocks have more calls, larger ones leave the caches.
_LOGITS = 1 << 19


@dataclass(frozen=True)
class _Block:
    """Queries of a batch entry, the keys that some of them see, and which each does not see."""

    entry: int
    rows: slice
    keys: slice
    hidden: Tensor | None

    @property
    def count(self) -> int:
        return self.rows.stop - self.rows.start


def _sequences(q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> list[tuple[slice, slice]]:
    """Returns the queries and the keys of each sequence of a batch entry."""
    if cu_seqlens is None:
        return [(slice(0, q.shape[1]), slice(0, k.shape[1]))]
    ends = cu_seqlens.tolist()
    parts = [slice(first, last) for first, last in pairwise(ends)]
    return list(zip(parts, parts, strict=True))


def _hidden(first: int, rows: int, keys: int, window: tuple[int, int], like: Tensor) -> Tensor:
    """Returns which keys (rows, keys) are outside the window of rows at positions from `first`."""
    own = torch.arange(first, first + rows, device=like.device)
    ahead, (left, right) = torch.arange(keys, device=like.device) - own[:, None], window
    hidden = torch.zeros_like(ahead, dtype=torch.bool) if left < 0 else ahead < -left
    return hidden if right < 0 else hidden | (ahead > right)


def _blocks(
    q: Tensor, k: Tensor, cu_seqlens: Tensor | None, left: int, right: int
) -> Iterator[_Block]:
    """Yields the blocks of queries that see a key."""
    sequences = _sequences(q, k, cu_seqlens)
    for b in range(q.shape[0]):
        for queries, keys in sequences:
            rows = max(1, _LOGITS // max(1, q.shape[2] * (keys.stop - keys.start)))
            offset = keys.stop - queries.stop  # of the position of a query among all keys
            for first in range(queries.start, queries.stop, rows):
                end = min(queries.stop, first + rows)
                low, high = keys.start, keys.stop
                if left >= 0:
                    low = max(low, first + offset - left)
                if right >= 0:
                    high = min(high, end + offset + right)
                if low >= high:
                    continue
                hidden = None
                if left >= 0 or right >= 0:
                    place = first + offset - low
                    hidden = _hidden(place, end - first, high - low, (left, right), q)
                yield _Block(b, slice(first, end), slice(low, high), hidden)


def _hide(t: Tensor, at: _Block, value: float) -> Tensor:
    """Sets the hidden entries of t (Hkv, G T, keys)."""
    if at.hidden is not None:
        t.unflatten(1, (-1, at.count)).masked_fill_(at.hidden, value)
    return t


def _weights(at: _Block, q: Tensor, r: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns P and 1 + m - s, (Hkv, G T, keys) each."""
    p = _hide(_hide(scale * q @ k.mT, at, -torch.inf).softmax(-1), at, 0)
    s = _hide(r @ k.mT, at, 0)
    return p, 1 + (p * s).sum(-1, keepdim=True) - s


def _forward(
    q: Tensor,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    left: int,
    right: int,
    scale: float,
) -> Tensor:
    heads = k.shape[2]
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    if out.numel() == 0:
        return out
    for at in _blocks(q, k, cu_seqlens, left, right):
        own, seen = (at.entry, at.rows), (at.entry, at.keys)
        qs, rs = (rows_of(t[own], heads) for t in (q, r))
        p, factor = _weights(at, qs, rs, heads_first(k[seen]), scale)
        out[own] = of_rows((p * factor) @ heads_first(v[seen]), at.count).to(q.dtype)
    return out


def _backward(
    grad_out: Tensor | None,
    q: Tensor,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads, wide = k.shape[2], compute_dtype(q)
    dq, dr = torch.zeros_like(q), torch.zeros_like(r)
    dk, dv = (t.new_zeros(t.shape, dtype=wide) for t in (k, v))
    if grad_out is not None and grad_out.numel() > 0:
        for at in _blocks(q, k, cu_seqlens, left, right):
            own, seen = (at.entry, at.rows), (at.entry, at.keys)
            qs, rs, grads = (rows_of(t[own], heads) for t in (q, r, grad_out))
            ks, vs = (heads_first(t[seen]) for t in (k, v))
            p, factor = _weights(at, qs, rs, ks, scale)
            dv[seen] += ((p * factor).mT @ grads).transpose(0, 1)
            dw = grads @ vs.mT
            e = (p * dw).sum(-1, keepdim=True)
            dp = (dw - e) * factor
            # Weights of 0 do not hide what is not finite.
            dl = _hide(scale * p * (dp - (p * dp).sum(-1, keepdim=True)), at, 0)
            ds = _hide(p * (e - dw), at, 0)
            dq[own] = of_rows(dl @ ks, at.count).to(q.dtype)
            dr[own] = of_rows(ds @ ks, at.count).to(r.dtype)
            dk[seen] += (dl.mT @ qs + ds.mT @ rs).transpose(0, 1)
    return dq, dr, dk.to(k.dtype), dv.to(v.dtype)


_TENSORS = {"q": "B Tq Hq D", "r": "B Tq Hq D", "k": "B Tk Hkv D", "v": "B Tk Hkv Dv"}
_TENSORS |= {"cu_seqlens": "N+1"}
implement("parallax_attention", _forward, _TENSORS, differentiable=True)
implement("parallax_attention_backward", _backward, {"grad_out": "B Tq Hq Dv", **_TENSORS})


def _out(q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


#: (q, r, k, v, cu_seqlens, left, right, scale) -> out
parallax_attention = DifferentiableOp(
    "parallax_attention",
    fakes={"out": _out},
    formula=lambda q, r, k, v, cu_seqlens, left, right, scale: definition(
        *(q, r, k, v), causal=False, window_size=(left, right), scale=scale, cu_seqlens=cu_seqlens
    ),
)
