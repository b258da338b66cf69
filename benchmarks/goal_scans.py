"""Rows of goals.py for the scans of Mamba and Mamba-2: against a loop in torch and transformers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from baselines import BASELINES
from goal_rows import PASSES, Row, provider, tensors
from torch.nn import functional as F

from omniattn import functional
from omniattn.models import Mamba2Config


def _selective(batch: int, steps: int, channels: int = 1536) -> dict[str, torch.Tensor]:
    """A layer of Mamba, by default of width 768."""
    states = 16
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


def length_rows() -> Iterator[Row]:
    """Time per token: flat from 1k to 64k tokens."""
    short = 1024
    for length in (4096, 16384, 65536):
        for name, make in (
            ("selective scan E256 N16", lambda t: _selective(1, t, 256)),
            ("ssd H4 P64 N64", lambda t: _dual(1, t, 4, 64)),
        ):
            call = functional.ssd if name.startswith("ssd") else functional.selective_scan
            for pass_ in PASSES:
                yield Row(
                    f"{name} T{length}",
                    pass_,
                    provider(pass_, make(length), call),
                    provider(pass_, make(short), call),
                    f"the same at T{short}, per token",
                    1.1,
                    share=length / short,
                )


def training_rows() -> Iterator[Row]:
    """A step of two layers of Mamba-2 on 1024 tokens, without the optimiser."""
    config = Mamba2Config(vocab_size=256, dim=768, num_layers=2)
    ours = config.build()
    theirs, tokens = ours.to_hf(), torch.randint(256, (1, 1025))

    def step() -> None:
        ours(tokens[:, :-1], tokens[:, 1:]).backward()

    def yardstick() -> None:
        theirs(tokens, labels=tokens).loss.backward()

    yield Row(
        "training step, 2 layers of Mamba-2, D768 T1024",
        "forward+backward",
        step,
        yardstick,
        "transformers without kernels",
        1 / 5,
    )


def rows() -> Iterator[Row]:
    yield from selective_rows()
    yield from dual_rows()
    yield from step_rows()
    yield from length_rows()
    yield from training_rows()
