"""attention: fakes, gradients and the recompute formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omniattn import reference
from omniattn.ops._autograd import DifferentiableOp, loop_over_vmap
from omniattn.reference.masks import Rule, visible

__all__ = ["attention"]

_backward_op = torch.ops.omniattn.attention_backward.default

# Encodings, as decoded by csrc/ops/attention.h.
_MASK_INTS = 4  # kind, a, b, index of the first side tensor in aux
_SCORE_INTS = 3  # kind, aux index, params index
_BIAS, _SOFTCAP = 0, 1


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _groups(codes: Sequence[int], size: int) -> list[Sequence[int]]:
    return [codes[i : i + size] for i in range(0, len(codes), size)]


def _bias_index(score: Sequence[int]) -> int | None:
    return next((aux for kind, aux, _ in _groups(score, _SCORE_INTS) if kind == _BIAS), None)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, aux: Any, seed: Any, mask: Any, score: Any, params: Any
) -> tuple[Tensor, Tensor]:
    batch, tq, heads, _ = q.shape
    out = q.new_empty((batch, tq, heads, v.shape[3]))
    return out, q.new_empty((batch, heads, tq), dtype=_accumulator(q))


@torch.library.register_fake("omniattn::attention_backward")
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
    mask: Sequence[int],
    score: Sequence[int],
    params: Sequence[float],
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    bias = _bias_index(score)
    grad_bias = (
        aux[bias].new_empty(aux[bias].shape) if bias_grad and bias is not None else q.new_empty(0)
    )
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_bias


def _save(args: Any, output: Any) -> tuple[tuple[Tensor | None, ...], Any]:
    q, k, v, aux, seed, mask, score, params = args
    return (q, k, v, seed, *output, *aux), (mask, score, params)


def _backward(
    saved: Any, kept: Any, needs: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    q, k, v, seed, out, lse, *aux = saved
    grad_out, grad_lse = grads
    if grad_out is None:
        if grad_lse is None:
            return (None,) * 8
        grad_out = torch.zeros_like(out)
    bias = _bias_index(kept[1])
    bias_grad = bias is not None and needs[3][bias]
    *grads_qkv, grad_bias = _backward_op(
        grad_out, grad_lse, q, k, v, aux, seed, out, lse, *kept, bias_grad
    )
    grad_aux = [grad_bias if i == bias else None for i in range(len(aux))] if bias_grad else None
    return (*grads_qkv, grad_aux, None, None, None, None)


def _restore(saved: Any, kept: Any) -> tuple[Any, ...]:
    q, k, v, seed, _, _, *aux = saved
    return (q, k, v, aux, seed, *kept)


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
    rules: list[Rule] = [
        (kind, a, b, tuple(aux[i : i + 2]) if i >= 0 else ())
        for kind, a, b, i in _groups(mask, _MASK_INTS)
    ]
    bias = _bias_index(score)
    caps = [params[i] for kind, _, i in _groups(score, _SCORE_INTS) if kind == _SOFTCAP]
    result = reference.attention(
        q,
        k,
        v,
        mask=visible(rules, q.shape[1], k.shape[1], q.device, heads=q.shape[2]),
        bias=None if bias is None else aux[bias],
        scale=params[0],
        softcap=caps[0] if caps else 0.0,
        dropout_p=params[1],
        seed=seed,
        return_lse=True,
    )
    assert isinstance(result, tuple)
    return result


#: (q, k, v, aux, seed, mask, score, params) -> (out, lse)
attention = DifferentiableOp(
    "attention", fake=_fake, save=_save, backward=_backward, formula=_formula, restore=_restore
)

loop_over_vmap("attention_backward")
