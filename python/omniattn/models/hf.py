"""Maps an architecture to transformers: option names, weight names and weight layouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: transformers' synonym of an activation -> our name.
SYNONYMS = {"swish": "silu"}
#: Fields of transformers' configs with ids of special tokens.
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


@dataclass(frozen=True)
class Conversion:
    """Converts options that have another form in transformers.

    Args:
        to_hf: our config -> their options.
        from_hf: their config -> our options.
    """

    to_hf: Callable[[Any], dict[str, Any]]
    from_hf: Callable[[PreTrainedConfig], dict[str, Any]]


#: Pairs of a pattern and a replacement for `re.sub`.
Renames: TypeAlias = Sequence[tuple[str, str | Callable[[re.Match[str]], str]]]


@dataclass(frozen=True)
class Counterpart:
    """Correspondence between an architecture and its transformers model.

    Args:
        model: name of transformers' class.
        options: our option name -> theirs.
        weights: (pattern, replacement) pairs for `re.sub`, applied in order to our weight names.
            Our weights that map to the same name are stacked into one of theirs. A name with
            `{a,b}` stands for two of their weights.
        unused: pattern of their weights that do not affect the outputs of our model.
        layer_weights: computes the pairs that depend on our config, applied before `weights`.
        interleaved: pattern of their weights -> function that computes a number of groups from our
            config. Such a weight holds for each group, in turn, that group's rows of each of our
            weights that map to it, such as the queries, keys and values of a head.
        transposed: pattern of their weights whose last two dimensions are swapped.
        complemented: pattern of their weights that are 1 minus ours.
        require: raises if their model is in a form that cannot be converted.
        alternating: pattern of their weights whose rows belong in turn to the first and to the
            second half of ours.
        fixed: their other options, with the value that our model implies or a function that
            computes it from our config.
        conversions: conversions of the remaining options.
    """

    model: str
    options: Mapping[str, str]
    weights: Renames
    transposed: str = "^$"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    conversions: Sequence[Conversion] = ()
    interleaved: Mapping[str, Callable[[Any], int]] = field(default_factory=dict)
    unused: str = "^$"
    layer_weights: Callable[[Any], Renames] = lambda ours: ()
    complemented: str = "^$"
    alternating: str = "^$"
    require: Callable[[Any], None] = lambda theirs: None

    @property
    def config_class(self) -> Any:
        """Config class of `model`."""
        import transformers

        return getattr(transformers, self.model).config_class

    def required(self, ours: Any) -> dict[str, Any]:
        """Returns the options that their config must have for an equivalent model."""
        named = {theirs: getattr(ours, name) for name, theirs in self.options.items()}
        fixed = {name: v(ours) if callable(v) else v for name, v in self.fixed.items()}
        return named | fixed

    def to_hf(self, ours: Any) -> dict[str, Any]:
        """Converts our config to their options."""
        values = self.required(ours)
        for conversion in self.conversions:
            values |= conversion.to_hf(ours)
        return values

    def from_hf(self, theirs: PreTrainedConfig) -> dict[str, Any]:
        """Converts their config to our options."""
        values = {ours: getattr(theirs, name) for ours, name in self.options.items()}
        for conversion in self.conversions:
            values |= conversion.from_hf(theirs)
        return values

    def pairs(self, ours: nn.Module, theirs: nn.Module) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Returns groups of weights on both sides that are equal when stacked.

        Those of `complements` are 1 minus each other instead.

        Raises:
            NotImplementedError: if theirs has further weights, or cannot be converted.
        """
        state = ours.state_dict()
        groups = self.groups(ours, theirs)
        return [([state[name] for name in names], sources) for names, sources in groups]

    def groups(self, ours: nn.Module, theirs: nn.Module) -> list[tuple[list[str], list[Tensor]]]:
        """Returns `pairs` with the names of our weights in place of the weights."""
        self.require(theirs)
        config: Any = ours.config
        our_state, their_state = ours.state_dict(), theirs.state_dict()
        names = self.renamed(ours)
        known = {their_state[n].data_ptr() for renamed in names for n in _alternatives(renamed)}
        # Tied weights share one address under two names.
        further = [
            name
            for name, t in their_state.items()
            if t.data_ptr() not in known and not re.search(self.unused, name)
        ]
        if further:
            raise NotImplementedError(f"{self.model}: weights must be known, got {further}")

        def oriented(name: str) -> Tensor:
            weight = their_state[name]
            if re.search(self.alternating, name):
                return weight.unflatten(0, (-1, 2)).transpose(0, 1)
            return weight.mT if re.search(self.transposed, name) else weight

        found: list[tuple[list[str], list[Tensor]]] = []
        for renamed, our_names in names.items():
            parts = [oriented(name) for name in _alternatives(renamed)]
            if (count := self._groups_of(renamed, config)) is None:
                found.append((our_names, parts))
                continue
            sizes = [our_state[name].shape[0] // count for name in our_names]
            rows = parts[0].unflatten(0, (count, -1)).split(sizes, 1)
            found += [([name], [part]) for name, part in zip(our_names, rows, strict=True)]
        return found

    def renamed(self, ours: nn.Module) -> dict[str, list[str]]:
        """Returns their names of weights, and the names of ours that each is made of."""
        pairs = (*self.layer_weights(ours.config), *self.weights)
        names: dict[str, list[str]] = {}
        for name in ours.state_dict():
            renamed = name
            for pattern, replacement in pairs:
                renamed = re.sub(pattern, replacement, renamed)
            names.setdefault(renamed, []).append(name)
        return names

    def complements(self, ours: nn.Module) -> list[tuple[str, str]]:
        """Returns the names, ours and theirs, of weights that are 1 minus each other."""
        pairs = ((our, name) for name, names in self.renamed(ours).items() for our in names)
        return [pair for pair in pairs if re.search(self.complemented, pair[1])]

    def _groups_of(self, name: str, config: Any) -> int | None:
        """Returns the number of groups of an interleaved weight of theirs, else None."""
        counts = self.interleaved.items()
        return next((count(config) for key, count in counts if re.search(key, name)), None)


@torch.no_grad()
def copied(sources: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
    """Returns copies of the sources in the shapes and dtypes of the targets."""
    whole = sources[0] if len(sources) == 1 else torch.cat(sources)
    parts = whole.chunk(len(targets)) if len(targets) > 1 else (whole,)
    pairs = zip(parts, targets, strict=True)
    return [
        torch.empty(like.shape, dtype=like.dtype, device=part.device).copy_(
            part.reshape(like.shape)
        )
        for part, like in pairs
    ]


@torch.no_grad()
def copy_weights(sources: list[Tensor], targets: list[Tensor]) -> None:
    """Copies one side of a pair of `Counterpart.pairs` to the other."""
    stacked = torch.cat([torch.atleast_1d(source) for source in sources])
    for target, part in zip(targets, stacked.chunk(len(targets)), strict=True):
        target.copy_(part.reshape(target.shape))


@torch.no_grad()
def complement(weights: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Replaces the weights of these names by 1 minus each, in place."""
    for name in names:
        weights[name].neg_().add_(1)


def _alternatives(name: str) -> list[str]:
    before, brace, rest = name.partition("{")
    if not brace:
        return [name]
    middle, _, after = rest.partition("}")
    return [f"{before}{part}{after}" for part in middle.split(",")]
