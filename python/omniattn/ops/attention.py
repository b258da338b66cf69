"""attention: fakes, gradients and the recompute formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omniattn import reference
from omniattn.encoding.attention import as_cached, bias_index, decode, pages_of, split_parts
from omniattn.encoding.masks import MaskKind
from omniattn.ops.derivatives.attention_tiles import attention_pieces
from omniattn.ops.dispatch.autograd import DifferentiableOp, Op
from omniattn.ops.dispatch.backward import BackwardOp
from omniattn.ops.dispatch.names import like
from omniattn.ops.dispatch.vmap import Fold
from omniattn.reference.precision import compute_dtype

__all__ = [
    "attention",
    "attention_backward",
    "attention_int8",
    "attention_select",
    "attention_weights",
]


def _alone(aux: Sequence[Tensor], seed: Tensor | None) -> bool:
    """Returns True if there are no tensors that elements of a batch could share."""
    return not aux and seed is None


_backward_op = BackwardOp(
    "attention_backward",
    fakes={
        "grad_q": lambda q: like(q),
        "grad_k": lambda k: like(k),
        "grad_v": lambda v: like(v),
        "grad_aux": lambda aux, wanted: [like(aux[i]) for i in wanted],
    },
    fold=Fold(("q", "k", "v", "out", "lse", "lse_tail"), when=_alone),
)

#: (grad_out, grad_lse, q, k, v, aux, seed, out, lse, lse_tail, mask, score, params, wanted)
#: -> (dq, dk, dv, daux), daux of the aux that `wanted` lists. For parts of the keys, out and lse
#: may be those of all keys.
attention_backward = _backward_op.call


def _backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    aux_grad: Sequence[bool],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    aux: Sequence[Tensor],
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_tail: Tensor,
    mask: Sequence[int],
    score: Sequence[int],
    params: Sequence[float],
) -> dict[str, Any]:
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    wanted = [i for i, need in enumerate(aux_grad) if need]
    contiguous, pages = (k, v), pages_of(mask, aux)
    if pages is not None:
        pages = pages.clamp(min=0).long()
        contiguous, mask = (k[pages].flatten(1, 2), v[pages].flatten(1, 2)), as_cached(mask)
    rows = (out, lse, lse_tail)
    dq, dk, dv, found = _backward_op.call(
        grad_out, grad_lse, q, *contiguous, aux, seed, *rows, mask, score, params, wanted
    )
    if pages is not None:
        dk, dv = _scatter(dk, k, pages), _scatter(dv, v, pages)
    grads = dict(zip(wanted, found, strict=True))
    return {"q": dq, "k": dk, "v": dv, "aux": [grads.get(i) for i in range(len(aux))]}


def _scatter(grad: Tensor, t: Tensor, pages: Tensor) -> Tensor:
    """Sums gradients of gathered pages into the pages t (pages, P, H, D)."""
    sums = torch.zeros(t.shape, dtype=compute_dtype(t), device=t.device)
    grad = grad.unflatten(1, (-1, t.shape[1])).flatten(0, 1).to(sums.dtype)
    return sums.index_add(0, pages.flatten(), grad).to(t.dtype)


def _formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    aux: Sequence[Tensor],
    seed: Tensor | None,
    mask: Sequence[int],
    score: Sequence[int],
    params: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Computes the op in plain torch from its own arguments."""
    parts, rules = split_parts(mask)
    if parts:
        return _formula_of_part(q, k, v, aux, seed, parts, rules, score, params)
    layout, options = decode(aux, mask, score, params, (q.shape[1], k.shape[1]))
    options |= {"dropout_p": params[1], "seed": seed, "return_lse": True}
    if layout is None:
        out, lse = reference.attention(q, k, v, **options)
    elif layout[0] == MaskKind.PACKED:
        cu_q, cu_k = layout[3]
        out, lse = reference.attention_varlen(q[0], k[0], v[0], cu_q, cu_k, **options)
        out, lse = out[None], lse[None]
    else:
        *table, lengths = layout[3] if layout[0] == MaskKind.PAGED else layout[3][:1]
        options["block_table"] = table[0] if table else None
        out, lse = reference.attention_cached(q, k, v, lengths, **options)
    return out, lse


def _formula_of_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    aux: Sequence[Tensor],
    seed: Tensor | None,
    parts: dict[int, tuple[int, int]],
    mask: Sequence[int],
    score: Sequence[int],
    params: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Computes a part's rows within the whole call, with zeros for other queries and keys."""
    tq, tk = q.shape[1], k.shape[1]
    first_q, whole_q = parts.get(MaskKind.QUERIES, (0, tq))
    first_k, whole_k = parts.get(MaskKind.KEYS, (0, tk))
    around_q, around_k = (first_q, whole_q - first_q - tq), (first_k, whole_k - first_k - tk)
    place = torch.arange(whole_k, device=q.device) - first_k
    aux = [*aux, ((place >= 0) & (place < tk))[None, None, None]]
    mask = [*mask, MaskKind.TENSOR, 0, 0, len(aux) - 1]
    at = bias_index(score)
    if at is not None:  # of the whole call, or of the part alone
        for dim, own, around in ((2, tq, around_q), (3, tk, around_k)):
            if aux[at].shape[dim] == own:
                aux[at] = _between_zeros(aux[at], dim, around)
    q = _between_zeros(q, 1, around_q)
    k, v = _between_zeros(k, 1, around_k), _between_zeros(v, 1, around_k)
    out, lse = _formula(q, k, v, aux, seed, mask, score, params)
    return out[:, first_q : first_q + tq], lse[:, :, first_q : first_q + tq]


