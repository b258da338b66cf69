"""Maps an architecture to transformers: names of its options, names and layouts of its weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Other names in transformers of an activation.
SYNONYMS = {"swish": "silu"}
#: Ids of special tokens, which configs of transformers carry.
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


@dataclass(frozen=True)
class Conversion:
    """Options that have another form in transformers.

    Args:
        to_hf: makes their options from our config.
        from_hf: makes our options from their config.
    """

    to_hf: Callable[[Any], dict[str, Any]]
    from_hf: Callable[[PreTrainedConfig], dict[str, Any]]


@dataclass(frozen=True)
class Counterpart:
    """The names of an architecture in transformers.

    Args:
        model: its class.
        options: of its config, ours -> theirs.
        weights: (pattern, replacement) for `re.sub`, applied in turn to the name of a weight of
            ours. Our weights that get the same name are stacked into one of theirs. A name with
            `{a,b}` stands for two of their weights.
        transposed: pattern of their weights that are (in, out).
        fixed: further options of theirs, with the value that our model implies or a function that
            computes it from our config.
        conversions: of the other options.
    """

    model: str
    options: Mapping[str, str]
    weights: Sequence[tuple[str, str | Callable[[re.Match[str]], str]]]
    transposed: str = "^$"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    conversions: Sequence[Conversion] = ()

    @property
    def config_class(self) -> Any:
        """The class of the configs of `model`."""
        import transformers

        return getattr(transformers, self.model).config_class

    def required(self, ours: Any) -> dict[str, Any]:
        """Options that their config must have to compute the same as ours."""
        named = {theirs: getattr(ours, name) for name, theirs in self.options.items()}
        fixed = {name: v(ours) if callable(v) else v for name, v in self.fixed.items()}
        return named | fixed

    def to_hf(self, ours: Any) -> dict[str, Any]:
        """Returns all of their options for our config."""
        values = self.required(ours)
        for conversion in self.conversions:
            values |= conversion.to_hf(ours)
        return values

    def from_hf(self, theirs: PreTrainedConfig) -> dict[str, Any]:
        """Returns our options for their config."""
        values = {ours: getattr(theirs, name) for ours, name in self.options.items()}
        for conversion in self.conversions:
            values |= conversion.from_hf(theirs)
        return values

    def pairs(self, ours: nn.Module, theirs: nn.Module) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Groups of weights on both sides that hold the same numbers when stacked.

        Raises:
            NotImplementedError: where theirs has further weights.
        """
        our_state, their_state = ours.state_dict(), theirs.state_dict()
        names: dict[str, list[str]] = {}
        for name in our_state:
            renamed = name
            for pattern, replacement in self.weights:
                renamed = re.sub(pattern, replacement, renamed)
            names.setdefault(renamed, []).append(name)
        known = {their_state[n].data_ptr() for renamed in names for n in _alternatives(renamed)}
        # A tied weight is at one address under two names.
        further = [name for name, t in their_state.items() if t.data_ptr() not in known]
        if further:
            raise NotImplementedError(f"{self.model}: weights must be known, got {further}")

        def oriented(name: str) -> Tensor:
            weight = their_state[name]
            return weight.T if re.search(self.transposed, name) else weight

        return [
            ([our_state[n] for n in our_names], [oriented(n) for n in _alternatives(renamed)])
            for renamed, our_names in names.items()
        ]


@torch.no_grad()
def copy_weights(sources: list[Tensor], targets: list[Tensor]) -> None:
    """Copies one side of a pair of `Counterpart.pairs` to the other one."""
    for target, part in zip(targets, torch.cat(sources).chunk(len(targets)), strict=True):
        target.copy_(part.reshape(target.shape))


def _alternatives(name: str) -> list[str]:
    before, brace, rest = name.partition("{")
    if not brace:
        return [name]
    middle, _, after = rest.partition("}")
    return [f"{before}{part}{after}" for part in middle.split(",")]
