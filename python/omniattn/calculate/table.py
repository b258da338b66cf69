"""All numbers of a model in one record, and as rows of a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from omniattn.calculate.costs import flops, step_cost
from omniattn.calculate.memory import cache_bytes, score_bytes
from omniattn.calculate.parameters import parameters
from omniattn.calculate.roofline import Roofline, decode, prefill
from omniattn.calculate.sources import Source, config_of, dtype_of, require_sizes
from omniattn.calculate.structure import capacity, receptive_field
from omniattn.calculate.trace import meta_model, reads_source
from omniattn.checks.arguments import shown
from omniattn.models import ModelConfig
from omniattn.models.vision import VisionConfig
from omniattn.modules.base.state import Stateful

#: Tokens of a table that gives none, where the model has so many positions.
DEFAULT_CONTEXT = 2048


def report(
    config: Source,
    context: int | None = None,
    *,
    batch: int = 1,
    source_tokens: int | None = None,
    dtype: torch.dtype | str = "bf16",
    peak_flops: float | None = None,
    bandwidth: float | None = None,
) -> dict[str, Any]:
    """Returns all numbers of a model, as values for JSON.

    Args:
        config: a config, the name of a preset, or the path of a Hugging Face config.json.
        context: tokens of a sequence, default 2048 or the number of the model's positions.
        batch: number of sequences.
        source_tokens: tokens of the encoder's sequence in models with a source, default `context`.
        dtype: dtype of weights, caches and scores.
        peak_flops, bandwidth: ceilings for the times, operations and bytes per second; both or
            none.

    Example:
        >>> report("llama-3-8b", 32768)["cache"]["total"] / 2**30
        4.0
    """
    found, storage = config_of(config), dtype_of(dtype)
    if context is None:
        context = min(DEFAULT_CONTEXT, found.longest or DEFAULT_CONTEXT)
    require_sizes("report", context=context, batch=batch)
    if (peak_flops is None) != (bandwidth is None):
        raise ValueError(
            "report: peak_flops and bandwidth must be given together, "
            f"got peak_flops={peak_flops}, bandwidth={bandwidth}"
        )
    source = _source_tokens(found, context, source_tokens)
    counts = parameters(found)
    costs = flops(found, context, batch=batch, source_tokens=source)
    scores = score_bytes(found, context, batch=batch, dtype=storage, source_tokens=source)
    result: dict[str, Any] = {
        "architecture": found.architecture,
        "context": context,
        "batch": batch,
        "dtype": str(storage).removeprefix("torch."),
        "parameters": {"total": counts.total, "active": counts.active, "parts": counts.parts},
        "weight_bytes": counts.total * storage.itemsize,
        "flops": {
            "forward": costs.forward,
            "backward": costs.backward,
            "training": costs.training,
            "weights": costs.weights,
            "scores": costs.scores,
            "states": costs.states,
            "pairs": costs.pairs,
        },
        "scores": {"largest": scores.largest, "total": scores.total},
    }
    if source is not None:
        result["source"] = source
    if not isinstance(found, VisionConfig):
        result["receptive_field"] = receptive_field(found, context).tokens
    result |= _generation(found, context, batch, source, storage)
    loads = capacity(found, batch * context)
    if loads:
        name, load = next(iter(loads.items()))
        result["experts"] = {"layers": len(loads), "first": name, **vars(load)}
    if peak_flops is not None and bandwidth is not None:
        ceilings = {"peak_flops": peak_flops, "bandwidth": bandwidth}
        result["roofline"] = _rooflines(found, context, batch, storage, ceilings)
    return result


def _source_tokens(config: ModelConfig, context: int, given: int | None) -> int | None:
    """Returns the tokens of the encoder's sequence, or None for a model without a source."""
    if reads_source(meta_model(config)):
        return context if given is None else given
    if given is not None:
        raise ValueError(
            "report: source_tokens must be None for a model without an encoder of a source, "
            f"got source_tokens={shown(given)}"
        )
    return None


def _is_decoder(config: ModelConfig) -> bool:
    model = meta_model(config)
    return isinstance(model, Stateful) and not hasattr(model, "encoder")


