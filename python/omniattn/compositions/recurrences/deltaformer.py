"""DeltaFormer: attention whose values are corrected by what attention to earlier ones reads.

Tokens are computed in blocks. The op `attention` reads earlier blocks, and a triangular system
gives the values of a block, whose weights are a small matrix.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from omniattn.compositions._python_ops import define
from omniattn.ops import attention as ops
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.ops.dispatch.backward import BackwardOp
from omniattn.reference.precision import compute_dtype
from omniattn.reference.recurrences.deltaformer import deltaformer_attention as definition

__all__ = ["deltaformer_attention"]

#: Number of tokens of a block.
BLOCK = 128


def _sequences(q: Tensor, cu_seqlens: Tensor | None) -> list[slice]:
    if cu_seqlens is None:
        return [slice(0, q.shape[1])]
    ends = cu_seqlens.tolist()
    return [slice(*pair) for pair in itertools.pairwise(ends) if pair[0] < pair[1]]


def _blocks(steps: int) -> Iterator[slice]:
    return (slice(first, min(first + BLOCK, steps)) for first in range(0, steps, BLOCK))


def _inside(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns the logits (B, H, C, C) of a block, -inf but for keys before the query, and those of
    each token with itself (B, C, H)."""
    logits = scale * (q.transpose(1, 2) @ k.permute(0, 2, 3, 1))
    own = logits.diagonal(dim1=-2, dim2=-1).mT.clone()
    allowed = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril(-1)
    return logits.masked_fill_(~allowed, -torch.inf), own


