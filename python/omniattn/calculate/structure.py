"""Receptive field of a model, and capacity of its experts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from omniattn import functional
from omniattn.calculate.sources import Source, config_of, require_sizes
from omniattn.calculate.trace import Call, forward_calls, meta_model
from omniattn.checks.arguments import require_number
from omniattn.models.vision import VisionConfig
from omniattn.modules import MoE


@dataclass(frozen=True)
class ReceptiveField:
    """Tokens that the last output of a model depends on.

    Args:
        tokens: number of these tokens, the last one included.
        layers: distance of the farthest token that each layer reads, by layer.
    """

    tokens: int
    layers: tuple[int, ...]


def receptive_field(config: Source, tokens: int) -> ReceptiveField:
    """Returns how far back the last token of a sequence reaches through all layers.

    ``min(T, 1 + sum over layers of their reach)``: W - 1 for a window of W keys with the query's
    own, K - 1 for a convolution of K taps, T - 1 for full attention and recurrences.

    Args:
        config: a decoder or encoder: a config, the name of a preset, or a path.
        tokens: T, length of the sequence.

    Example:
        >>> receptive_field("samba", 1000).tokens
        1000
    """
    require_sizes("receptive_field", tokens=tokens)
    found = config_of(config)
    if isinstance(found, VisionConfig):
        raise NotImplementedError(
            f"receptive_field: config must be of a model of text, got {type(found).__name__}"
        )
    layers: dict[str, list[Call]] = {}
    for call in forward_calls(found, tokens):
        name = re.match(r"(?:\w+\.)?(layers|attentions|mlps)\.\d+", call.module)
        if name is not None and call.cost.reach is not None:
            layers.setdefault(name[0], []).append(call)
    reaches = tuple(_reach(calls, tokens) for calls in layers.values())
    return ReceptiveField(min(tokens, 1 + sum(reaches)), reaches)


def _reach(calls: list[Call], tokens: int) -> int:
    """Returns the distance that a layer reaches: that of its mixer, plus that of convolutions."""
    taps = [c.cost.reach or 0 for c in calls if c.op.startswith("causal_conv1d")]
    others = [c.cost.reach or 0 for c in calls if not c.op.startswith("causal_conv1d")]
    if -1 in others:
        return tokens - 1
    return min(tokens - 1, max(taps, default=0) + max(others, default=0))


@dataclass(frozen=True)
class Capacity:
    """Load of the experts of a layer.

    Args:
        experts: number of experts, E.
        top_k: experts of a token.
        even: assignments of an expert if all have the same number, tokens k / E.
        capacity: most assignments that an expert accepts, or None without a limit.
        slots: assignments that all experts accept, or all assignments without a limit.
    """

    experts: int
    top_k: int
    even: float
    capacity: int | None
    slots: int


def capacity(
    config: Source, tokens: int, *, capacity_factor: float | None = None
) -> dict[str, Capacity]:
    """Returns the capacity of the experts of each MoE layer, by the name of the layer.

    ``C = min(n, max(1, ceil(factor k n / E)))`` of n tokens, see `functional.expert_capacity`.

    Args:
        config: a config, the name of a preset, or the path of a Hugging Face config.json.
        tokens: n, number of tokens that are routed together.
        capacity_factor: factor in place of that of the routers; these have None for no limit.

    Example:
        >>> list(capacity("switch", 256).values())[0].capacity
        40
    """
    require_sizes("capacity", tokens=tokens)
    if capacity_factor is not None:
        require_number("capacity", "capacity_factor", capacity_factor, 0)
    found = {}
    for name, layer in meta_model(config_of(config)).named_modules():
        if not isinstance(layer, MoE):
            continue
        gate = layer.config.gate
        factor = gate.capacity_factor if capacity_factor is None else capacity_factor
        limit = gate.capacity if capacity_factor is None else None
        if limit is None and factor is not None:
            limit = functional.expert_capacity(tokens, gate.experts, gate.top_k, factor)
        assignments = tokens * gate.top_k
        slots = assignments if limit is None else limit * gate.experts
        even = assignments / gate.experts
        found[name] = Capacity(gate.experts, gate.top_k, even, limit, slots)
    return found
