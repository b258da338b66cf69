"""Changes of the attention logits, encoded for the kernels (csrc/semantics/score.h, spec order)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Bias", "ScoreRule", "Softcap"]

#: kind, side tensor, parameter
ScoreRule = tuple[int, Tensor | None, float | None]


@dataclass(frozen=True)
class Bias:
    """Adds `bias`, broadcastable to (B, Hq, Tq, Tk), after scale and softcap; has a gradient."""

    bias: Tensor

    def rule(self) -> ScoreRule:
        return (0, self.bias, None)


@dataclass(frozen=True)
class Softcap:
    """cap * tanh(logit / cap), before the bias (Gemma 2, arXiv:2408.00118)."""

    cap: float

    def rule(self) -> ScoreRule:
        return (1, None, self.cap)
