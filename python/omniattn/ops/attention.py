"""attention: fakes, gradients and the recompute formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omniattn import reference
from omniattn.ops._autograd import DifferentiableOp, loop_over_vmap
from omniattn.reference.masks import Rule, visible
from omniattn.reference.scores import TABLES, ScoreKind

__all__ = ["attention"]

_backward_op = torch.ops.omniattn.attention_backward.default

# Encodings, as decoded by csrc/ops/attention.h.
_MASK_INTS = 4  # kind, a, b, index of the first side tensor in aux
_SCORE_INTS = 3  # kind, aux index, index of the first parameter in params


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _groups(codes: Sequence[int], size: int) -> list[Sequence[int]]:
    return [codes[i : i + size] for i in range(0, len(codes), size)]


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
    q, k, v, seed, out, lse, *aux = saved
    grad_out, grad_lse = grads
    if grad_out is None:
        if grad_lse is None:
            return (None,) * 8
        grad_out = torch.zeros_like(out)
    wanted = [i for i in range(len(aux)) if needs[3][i]]
    *grads_qkv, found = _backward_op(
        grad_out, grad_lse, q, k, v, aux, seed, out, lse, *kept, wanted
    )
    grad_aux: list[Tensor | None] = [None] * len(aux)
    for i, grad in zip(wanted, found, strict=True):
        grad_aux[i] = grad
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
    options: dict[str, Any] = {}
    for kind, i, at in _groups(score, _SCORE_INTS):
        options |= _option(ScoreKind(kind), aux[i] if i >= 0 else None, params[at : at + 2])
    result = reference.attention(
        q,
        k,
        v,
        mask=visible(rules, q.shape[1], k.shape[1], q.device, heads=q.shape[2]),
        scale=params[0],
        dropout_p=params[1],
        seed=seed,
        return_lse=True,
        **options,
    )
    assert isinstance(result, tuple)
    return result


@dataclass(frozen=True)
class _Relative:
    """A table rule as the reference takes it."""

    kind: int
    table: Tensor | None
    parameters: tuple[float, ...]

    def rule(self) -> tuple[int, Tensor | None, tuple[float, ...]]:
        return (self.kind, self.table, self.parameters)


def _option(kind: ScoreKind, tensor: Tensor | None, parameters: Sequence[float]) -> dict[str, Any]:
    """A score rule as an argument of the reference."""
    if kind == ScoreKind.SOFTCAP:
        return {"softcap": parameters[0]}
    if kind in (ScoreKind.SIGMOID, ScoreKind.RELU2):
        return {"normaliser": kind.name.lower()}
    if kind in TABLES:
        return {"relative": _Relative(kind, tensor, tuple(parameters))}
    return {kind.name.lower(): tensor}


#: (q, k, v, aux, seed, mask, score, params) -> (out, lse)
attention = DifferentiableOp(
    "attention", fake=_fake, save=_save, backward=_backward, formula=_formula, restore=_restore
)

loop_over_vmap("attention_backward")
