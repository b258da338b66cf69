"""Rows of goals.py for the scans of Mamba and Mamba-2: against a loop in torch and transformers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from baselines import BASELINES
from goal_rows import PASSES, Row, provider, tensors
from torch.nn import functional as F

from omniattn import functional


def _selective(batch: int, steps: int) -> dict[str, torch.Tensor]:
    """A layer of Mamba of width 768."""
    channels, states = 1536, 16
    row = (batch, steps, channels)
    u, delta, z, B, C = tensors(row, row, row, *[(batch, steps, states)] * 2)
    A = -torch.arange(1.0, states + 1).expand(channels, states).contiguous()
    bias = torch.full((channels,), -4.0)
    named = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": torch.ones(channels)}
    return named | {"z": z, "delta_bias": bias}


def selective_rows() -> Iterator[Row]:
    named = _selective(1, 1024)
    names = {"aten": "a loop over the tokens", "hf": "transformers without kernels"}
    goals = {("forward", "aten"): 15, ("forward+backward", "aten"): 40, ("forward", "hf"): 95}
    for (pass_, other), times in goals.items():
        theirs = BASELINES["selective_scan"][other]
        yield Row(
            "selective scan L1024 E1536 N16",
            pass_,
            provider(pass_, named, functional.selective_scan, delta_softplus=True),
            provider(pass_, named, theirs, delta_softplus=True),
            names[other],
            1 / times,
        )


def _dual(batch: int, steps: int, heads: int, states: int) -> dict[str, torch.Tensor]:
    x, dt, B, C, A = tensors(
        (batch, steps, heads, 64), (batch, steps, heads), *[(batch, steps, 1, states)] * 2, (heads,)
    )
    return {"x": x, "dt": F.softplus(dt - 4), "A": -A.exp(), "B": B, "C": C, "D": torch.ones(heads)}


def dual_rows() -> Iterator[Row]:
    theirs = BASELINES["ssd"]["hf"]
    for states, forward in ((64, 10), (128, 9)):
        named = _dual(1, 2048, 8, states)
        for pass_ in PASSES:
            yield Row(
                f"ssd T2048 H8 P64 N{states}",
                pass_,
                provider(pass_, named, functional.ssd),
                provider(pass_, named, theirs),
                "transformers' chunks",
                1 / (forward if pass_ == "forward" else 6),
            )


def step_rows() -> Iterator[Row]:
    """One token of eight sequences, with the state before it."""
    named = _selective(8, 1) | {"initial_state": torch.randn(8, 1536, 16)}
    state = torch.randn(8, 24, 128, 64).mT  # as a layer keeps it
    dual = _dual(8, 1, 24, 128) | {"initial_state": state}
    calls = {"selective_scan": (named, "hf"), "ssd": (dual, "hf")}
    for op, (given, other) in calls.items():
        yield Row(
            f"{op} step B8",
            "forward",
            provider("forward", given, getattr(functional, op)),
            provider("forward", given, BASELINES[op][other]),
            "transformers' step",
            1 / 15,
        )


def rows() -> Iterator[Row]:
    yield from selective_rows()
    yield from dual_rows()
    yield from step_rows()