def _generation(
    config: ModelConfig, context: int, batch: int, source: int | None, dtype: torch.dtype
) -> dict[str, Any]:
    """Returns the numbers that only models that generate have: caches, and costs of a step."""
    if not isinstance(meta_model(config), Stateful):
        return {}
    cache = cache_bytes(config, context, batch=batch, dtype=dtype, source_tokens=source)
    found: dict[str, Any] = {"cache": dict(vars(cache))}
    if _is_decoder(config):
        step = step_cost(config, context - 1, batch=batch)
        found["step"] = {"cached": step.cached, "uncached": step.uncached, "ratio": step.ratio}
    return found


def _rooflines(
    config: ModelConfig, context: int, batch: int, dtype: torch.dtype, ceilings: dict[str, float]
) -> dict[str, Any]:
    """Returns the times of a forward and of a step, where the model has caches."""
    if not _is_decoder(config):
        return {}

    def shown(found: Roofline) -> dict[str, Any]:
        return dict(vars(found))

    return {
        "prefill": shown(prefill(config, context, batch=batch, dtype=dtype, **ceilings)),
        "decode": shown(decode(config, context - 1, batch=batch, dtype=dtype, **ceilings)),
    }


def rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the rows (name, value) of a `report`."""
    counts, costs = found["parameters"], found["flops"]
    yield "architecture", found["architecture"]
    if "source" in found:
        yield "source", f"{found['source']:,} tokens"
    yield "parameters", f"{counts['total']:,} ({scaled(counts['total'])})"
    if counts["active"] != counts["total"]:
        yield "  active", f"{counts['active']:,} ({scaled(counts['active'])})"
    for part, count in counts["parts"].items():
        yield f"  {part}", f"{count:,} ({count / max(counts['total'], 1):.1%})"
    yield "weights", f"{binary(found['weight_bytes'])} in {found['dtype']}"
    yield "forward", f"{scaled(costs['forward'])}FLOP"
    for part in ("weights", "scores", "states"):
        if costs[part]:
            yield f"  {part}", f"{scaled(costs[part])}FLOP ({costs[part] / costs['forward']:.1%})"
    yield "training step", f"{scaled(costs['training'])}FLOP"
    if "cache" in found:
        cache = found["cache"]
        yield "cache", binary(cache["total"])
        yield "  per token", f"{cache['per_token']:,} bytes"
        sizes = Counter(cache["layers"]).items()
        yield "  layers", ", ".join(f"{count} x {binary(size)}" for size, count in sizes)
    if found["scores"]["largest"]:
        yield "score matrix", f"{binary(found['scores']['largest'])} per layer, if stored"
    if "receptive_field" in found:
        yield "receptive field", f"{found['receptive_field']:,} tokens"
    if "step" in found:
        step = found["step"]
        yield "last token", f"{scaled(step['cached'])}FLOP with a cache"
        yield "  without", f"{scaled(step['uncached'])}FLOP ({step['ratio']:,.0f}x)"
    if "experts" in found:
        e = found["experts"]
        limit = "no limit" if e["capacity"] is None else f"at most {e['capacity']:,}"
        yield "experts", f"{e['top_k']} of {e['experts']} in {e['layers']} layers"
        yield "  load", f"{e['even']:,.1f} tokens each if even, {limit}"
    if "mesh" in found:
        rank = found["mesh"]
        yield "rank of a mesh", f"1 of {rank['ranks']:,}"
        yield "  parameters", f"{rank['parameters']:,} ({scaled(rank['parameters'])})"
        yield "  state", f"{binary(rank['state_bytes'])}, with gradients and AdamW's moments"
        yield "  peak", f"{binary(rank['peak_bytes'])}, with activations and gathered weights"
        for kind, size in rank["traffic"].items():
            yield f"  sends, {kind}", f"{binary(size)} per step"
        for kind, seconds in rank["seconds"].items():
            yield f"  time, {kind}", f"{seconds * 1e3:,.3f} ms"
    for name, roof in found.get("roofline", {}).items():
        yield name, f"{roof['seconds'] * 1e3:,.3f} ms, {roof['bound']}-bound"
        yield "  intensity", f"{roof['intensity']:,.1f} FLOP/byte (ridge {roof['ridge']:,.1f})"


def scaled(number: float) -> str:
    """Returns a number with three digits and a decimal prefix: 8.03 G.

    Example:
        >>> scaled(8_030_261_248)
        '8.03 G'
    """
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(number) < 999.5:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} E"


def binary(size: float) -> str:
    """Returns bytes with a binary prefix: 4.00 GiB.

    Example:
        >>> binary(4 * 2**30)
        '4 GiB'
    """
    for prefix in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {prefix}"
        size /= 1024
    return f"{size:.4g} TiB"
