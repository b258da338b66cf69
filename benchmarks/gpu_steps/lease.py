"""Stages of `gpu.py --lease`, for a GPU that is lent for some minutes, in order of worth."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from gpu_steps.steps import Options

#: Seconds of a lease for which the stages are planned.
SECONDS = 780
#: Ops whose kernels ncu counts.
COUNTED = (
    *("attention", "attention_cached", "moe_experts", "rms_norm", "cross_entropy"),
    *("gated_delta_rule", "selective_scan", "causal_conv1d", "dsa_indexer", "qk_norm_rotary"),
)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A step, its share of a lease in seconds, and its options."""

    step: str
    seconds: int
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


#: Stages in order. What one leaves of its time goes to those after it; the last has the rest.
STAGES = (
    Stage("wrappers", 60, {"timeout": 20.0}),
    Stage("timing", 200, {"seconds": 0.2, "timeout": 20.0, "first": True}),
    Stage("profile", 120, {"ops": COUNTED, "timeout": 30.0, "first": True}),
    Stage("specs", 100, {"timeout": 30.0}),
    Stage("sanitizers", 60, {"sanitizers": ("memcheck", "racecheck"), "timeout": 30.0}),
    Stage("choices", 240, {"seconds": 0.2, "timeout": 20.0, "first": True}),
)


def plan(options: Options, start: float, seconds: float) -> Iterator[tuple[str, Options, float]]:
    """Yields the step, options and end of each stage of a lease of `seconds` from `start` on."""
    used = 0
    for stage in STAGES:
        used += stage.seconds
        given = dict(stage.options)
        given["ops"] = tuple(op for op in given.get("ops", options.ops) if op in options.ops)
        if options.dry_run:
            given.pop("seconds", None)
        given["timeout"] = min(given["timeout"], options.timeout)
        yield stage.step, dataclasses.replace(options, **given), start + seconds * used / SECONDS
