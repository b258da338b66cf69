"""The head of a language model: logits, or the loss without logits."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.checks.arguments import widen
from omniattn.modules.base.linear import is_plain

#: Largest number of logits at a time when only the maxima are wanted.
_LOGITS = 1 << 24


class WithHead(Protocol):
    """A model whose head is a layer, or None if tied to the embedding."""

    config: Any
    lm_head: Any

    @property
    def head_weight(self) -> Tensor:
        """Weight (vocab_size, dim) of the head."""


def head_logits(model: WithHead, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Maps hidden states (..., dim) to logits (..., vocab_size), plus `bias` (vocab_size,)."""
    if model.lm_head is None:
        logits = functional.linear(x, model.head_weight, bias, backend=model.config.backend)
    else:
        logits = _of_layer(model, x, bias)
    cap: float = model.config.logit_softcap
    return cap * (logits / cap).tanh() if cap else logits


def _of_layer(model: WithHead, x: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the logits of an untied head."""
    logits: Tensor = model.lm_head(x)
    return logits if bias is None else logits + bias


def head_loss(
    model: WithHead, x: Tensor, targets: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """Returns the loss of states (B, T, dim); options of `functional.linear_cross_entropy`.

    `bias` is as in `head_logits`. A head that is an adapter or has hooks is called and computes
    logits.
    """
    backend = model.config.backend
    options["softcap"] = model.config.logit_softcap
    if model.lm_head is not None and not is_plain(model.lm_head):
        logits = _of_layer(model, x, bias)
        loss = functional.cross_entropy(logits, targets, backend=backend, **options)
        return _wrapped(loss, logits.max(-1).values, model, options)
    weight = model.head_weight
    loss = functional.linear_cross_entropy(
        x, weight, targets, bias=bias, backend=backend, **options
    )
    if model.config.l2_wrap == 0 or not torch.is_grad_enabled():
        return loss
    return _wrapped(loss, _largest_logits(x.flatten(0, -2), weight, bias), model, options)


def _largest_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the largest logit (N,) of each row of x (N, dim), without storing all logits."""
    rows = max(1, _LOGITS // weight.shape[0])
    parts = x.split(rows)
    with torch.no_grad():
        best = torch.cat([nnf.linear(part, weight, bias).argmax(-1) for part in parts])
    largest = (widen(x) * widen(weight[best])).sum(-1)
    return largest if bias is None else largest + widen(bias[best])


def _wrapped(loss: Tensor, largest: Tensor, model: WithHead, options: dict[str, Any]) -> Tensor:
    """Adds the gradient of l2_wrap/2 largest^2 to that of the loss, but not its value."""
    if model.config.l2_wrap == 0:
        return loss
    squares = widen(largest).square()
    total = squares.sum() if options.get("reduction") == "sum" else squares.mean()
    penalty = model.config.l2_wrap / 2 * total
    return loss + (penalty - penalty.detach())
