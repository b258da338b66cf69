"""Floating-point operations of a forward, of training, and of one step of generation."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from omniattn.calculate.sources import Source, config_of, require_sizes
from omniattn.calculate.trace import Call, forward_calls, meta_model, trace
from omniattn.checks.arguments import require_choice, require_int
from omniattn.models import EncoderDecoder, Model, ModelConfig
from omniattn.modules.base.state import Stateful


@dataclass(frozen=True)
class Flops:
    """Floating-point operations; a multiply-add is two.

    Args:
        forward: of one forward.
        backward: of the gradients of inputs and weights, 2 forward; 3 with recomputation.
        weights: part of `forward` that multiplies with weights.
        scores: part of `forward` over pairs of tokens: attention and selection of keys.
        states: part of `forward` in recurrences and convolutions.
        modules: `forward` by the innermost module, by its name in `named_modules`.
        pairs: visible pairs of all attention calls, summed over heads and the batch.
    """

    forward: int
    backward: int
    weights: int
    scores: int
    states: int
    modules: dict[str, int]
    pairs: int

    @property
    def training(self) -> int:
        """Forward and backward."""
        return self.forward + self.backward


def flops(
    config: Source,
    tokens: int,
    *,
    batch: int = 1,
    source_tokens: int | None = None,
    pairs: str = "exact",
    recompute: bool = False,
) -> Flops:
    """Counts the operations of a model, from its ops on the meta device.

    ``forward = 2 T P_mm + sum over layers of 2 Hq (D + Dv) pairs``, with P_mm the weights that a
    token multiplies (its experts and the head, not the embedding).

    Args:
        config: a config, the name of a preset, or the path of a Hugging Face config.json.
        tokens: T, tokens of a sequence; images have their own number.
        batch: number of sequences.
        source_tokens: tokens of the encoder's sequence, default `tokens`.
        pairs: "exact", ``sum_i |N(i)|`` of each mask, or "dense", Tq Tk as eager attention does.
        recompute: count a second forward in the backward (activation checkpointing).

    Example:
        >>> flops("gpt2-small", 1024, pairs="dense").forward
        291648307200
        >>> flops("gpt2-small", 1024).forward
        272339828736
    """
    require_sizes("flops", tokens=tokens, batch=batch)
    require_choice("flops", "pairs", pairs, ("exact", "dense"))
    if source_tokens is not None:
        require_sizes("flops", source_tokens=source_tokens)
    calls = forward_calls(config_of(config), tokens, batch, source_tokens)
    return _summed(calls, dense=pairs == "dense", recompute=recompute)


def _summed(calls: Iterable[Call], *, dense: bool = False, recompute: bool = False) -> Flops:
    kinds = {"weights": 0, "scores": 0, "states": 0}
    modules: dict[str, int] = {}
    pairs = 0
    for call in calls:
        count = call.cost.dense if dense else call.cost.flops
        kind = "weights" if call.cost.reach is None else "states"
        kinds["scores" if call.cost.scores else kind] += count
        modules[call.module] = modules.get(call.module, 0) + count
        pairs += call.cost.scores if dense else call.cost.pairs
    forward = sum(kinds.values())
    return Flops(forward, (3 if recompute else 2) * forward, **kinds, modules=modules, pairs=pairs)


@dataclass(frozen=True)
class StepCost:
    """Cost of the token at position t.

    Args:
        cached: operations of this token with the states of those before it.
        uncached: operations of a forward of all t + 1 tokens.
        modules: `cached` by the innermost module.
    """

    cached: int
    uncached: int
    modules: dict[str, int]

    @property
    def ratio(self) -> float:
        """Returns how often the cost with a cache fits into the cost without."""
        return self.uncached / self.cached


def step_cost(config: Source, step: int, *, batch: int = 1) -> StepCost:
    """Counts the operations of generating the token at position `step`, with and without a cache.

    The layers run as they do in `generate`; latent attention absorbs its projections.

    Args:
        config: a decoder: a config, the name of a preset, or a path, as in `flops`.
        step: t, number of tokens before this one.
        batch: number of sequences.

    Example:
        >>> cost = step_cost("llama-test", 100)
        >>> cost.uncached > 50 * cost.cached
        True
    """
    require_int("step_cost", "step", step, 0)
    require_sizes("step_cost", batch=batch)
    found = config_of(config)
    cached = _summed(_step_calls(found, step, batch))
    uncached = _summed(forward_calls(found, step + 1, batch)).forward
    return StepCost(cached.forward, uncached, cached.modules)


@functools.lru_cache(maxsize=16)
def _step_calls(config: ModelConfig, step: int, batch: int) -> tuple[Call, ...]:
    model = meta_model(config)
    if isinstance(model, EncoderDecoder):
        raise NotImplementedError(
            f"step_cost: config must be of a decoder alone, got {type(config).__name__}"
        )
    states = new_states("step_cost", model, batch, step + 1)
    tokens, token = (torch.zeros(batch, n, dtype=torch.long, device="meta") for n in (step, 1))
    if step:
        with torch.no_grad():
            model(tokens, state=states)
    return tuple(trace(model, lambda: model(token, state=states)))


def new_states(op: str, model: Model, batch: int, max_length: int) -> list[Any]:
    """Returns the states of a model's layers before the first token."""
    if not isinstance(model, Stateful):
        raise NotImplementedError(
            f"{op}: config must be of a model that generates, got {type(model.config).__name__}"
        )
    states: list[Any] = model.new_state(batch, max_length)
    return states
