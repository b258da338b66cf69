"""Attention with the weights of sparsemax and entmax, by blocks of queries.

A row of logits s has weights ``p = relu(z - tau)^(1 / (alpha - 1))``, ``z = (alpha - 1)(s - max)``,
with the tau in [-1, 0] for which they sum to 1. The sum is convex and falls with tau, so that
Newton's method from -1 rises to tau, for alpha = 2 in finitely many steps (Michelot's algorithm).
The backward makes the logits again and keeps tau:

    dL/ds = u (dP - sum u dP / sum u),  u = p^(2 - alpha), 0 where p = 0
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from omniattn.compositions._python_ops import define
from omniattn.compositions._rows import heads_first, of_rows, rows_of
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.reference.attention.sparsemax_attention import sparsemax_attention as definition
from omniattn.reference.precision import compute_dtype

__all__ = ["sparsemax_attention"]

#: Logits of a block of queries; smaller blocks have more calls, larger ones leave the caches.
_LOGITS = 1 << 19
#: Newton's steps from a row of equal logits are about ln(Tk) + 4.
_STEPS = 60


def _blocks(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[int, slice, slice]]:
    """Yields batch entry, queries and the keys that these may see."""
    tq, heads, tk = q.shape[1], q.shape[2], k.shape[1]
    rows = max(1, _LOGITS // max(1, heads * tk))
    for b in range(q.shape[0]):
        for first in range(0, tq, rows):
            end = min(tq, first + rows)
            yield b, slice(first, end), slice(0, max(0, end + tk - tq) if causal else tk)


def _shifted(
    q: Tensor, k: Tensor, ids: Tensor | None, place: tuple[slice, int], options: tuple[float, bool]
) -> Tensor:
    """Computes z (Hkv, G T, keys) of a block from rows q and keys k (Hkv, keys, D), -inf hidden."""
    (queries, offset), (factor, causal) = place, options
    z = factor * q @ k.mT
    count = queries.stop - queries.start
    grid = z.unflatten(1, (-1, count))
    if causal:
        key = torch.arange(z.shape[-1], device=z.device)
        own = torch.arange(queries.start, queries.stop, device=z.device) + offset
        grid.masked_fill_(key > own[:, None], -torch.inf)
    if ids is not None:
        grid.masked_fill_(ids[: z.shape[-1]] != ids[queries, None], -torch.inf)
    top = z.amax(-1, keepdim=True)
    return z.sub_(top.masked_fill_(~(top > -torch.inf), 0))  # NaN keeps hidden logits -inf


def _weights(z: Tensor, tau: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Returns relu(z - tau)^(1 / (alpha - 1)) and its power 2 - alpha, 0 where it is 0."""
    left = (z - tau).clamp_(min=0)
    if tau.isnan().any():
        left.masked_fill_(z == -torch.inf, 0)
    if alpha == 2:
        return left, (left > 0).to(left.dtype)
    if alpha == 1.5:
        return left.square(), left
    power = 1 / (alpha - 1)
    return left.pow(power), left.pow(power - 1)


def _threshold(z: Tensor, alpha: float) -> Tensor:
    """Finds tau of each row."""
    power = 1 / (alpha - 1)
    tau = z.new_full((*z.shape[:-1], 1), -1.0)
    for _ in range(_STEPS):
        p, u = _weights(z, tau, alpha)
        slope = u.sum(-1, keepdim=True)
        # A rounding error may lead past the root, from where the step is negative.
        step = (p.sum(-1, keepdim=True) - 1).div_(power * slope).masked_fill_(slope == 0, 0)
        tau += step
        if not (step.abs() > -2 * torch.finfo(z.dtype).eps * tau).any():
            break
    return tau