def _between_zeros(t: Tensor, dim: int, around: tuple[int, int]) -> Tensor:
    return torch.nn.functional.pad(t, (*(0, 0) * (t.dim() - 1 - dim), *around))


def _out(q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


def _rows(q: Tensor) -> Tensor:
    batch, tq, heads, _ = q.shape
    return q.new_empty((batch, heads, tq), dtype=compute_dtype(q))


#: (q, k, v, aux, seed, mask, score, params) -> (out, lse)
attention = DifferentiableOp(
    "attention",
    fakes={"out": _out, "lse": _rows, "lse_tail": _rows},
    private=("lse_tail",),
    backward=_backward,
    direct=_backward_op.of(wanted="aux_grad"),
    formula=_formula,
    pieces=attention_pieces,
    fold=Fold(("q", "k", "v"), when=_alone),
)


def _int8_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    aux: Sequence[Tensor],
    mask: Sequence[int],
    score: Sequence[int],
    params: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Computes attention_int8 in plain torch from its own arguments."""
    layout, options = decode(aux, mask, score, params, (q.shape[1], k.shape[1]))
    assert layout is not None
    *table, lengths = layout[3] if layout[0] == MaskKind.PAGED else layout[3][:1]
    options |= {"return_lse": True, "block_table": table[0] if table else None}
    out, lse = reference.attention_int8(q, k, v, k_scale, v_scale, lengths, **options)
    return out, lse


#: (q, k, v, k_scale, v_scale, aux, mask, score, params) -> (out, lse); no gradient
attention_int8 = Op("attention_int8", fakes={"out": _out, "lse": _rows}, formula=_int8_formula)


def _weights(q: Tensor, k: Tensor, column_sums: bool, group_sums: bool) -> Tensor:
    batch, tq, heads, _ = q.shape
    of = (batch, k.shape[2] if group_sums else heads)
    dtype = compute_dtype(q) if column_sums or group_sums else q.dtype
    return q.new_empty((*of, k.shape[1]) if column_sums else (*of, tq, k.shape[1]), dtype=dtype)


def _weights_formula(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    aux: Sequence[Tensor],
    mask: Sequence[int],
    score: Sequence[int],
    params: Sequence[float],
    column_sums: bool,
    group_sums: bool,
) -> Tensor:
    """Computes attention_weights in plain torch from its own arguments."""
    _, options = decode(aux, mask, score, params, (q.shape[1], k.shape[1]))
    options |= {"column_sums": column_sums, "group_sums": group_sums}
    return reference.attention_weights(q, k, lse, **options)


def _weights_backward(
    grad_y: Tensor,
    q_grad: bool,
    k_grad: bool,
    lse_grad: bool,
    aux_grad: Sequence[bool],
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    aux: Sequence[Tensor],
    mask: Sequence[int],
    score: Sequence[int],
    params: Sequence[float],
    column_sums: bool,
    group_sums: bool,
) -> dict[str, Any]:
    """Differentiates the eager definition; weights are meant for inspection, not for training."""
    tensors = [q, k, lse, *aux]
    needed = [i for i, need in enumerate((q_grad, k_grad, lse_grad, *aux_grad)) if need]

    def weights(*leaves: Tensor) -> Tensor:
        replaced = dict(zip(needed, leaves, strict=True))
        q, k, lse, *aux = (replaced.get(i, t) for i, t in enumerate(tensors))
        return _weights_formula(q, k, lse, aux, mask, score, params, column_sums, group_sums)

    pull = torch.func.vjp(weights, *(tensors[i] for i in needed))[1]
    grads = dict(zip(needed, pull(grad_y), strict=True))
    dq, dk, dlse, *daux = (grads.get(i) for i in range(len(tensors)))
    return {"q": dq, "k": dk, "lse": dlse, "aux": daux}


def _per_query(q: Tensor) -> Tensor:
    batch, tq, heads, _ = q.shape
    return q.new_empty((batch, heads, tq), dtype=torch.int64)


#: (q, k, aux, mask, score, params) -> (index, top); no gradient
attention_select = Op(
    "attention_select",
    fakes={"index": _per_query, "top": _rows},
    fold=Fold(("q", "k"), when=lambda aux: not aux),
)


#: (q, k, lse, aux, mask, score, params, column_sums, group_sums) -> weights
attention_weights = DifferentiableOp(
    "attention_weights",
    fakes={"y": _weights},
    backward=_weights_backward,
    formula=_weights_formula,
    fold=Fold(("q", "k", "lse"), when=lambda aux: not aux),
)
