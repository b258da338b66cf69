"""Rows of goals.py for the scans of Mamba and Mamba-2: against a loop in torch and transformers.

The rate of exponentials bounds the selective scan: one per state and token, and another one in the
backward, which recomputes the states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from baselines import BASELINES
from torch.nn import functional as F

from goal_rows.goal import PASSES, Provider, Row, provider, tensors
from goal_rows.products import plain
from omniattn import functional
from omniattn.functional.recurrences._steps import selective_scan_inplace, ssd_inplace
from omniattn.models import Mamba2Config, MambaConfig
from omniattn.testing.spec import Pass


def selective(batch: int, steps: int, channels: int = 1536) -> dict[str, torch.Tensor]:
    """Makes the inputs of a Mamba layer's scan, by default of width 768."""
    states = 16
    row = (batch, steps, channels)
    u, delta, z, B, C = tensors(row, row, row, *[(batch, steps, states)] * 2)
    A = -torch.arange(1.0, states + 1).expand(channels, states).contiguous()
    bias = torch.full((channels,), -4.0)
    named = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": torch.ones(channels)}
    return named | {"z": z, "delta_bias": bias}


def selective_work(named: dict[str, torch.Tensor], pass_: Pass) -> dict[str, float]:
    """Counts the exponentials, which bound a row."""
    sweeps = {"forward": 1.0, "forward+backward": 2.0}[pass_]
    return {"exponentials": sweeps * named["u"].numel() * named["A"].shape[1]}


def selective_rows() -> Iterator[Row]:
    named = selective(1, 1024)
    names = {"aten": "the best loop in torch", "hf": "transformers without kernels"}
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
            **selective_work(named, pass_),
            same=True,
        )


def _dual(batch: int, steps: int, heads: int, states: int) -> dict[str, torch.Tensor]:
    x, dt, B, C, A = tensors(
        (batch, steps, heads, 64), (batch, steps, heads), *[(batch, steps, 1, states)] * 2, (heads,)
    )
    return {"x": x, "dt": F.softplus(dt - 4), "A": -A.exp(), "B": B, "C": C, "D": torch.ones(heads)}


def dual_work(named: dict[str, torch.Tensor], pass_: Pass) -> dict[str, float]:
    return {"flops": plain(named["x"].shape, named["B"].shape[-1])[pass_]}


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
                **dual_work(named, pass_),
                same=True,
            )


#: Options of selective_scan; the steps made by `selective` are before softplus.
SOFT = {"delta_softplus": True}


def step_rows() -> Iterator[Row]:
    """One token of eight sequences, with a state."""
    named = selective(8, 1) | {"initial_state": torch.randn(8, 1536, 16)}
    state = torch.randn(8, 24, 128, 64).mT  # as a layer keeps it
    dual = _dual(8, 1, 24, 128) | {"initial_state": state}
    for op, given, options in (("selective_scan", named, SOFT), ("ssd", dual, {})):
        yield Row(
            f"{op} step B8",
            "forward",
            provider("forward", given, getattr(functional, op), **options),
            provider("forward", given, BASELINES[op]["hf"], **options),
            "transformers' step",
            1 / 15,
            bytes=2.0 * given["initial_state"].nbytes,
            same=True,
        )


