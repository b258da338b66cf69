"""attention: fakes, gradients and the recompute formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omniattn import reference
from omniattn.encoding.attention import as_cached, decode, pages_of
from omniattn.encoding.masks import MaskKind
from omniattn.ops import _library
from omniattn.ops._autograd import DifferentiableOp, Op, private_op, register_vmap

__all__ = ["attention", "attention_select", "attention_weights", "formula", "weights_formula"]

_backward_op = private_op("attention_backward")


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _fake(
    q: Tensor, k: Tensor, v: Tensor, aux: Any, seed: Any, mask: Any, score: Any, params: Any
) -> tuple[Tensor, Tensor, Tensor]:
    batch, tq, heads, _ = q.shape
    out = q.new_empty((batch, tq, heads, v.shape[3]))
    lse = q.new_empty((batch, heads, tq), dtype=_accumulator(q))
    return out, lse, torch.empty_like(lse)


@_library.register_fake("attention_backward")
def _fake_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
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
    wanted: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    grad_aux = [aux[i].new_empty(aux[i].shape) for i in wanted]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_aux


def _save(args: Any, output: Any) -> tuple[tuple[Tensor | None, ...], Any]:
    q, k, v, aux, seed, mask, score, params = args
    return (q, k, v, seed, *output, *aux), (mask, score, params)


def _backward(
    saved: Any, kept: Any, needs: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    q, k, v, seed, out, lse, lse_tail, *aux = saved
    grad_out, grad_lse, *_ = grads
    if grad_out is None:
        if grad_lse is None:
            return (None,) * 8
        grad_out = torch.zeros_like(out)
    wanted = [i for i in range(len(aux)) if needs[3][i]]
    mask, score, params = kept
    contiguous, pages = (k, v), pages_of(mask, aux)
    if pages is not None:
        pages = pages.clamp(min=0).long()
        contiguous, mask = (k[pages].flatten(1, 2), v[pages].flatten(1, 2)), as_cached(mask)
    rows = (out, lse, lse_tail)
    *grads_qkv, found = _backward_op(
        grad_out, grad_lse, q, *contiguous, aux, seed, *rows, mask, score, params, wanted
    )
    if pages is not None:
        for i, t in ((1, k), (2, v)):
            sums = torch.zeros(t.shape, dtype=_accumulator(t), device=t.device)
            grad = grads_qkv[i].unflatten(1, (-1, t.shape[1])).flatten(0, 1).to(sums.dtype)
            grads_qkv[i] = sums.index_add(0, pages.flatten(), grad).to(t.dtype)
    grad_aux: list[Tensor | None] = [None] * len(aux)
    for i, grad in zip(wanted, found, strict=True):
        grad_aux[i] = grad
    return (*grads_qkv, grad_aux, None, None, None, None)


def _restore(saved: Any, kept: Any) -> tuple[Any, ...]:
    q, k, v, seed, _, _, _, *aux = saved
    return (q, k, v, aux, seed, *kept)


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    aux: Sequence[Tensor],
    seed: Tensor | None,
    mask: Sequence[int],
    score: Sequence[int],
    params: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """The op in plain torch, from its own arguments."""
    layout, options = decode(aux, mask, score, params)
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


#: (q, k, v, aux, seed, mask, score, params) -> (out, lse)
attention = DifferentiableOp(
    "attention",
    fake=_fake,
    save=_save,
    backward=_backward,
    private_outputs=1,
    inference="attention_only",
    formula=formula,
    restore=_restore,
    fold=lambda q, k, v, aux, seed, *_: () if aux or seed is not None else (0, 1, 2),
)


def _fold_backward(
    grad_out: Any, grad_lse: Any, q: Any, k: Any, v: Any, aux: Any, seed: Any, *_: Any
) -> tuple[int, ...]:
    return () if aux or seed is not None else (0, 1, 2, 3, 4, 7, 8, 9)


register_vmap("attention_backward", _fold_backward)


def _fake_weights(
    q: Tensor, k: Tensor, lse: Tensor, aux: Any, mask: Any, score: Any, params: Any, sums: bool
) -> Tensor:
    batch, tq, heads, _ = q.shape
    if sums:
        return q.new_empty((batch, heads, k.shape[1]), dtype=_accumulator(q))
    return q.new_empty((batch, heads, tq, k.shape[1]))


def _save_weights(args: Any, output: Any) -> tuple[tuple[Tensor | None, ...], Any]:
    q, k, lse, aux, *kept = args
    return (q, k, lse, *aux), kept


def _restore_weights(saved: Any, kept: Any) -> tuple[Any, ...]:
    q, k, lse, *aux = saved
    return (q, k, lse, aux, *kept)


def weights_formula(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    aux: Sequence[Tensor],
    mask: Sequence[int],
    score: Sequence[int],
    params: Sequence[float],
    sums: bool,
) -> Tensor:
    """attention_weights in plain torch, from its own arguments."""
    _, options = decode(aux, mask, score, params)
    return reference.attention_weights(q, k, lse, column_sums=sums, **options)


def _weights_backward(
    saved: Any, kept: Any, needs: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    """Through the eager definition: weights are looked at, not trained through."""
    needed = [i for i, need in enumerate((*needs[:3], *needs[3])) if need]

    def weights(*leaves: Tensor) -> Tensor:
        tensors = list(saved)
        for i, leaf in zip(needed, leaves, strict=True):
            tensors[i] = leaf
        return weights_formula(*_restore_weights(tensors, kept))

    found: list[Tensor | None] = [None] * len(saved)
    if grads[0] is None:
        return (*found[:3], found[3:], None, None, None, None)
    pull = torch.func.vjp(weights, *(saved[i] for i in needed))[1]
    for i, grad in zip(needed, pull(grads[0]), strict=True):
        found[i] = grad
    return (*found[:3], found[3:], None, None, None, None)


def _fake_select(
    q: Tensor, k: Tensor, aux: Any, mask: Any, score: Any, params: Any
) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty(shape, dtype=torch.int64), q.new_empty(shape, dtype=_accumulator(q))


#: (q, k, aux, mask, score, params) -> (index, top); no gradient
attention_select = Op(
    "attention_select", fake=_fake_select, fold=lambda q, k, aux, *_: () if aux else (0, 1)
)


#: (q, k, lse, aux, mask, score, params, sums) -> weights
attention_weights = DifferentiableOp(
    "attention_weights",
    fake=_fake_weights,
    save=_save_weights,
    backward=_weights_backward,
    formula=weights_formula,
    restore=_restore_weights,
    fold=lambda q, k, lse, aux, *_: () if aux else (0, 1, 2),
)
