"""Widths of models under one budget of parameters or operations."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from omniattn import calculate
from omniattn.compare.mixers import KINDS, Candidate, Frame
from omniattn.compare.settings import Settings
from omniattn.models import ModelConfig

#: Largest relative difference from the budget.
TOLERANCE = 0.02
#: Hidden width of the reference model's MLPs, relative to its width.
_HIDDEN = 8 / 3
#: Narrowest channel mixer, and width that every model's dim is a multiple of, per head.
_LEAST, _STEP = 8, 4


@dataclass(frozen=True)
class Sized:
    """Model that meets a budget.

    Args:
        name: name of the model.
        config: config of the decoder.
        length: tokens of a sequence.
        version: identifies the code of a user's mixer.
    """

    name: str
    config: ModelConfig
    length: int
    version: str = ""

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return int(amount(self.config, "params", self.length))

    @property
    def flops(self) -> float:
        """Operations of a training step per token."""
        return amount(self.config, "flops", self.length)


class BudgetError(ValueError):
    """Raised if no width of a model meets the budget."""


@functools.lru_cache(maxsize=512)
def amount(config: ModelConfig, budget: str, length: int) -> float:
    """Returns the parameters, or the operations of training per token."""
    if budget == "params":
        return calculate.param_count(config)
    return calculate.flops(config, length).training / length


def target(settings: Settings, frame: Frame, length: int) -> float:
    """Returns the parameters or operations that every model must have."""
    if settings.size is not None:
        return settings.size
    reference = Candidate("llama", (KINDS["llama"],))
    return amount(reference.config(frame, round(_HIDDEN * frame.dim)), settings.budget, length)


def solve(candidate: Candidate, settings: Settings, frame: Frame, length: int) -> Sized:
    """Finds the widths with which a model meets the budget within 2 %.

    The hidden width of the channel mixers is solved for the widest model of at most `frame.dim`
    whose channel mixers are at least as wide as the model, or else for the narrowest.

    Raises:
        BudgetError: no widths meet the budget.
    """
    wanted, budget = target(settings, frame, length), settings.budget
    step = _STEP * frame.heads
    found = None
    for dim in range(frame.dim, 0, -step):
        narrow = replace(frame, dim=dim)
        low, high = (amount(candidate.config(narrow, hidden), budget, length) for hidden in (8, 16))
        hidden = 8 + round((wanted - low) * 8 / (high - low))
        if hidden < _LEAST:
            continue
        config = candidate.config(narrow, hidden)
        if abs(amount(config, budget, length) / wanted - 1) <= TOLERANCE:
            found = config
            if hidden >= dim:
                break
    if found is None:
        smallest = amount(candidate.config(replace(frame, dim=step), _LEAST), budget, length)
        unit = "parameters" if budget == "params" else "operations per token"
        raise BudgetError(
            f"compare: {candidate.name} cannot have {wanted:,.0f} {unit} within "
            f"{TOLERANCE:.0%} with dim <= {frame.dim}, heads={frame.heads} and "
            f"layers={frame.layers}; its smallest size is {smallest:,.0f}"
        )
    return Sized(candidate.name, found, length, candidate.version)