def in_place_rows() -> Iterator[Row]:
    """One token of eight sequences with in-place states, as layers and transformers decode."""
    from transformers.models.mamba import modeling_mamba
    from transformers.models.mamba2 import modeling_mamba2

    u, delta, A, B, C, D, z, bias = selective(8, 1).values()
    own, other = (torch.zeros(8, 1536, 16) for _ in range(2))
    given = u[:, 0], delta[:, 0], A, B[:, 0], C[:, 0], D, bias, True, z[:, 0]
    yield Row(
        "Mamba's step in place B8",
        "forward",
        lambda: selective_scan_inplace(
            u, delta, A, B[:, :, None], C[:, :, None], D, z, bias, own, True
        ),
        lambda: modeling_mamba.mamba_selective_state_update(other, *given),
        "transformers' step",
        1 / 15,
        bytes=2.0 * own.nbytes,
    )
    x, dt, rates, keys, queries, skip = _dual(8, 1, 24, 128).values()
    state = torch.zeros(8, 24, 128, 64).mT  # as a layer keeps it
    theirs, steps = torch.zeros(8, 24, 64, 128), dt[:, 0, :, None].expand(-1, -1, 64)
    wide = rates[:, None, None].expand(-1, 64, 128), keys[:, 0], queries[:, 0]
    yield Row(
        "Mamba-2's step in place B8",
        "forward",
        lambda: ssd_inplace(
            x, dt, rates, keys, queries, skip, None, None, state, False, -torch.inf, torch.inf
        ),
        lambda: modeling_mamba2.mamba2_selective_state_update(
            theirs, x[:, 0], steps, *wide, skip[:, None].expand(-1, 64)
        ),
        "transformers' step",
        1 / 15,
        bytes=2.0 * state.nbytes,
    )


def layer_step_rows() -> Iterator[Row]:
    """One more token of two layers, with a vocabulary too small to matter."""
    for name, kind in (("Mamba", MambaConfig), ("Mamba-2", Mamba2Config)):
        ours = kind(vocab_size=256, dim=768, num_layers=2).build().eval()
        theirs, tokens = ours.to_hf().eval(), torch.randint(256, (1, 17))
        state = ours.new_state(1, 1024)
        with torch.no_grad():
            ours(tokens[:, :-1], state=state)
            cache = theirs(tokens[:, :-1], use_cache=True).cache_params
        yield Row(
            f"a token, 2 layers of {name}, D768",
            "forward",
            _without_gradients(lambda m=ours, t=tokens[:, -1:], s=state: m(t, state=s)),
            _without_gradients(
                lambda m=theirs, t=tokens[:, -1:], c=cache: (
                    m(t, cache_params=c, use_cache=True).logits
                )
            ),
            "transformers without kernels",
            1 / 15,
            bytes=4.0 * sum(p.numel() for p in ours.parameters()),
        )


def _without_gradients(run: Callable[[], object]) -> Provider:
    return torch.no_grad()(run)


def length_rows() -> Iterator[Row]:
    """Time and memory per token: constant from 1k to 64k tokens."""
    short = 1024
    scan, dual = functional.selective_scan, functional.ssd
    for length in (4096, 16384, 65536):
        for name, call, make, work, options in (
            (
                "selective scan E256 N16",
                scan,
                lambda t: selective(1, t, 256),
                selective_work,
                SOFT,
            ),
            ("ssd H4 P64 N64", dual, lambda t: _dual(1, t, 4, 64), dual_work, {}),
        ):
            for pass_ in PASSES:
                named = make(length)
                yield Row(
                    f"{name} T{length}",
                    pass_,
                    provider(pass_, named, call, **options),
                    provider(pass_, make(short), call, **options),
                    f"the same at T{short}, per token",
                    1.1,
                    share=length / short,
                    **work(named, pass_),
                    memory=1.1,
                )


def training_step(name: str, length: int, goal: float) -> Row:
    """Returns a row for forward and backward of two layers, without the optimizer."""
    kind = {"Mamba": MambaConfig, "Mamba-2": Mamba2Config}[name]
    config = kind(vocab_size=256, dim=768, num_layers=2)
    ours = config.build()
    theirs, tokens = ours.to_hf().train(), torch.randint(256, (1, length + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def step() -> torch.Tensor:
        ours.zero_grad()
        loss = ours(inputs, targets)
        loss.backward()
        return loss.detach()

    def yardstick() -> torch.Tensor:
        theirs.zero_grad()
        logits = theirs(inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        return loss.detach()

    return Row(
        f"training step, 2 layers of {name}, D768 T{length}",
        "forward+backward",
        step,
        yardstick,
        "transformers without kernels",
        goal,
        flops=6.0 * config.num_parameters * length,
        same=True,
    )


def rows() -> Iterator[Row]:
    yield from selective_rows()
    yield from dual_rows()
    yield from step_rows()
    yield from in_place_rows()
    yield from layer_step_rows()
    yield training_step("Mamba-2", 1024, 1 / 5)
