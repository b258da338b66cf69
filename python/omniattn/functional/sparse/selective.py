"""Selective attention: tokens mask earlier tokens for all later queries."""

from __future__ import annotations

import contextlib
from typing import Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn import reference
from omniattn.checks.arguments import (
    autocast_dtype,
    require_bool,
    require_int,
    require_seed,
    use_reference,
    widen,
)
from omniattn.encoding.options import Options, SelectiveOptions, pack, spelled_out
from omniattn.functional.attention._common import autocast, check_shapes, require_parameter
from omniattn.functional.layers.topk import top_k
from omniattn.functional.sparse._by_queries import CarriedBiasOf, attention_with_carry
from omniattn.functional.sparse._common import score_options
from omniattn.ops.dispatch.plain import may_need_gradient
from omniattn.reference.attention.attention import default_scale

__all__ = ["selective_attention"]


@overload
def selective_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    penalty: Tensor | None = None,
    budget: int | None = None,
    return_penalty: Literal[False] = False,
    backend: str | None = None,
    **options: Unpack[SelectiveOptions],
) -> Tensor: ...
@overload
def selective_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    penalty: Tensor | None = None,
    budget: int | None = None,
    return_penalty: bool,
    backend: str | None = None,
    **options: Unpack[SelectiveOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
@spelled_out(SelectiveOptions, last=("backend",))
def selective_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    penalty: Tensor | None = None,
    budget: int | None = None,
    return_penalty: bool = False,
    backend: str | None = None,
    **options: Unpack[SelectiveOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention in which each token can mask earlier tokens for all later queries.

    ``O = softmax(logits - F) v`` with ``F_ij = penalty_j + sum_{r < i} S_rj`` in all heads, and
    ``S = relu(logits of head 0)``, but 0 for the first key and for a query's own key. There are no
    parameters: head 0 decides which tokens are no longer needed. Memory is O(T): F is a running sum
    for each key, computed for parts of the queries in turn and again in the backward.

    Args:
        q: (B, Tq, Hq, D), float64, float32, bfloat16 or float16. The queries are the last Tq of the
            Tk tokens.
        k: (B, Tk, Hkv, D) of q's dtype; Hq must be a multiple of Hkv.
        v: (B, Tk, Hkv, Dv) of q's dtype.
        penalty: (B, Tk), F of the first query, as returned by earlier calls, 0 for new keys.
            float32 (float64 for float64). None is 0.
        budget: maximum number of keys that a query sees, those with the smallest F; of equal ones
            the later, so that it sees its own.
        return_penalty: also return F of the query after the last.
        scale, softcap, sinks, head_scale, dropout_p, seed, backend: as in :func:`attention`; S is
            of logits with scale, softcap and head_scale.

    Returns:
        O (B, Tq, Hq, Dv) of q's dtype, and with return_penalty F (B, Tk) of penalty's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`attention`.

    Note:
        Gradients flow through S to q and k of head 0, and to penalty; what `budget` selects is
        constant. S and F are in fp32 (fp64 for fp64). As in `attention`, NaN in a query reaches
        gradients of keys that it does not see.

    Reference:
        Leviathan, Kalman and Matias, Selective Attention Improves Transformer, 2024,
        arXiv:2410.02703.

    Example:
        >>> q = k = torch.ones(1, 4, 1, 1)
        >>> selective_attention(q, k, k, return_penalty=True)[1]
        tensor([[0., 2., 1., 0.]])
    """
    op = "selective_attention"
    record = pack(op, options, SelectiveOptions)
    q, k, v = autocast(op, q, k, v)
    check_shapes(op, q, k, v)
    if budget is not None:
        require_int(op, "budget", budget, 1)
    require_bool(op, "return_penalty", return_penalty)
    if record.seed is not None:
        require_seed(op, record.seed, q)
    how = score_options(op, q, k, record)
    how |= {"sinks": record.sinks, "head_scale": record.head_scale}
    dtype = widen(q.new_zeros(0)).dtype
    carry = q.new_zeros(q.shape[0], k.shape[1], dtype=dtype)
    if penalty is not None:
        require_parameter(op, "penalty", penalty, q, [(q.shape[0], k.shape[1])])
        if penalty.dtype != dtype:
            raise TypeError(f"{op}: penalty must be {dtype}, got penalty.dtype={penalty.dtype}")
        carry = penalty
    if use_reference(op, backend, q):
        return reference.selective_attention(
            q, k, v, penalty=penalty, budget=budget, return_penalty=return_penalty, **how
        )
    if q.shape[2] == 0:
        raise ValueError(f"{op}: q must have heads, got q.shape={tuple(q.shape)}")
    # In half precision, gradients of the parts would be rounded before they are summed.
    given = (q, k, v, penalty, record.sinks, record.head_scale)
    wide = any(t is not None and may_need_gradient(t) for t in given)
    rows = (widen(q), widen(k), widen(v)) if wide else (q, k, v)
    is_cast = autocast_dtype(q) is not None  # export makes a graph of its own of each such block
    with torch.autocast(q.device.type, enabled=False) if is_cast else contextlib.nullcontext():
        bias_of = _penalties(*rows[:2], record, budget)
        out, carry = attention_with_carry(
            *rows, bias_of, carry, causal=True, backend=backend, **how
        )
    out = out.to(v.dtype)
    return (out, carry) if return_penalty else out


def _penalties(q: Tensor, k: Tensor, options: Options, budget: int | None) -> CarriedBiasOf:
    """Computes -F of consecutive queries from F of the first."""
    scale, softcap, head_scale = options.scale, options.softcap, options.head_scale
    before = k.shape[1] - q.shape[1]
    rows = widen(q[:, :, 0]) * (default_scale(q.shape[3]) if scale is None else scale)
    if head_scale is not None:
        rows = rows * widen(head_scale[0]).to(rows.dtype)
    rows, columns = rows.contiguous(), widen(k[:, :, 0]).contiguous().transpose(1, 2)

    def bias_of(first: int, last: int, keys: int, carry: Tensor) -> tuple[Tensor, Tensor]:
        s = rows[:, first:last] @ columns[..., :keys]
        if softcap > 0:
            s = softcap * torch.tanh(s / softcap)
        place = torch.arange(keys, device=q.device)
        own = torch.arange(before + first, before + last, device=q.device)[:, None]
        s = s.relu().masked_fill((place >= own) | (place == 0), 0)
        sums = torch.cat([carry[:, None, :keys], s], 1).cumsum(1)
        bias = -sums[:, :-1]
        if budget is not None and budget < keys:
            seen = (place <= own).flip(-1).expand_as(bias)
            _, chosen = top_k(bias.detach().flip(-1), budget, mask=seen)
            kept = torch.zeros(*bias.shape[:2], keys + 1, dtype=torch.bool, device=q.device)
            kept.scatter_(-1, torch.where(chosen < 0, keys, keys - 1 - chosen), 1)
            bias = bias.masked_fill(~kept[..., :keys], -torch.inf)
        return bias[:, None], torch.cat([sums[:, -1], carry[:, keys:]], 1)

    return bias_of