def _ids(q: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
    if cu_seqlens is None:
        return None
    tokens = torch.arange(q.shape[1], device=q.device)
    return torch.searchsorted(cu_seqlens.long(), tokens, right=True)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    alpha: float,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    heads, offset = k.shape[2], k.shape[1] - q.shape[1]
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    thresholds = q.new_zeros(q.shape[:3], dtype=compute_dtype(q))
    options, ids = ((alpha - 1) * scale, causal), _ids(q, cu_seqlens)
    if out.numel() == 0:
        return out, thresholds
    for b, rows, keys in _blocks(q, k, causal):
        if keys.stop == 0:
            continue
        ks, vs = (heads_first(t[b, keys]) for t in (k, v))
        count = rows.stop - rows.start
        z = _shifted(rows_of(q[b, rows], heads), ks, ids, (rows, offset), options)
        tau = _threshold(z, alpha)
        out[b, rows] = of_rows(_weights(z, tau, alpha)[0] @ vs, count).to(q.dtype)
        thresholds[b, rows] = of_rows(tau, count).squeeze(-1)
    return out, thresholds


def _backward(
    grad_out: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    alpha: float,
    causal: bool,
    scale: float,
    thresholds: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    heads, offset = k.shape[2], k.shape[1] - q.shape[1]
    dq, wide = torch.zeros_like(q), compute_dtype(q)
    dk, dv = (t.new_zeros(t.shape, dtype=wide) for t in (k, v))
    options, ids = ((alpha - 1) * scale, causal), _ids(q, cu_seqlens)
    if grad_out is None or grad_out.numel() == 0:
        return dq, dk.to(k.dtype), dv.to(v.dtype)
    for b, rows, keys in _blocks(q, k, causal):
        if keys.stop == 0:
            continue
        ks, vs = (heads_first(t[b, keys]) for t in (k, v))
        count = rows.stop - rows.start
        qs, grads = (rows_of(t[b, rows], heads) for t in (q, grad_out))
        tau = rows_of(thresholds[b, rows, :, None], heads)
        p, u = _weights(_shifted(qs, ks, ids, (rows, offset), options), tau, alpha)
        outside = ~(u > 0)  # whatever the values there are, also NaN
        ds = (grads @ vs.mT).masked_fill_(outside, 0)
        mean = (u * ds).sum(-1, keepdim=True) / u.sum(-1, keepdim=True).clamp(min=1e-30)
        ds = ds.sub_(mean).mul_(u).masked_fill_(outside, 0)
        dv[b, keys] += (p.mT @ grads).transpose(0, 1)
        dk[b, keys] += scale * (ds.mT @ qs).transpose(0, 1)
        dq[b, rows] = of_rows(scale * (ds @ ks), count).to(q.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


_TENSORS = {"q": "B Tq Hq D", "k": "B Tk Hkv D", "v": "B Tk Hkv Dv"}
_NUMBERS = {"alpha": "", "causal": "", "scale": ""}
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, float alpha, bool causal, float scale"
)
define(
    "sparsemax_attention",
    _ARGUMENTS,
    "Tensor out, Tensor thresholds",
    _forward,
    _TENSORS | {"cu_seqlens": "N+1"},
    differentiable=True,
)
define(
    "sparsemax_attention_backward",
    f"Tensor? grad_out, {_ARGUMENTS}, Tensor thresholds",
    "Tensor dq, Tensor dk, Tensor dv",
    _backward,
    {
        "grad_out": "B Tq Hq Dv",
        **_TENSORS,
        "cu_seqlens": "N+1",
        **_NUMBERS,
        "thresholds": "B Tq Hq",
    },
)


def _out(q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


def _per_row(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=compute_dtype(q))


#: (q, k, v, cu_seqlens, alpha, causal, scale) -> out
sparsemax_attention = DifferentiableOp(
    "sparsemax_attention",
    fakes={"out": _out, "thresholds": _per_row},
    private=("thresholds",),
    formula=lambda q, k, v, cu_seqlens, alpha, causal, scale: definition(
        *(q, k, v), alpha=alpha, causal=causal, scale=scale, cu_seqlens=cu_seqlens
    ),
)