def _weights(logits: Tensor, lse: Tensor) -> Tensor:
    """Returns exp(logits - lse), 0 for queries without keys, whose lse is -inf."""
    return (logits - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp_()


def _columns(t: Tensor) -> Tensor:
    """Maps (B, H, C) to (B, C, H, 1)."""
    return t.mT[..., None]


def _solve(weights: Tensor, right: Tensor, *, upper: bool) -> Tensor:
    """Solves (1 + weights) x = right for x (B, C, H, V); weights (B, H, C, C) are triangular."""
    rows = right.transpose(1, 2)
    solved = torch.linalg.solve_triangular(weights, rows, upper=upper, unitriangular=True)
    return solved.transpose(1, 2)


def _run(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, past: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes y, u, what attention to earlier tokens reads, and its lse, of one sequence."""
    steps, first = q.shape[1], k.shape[1] - q.shape[1]
    values = torch.cat((v.new_empty(v.shape[0], 0, *v.shape[2:]) if past is None else past, v), 1)
    y, read = torch.empty_like(v), torch.empty_like(v)
    lse = q.new_empty(q.shape[0], q.shape[2], steps)
    for block in _blocks(steps):
        at = first + block.start
        rows, keys, own = q[:, block], k[:, first:][:, block], values[:, first:][:, block]
        b = beta[:, block, :, None]
        logits, self_logits = _inside(rows, keys, scale)
        total = logits.logsumexp(-1)
        earlier = torch.zeros_like(own)
        if at > 0:
            out, before, _ = ops.attention.raw(
                *(rows, k[:, :at], values[:, :at], [], None, [], [], [scale, 0.0])
            )
            total = torch.logaddexp(total, before)
            earlier = out * _columns((before - total).exp())
        weights = _weights(logits, total)
        own.copy_(_solve(beta[:, block].mT[..., None] * weights, own - b * earlier, upper=False))
        found = earlier + _product(weights, own)
        read[:, block], lse[:, :, block] = found, total
        share = (self_logits - total.mT).sigmoid_()[..., None]
        y[:, block] = torch.lerp(found, own, share.expand_as(own))
    return y, values[:, first:], read, lse


def _differentiate(
    grad_y: Tensor | None,
    grad_u: Tensor | None,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    scale: float,
    results: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v, beta and past of one sequence.

    The gradient of a value is that of its own output and those of all later reads, which depend on
    the gradients of later values: the transposed triangular system, from the last block to the
    first.
    """
    (q, k, beta, past), (u, read, lse) = tensors, results
    steps, first = q.shape[1], k.shape[1] - q.shape[1]
    values = u if past is None else torch.cat((past, u), 1)
    dq, dk, dvalues = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(values)
    dbeta = torch.empty_like(beta)
    own_keys = k[:, first:]
    share = ((scale * (q * own_keys).sum(-1)) - lse.mT).sigmoid_()[..., None]
    dread = torch.zeros_like(u)
    slope = torch.zeros_like(share)
    if grad_y is not None:
        slope = share * (1 - share) * (grad_y * (u - read)).sum(-1, keepdim=True)
        dread = (1 - share) * grad_y
        dvalues[:, first:] = share * grad_y
        dq += scale * slope * own_keys
        dk[:, first:] += scale * slope * q
    if grad_u is not None:
        dvalues[:, first:] += grad_u
    dlse = -slope[..., 0].mT.contiguous()
    for block in reversed(list(_blocks(steps))):
        at = first + block.start
        rows, keys, own = q[:, block], own_keys[:, block], u[:, block]
        b, total = beta[:, block, :, None], lse[:, :, block]
        weights = _weights(_inside(rows, keys, scale)[0], total)
        right = dvalues[:, first:][:, block] + _product(weights.mT, dread[:, block])
        down = _solve(weights.mT * beta[:, block].mT[..., None, :], right, upper=True)
        dvalues[:, first:][:, block] = down
        dbeta[:, block] = -(down * read[:, block]).sum(-1)
        back = dread[:, block] - b * down
        gap = dlse[:, :, block] - (back * read[:, block]).sum(-1).mT
        slopes = back.transpose(1, 2) @ own.permute(0, 2, 3, 1)
        slopes = weights * (slopes + gap[..., None]) * scale
        dq[:, block] += _product(slopes, keys)
        dk[:, first:][:, block] += _product(slopes.mT, rows)
        if at > 0:
            grads = ops._backward_op.call(
                *(back.contiguous(), dlse[:, :, block].contiguous(), rows.contiguous()),
                *(k[:, :at].contiguous(), values[:, :at].contiguous(), [], None),
                *(read[:, block].contiguous(), total.contiguous(), torch.zeros_like(total)),
                *([], [], [scale, 0.0], []),
            )
            dq[:, block] += grads[0]
            dk[:, :at] += grads[1]
            dvalues[:, :at] += grads[2]
    return dq, dk, dvalues[:, first:], dbeta, dvalues[:, :first]


def _product(weights: Tensor, rows: Tensor) -> Tensor:
    """Multiplies weights (B, H, C, C) with rows (B, C, H, D)."""
    return (weights @ rows.transpose(1, 2)).transpose(1, 2)


def _require_keys(q: Tensor, k: Tensor, past: Tensor | None) -> None:
    """Requires a key for each past and each new token."""
    tokens = q.shape[1] + (0 if past is None else past.shape[1])
    if k.shape[1] != tokens:
        raise ValueError(
            f"deltaformer_attention: k must have {tokens} tokens, got k.shape={tuple(k.shape)}"
        )


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    past: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _require_keys(q, k, past)
    dtype = compute_dtype(v)
    outputs = [v.new_empty(v.shape), *(v.new_empty(v.shape, dtype=dtype) for _ in range(2))]
    lse = v.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype)
    if v.numel() == 0:
        return outputs[0], outputs[1], outputs[2], lse
    past = None if past is None else past.to(dtype)
    for own in _sequences(q, cu_seqlens):
        keys = own if past is None else slice(None)
        each = (q[:, own], k[:, keys], v[:, own], beta[:, own])
        given = tuple(t.to(dtype) for t in each)
        *found, total = _run(given[0], given[1], given[2], given[3], past, scale)
        for output, part in zip(outputs, found, strict=True):
            output[:, own] = part
        lse[:, :, own] = total
    return outputs[0], outputs[1], outputs[2], lse


def _backward(
    grad_y: Tensor | None,
    grad_u: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    past: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    u: Tensor,
    read: Tensor,
    lse: Tensor,
) -> tuple[Tensor, ...]:
    _require_keys(q, k, past)
    grads = [t.new_zeros(t.shape) for t in (q, k, v, beta)]
    dpast = q.new_empty(0) if past is None else past.new_zeros(past.shape)
    if v.numel() == 0:
        return (*grads, dpast)
    for own in _sequences(q, cu_seqlens):
        keys = own if past is None else slice(None)
        of_y = None if grad_y is None else grad_y[:, own].to(u.dtype)
        of_u = None if grad_u is None else grad_u[:, own]
        rows, read_keys, share = (t.to(u.dtype) for t in (q[:, own], k[:, keys], beta[:, own]))
        tensors = rows, read_keys, share, None if past is None else past.to(u.dtype)
        results = u[:, own], read[:, own], lse[:, :, own]
        *found, before = _differentiate(of_y, of_u, tensors, scale, results)
        for grad, part, place in zip(grads, found, (own, keys, own, own), strict=True):
            grad[:, place] = part
        if past is not None:
            dpast.copy_(before)
    return (*grads, dpast)


#: k has the rows S of `past` and of the new tokens.
_SHAPES = {"q": "B T H K", "k": "B S H K", "v": "B T H V", "beta": "B T H", "past": "B P H V"}
_SHAPES |= {"cu_seqlens": "N", "scale": ""}
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? past, Tensor? cu_seqlens, float scale"
)
define(
    "deltaformer_attention",
    _ARGUMENTS,
    "Tensor y, Tensor u, Tensor read, Tensor lse",
    _forward,
    _SHAPES,
    differentiable=True,
)
define(
    "deltaformer_attention_backward",
    f"Tensor? grad_y, Tensor? grad_u, {_ARGUMENTS}, Tensor u, Tensor read, Tensor lse",
    "Tensor dq, Tensor dk, Tensor dv, Tensor dbeta, Tensor dpast",
    _backward,
    {
        **dict.fromkeys(("grad_y", "grad_u"), "B T H V"),
        **_SHAPES,
        **{"u": "B T H V", "read": "B T H V", "lse": "B H T"},
    },
)


def _wide(v: Tensor) -> Tensor:
    return v.new_empty(v.shape, dtype=compute_dtype(v))


#: (q, k, v, beta, past, cu_seqlens, scale) -> (y, u)
deltaformer_attention = DifferentiableOp(
    "deltaformer_attention",
    fakes={
        "y": lambda v: v.new_empty(v.shape),
        "u": _wide,
        "read": _wide,
        "lse": lambda q, v: v.new_empty(
            (q.shape[0], q.shape[2], q.shape[1]), dtype=compute_dtype(v)
        ),
    },
    private=("read", "lse"),
    backward_op=BackwardOp("deltaformer_attention_backward"),
    formula=lambda q, k, v, beta, past, cu_seqlens, scale: definition(
        q, k, v, beta, past=past, cu_seqlens=cu_seqlens, scale=scale
    ),
)
