"""The head of a language model: logits, or the loss without logits."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from omniattn import functional
from omniattn.modules.base.linear import is_plain


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
        return functional.cross_entropy(logits, targets, backend=backend, **options)
    return functional.linear_cross_entropy(
        x, model.head_weight, targets, bias=bias, backend=backend, **options
    )
