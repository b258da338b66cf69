"""Rows of goals.py for mixers that are calls of other engines, and for engines of one mixer.

Mixers of calls are compared with the calls that they make, where decays of values become decays of
keys. Engines are compared with the best form in torch, and steps of both with a step of GLA.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from inspect import signature

import torch
from baselines import BASELINES
from torch import Tensor
from torch.nn import functional as F

from goal_rows.goal import PASSES, Provider, Row, provider, tensors
from goal_rows.recurrences import HEADS, Named, inputs
from omniattn import functional
from omniattn.testing import prepare, registry
from omniattn.testing.spec import Function

LENGTH, SIZE = 1024, 64


@dataclass(frozen=True)
class Composed:
    """A mixer, its inputs, the calls that it makes, and the goal."""

    named: Named
    calls: Function
    against: str
    goal: float


def _slots(q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor) -> Tensor:
    """Reads keys and values of slots by two calls with decays of keys."""
    logits, _ = functional.gated_linear_attention(q, k, s, g)
    return functional.gated_linear_attention(logits.softmax(-1), s, v, g, scale=1.0)[0]


def _oja(q: Tensor, k: Tensor, v: Tensor, gv: Tensor, beta: Tensor) -> Tensor:
    """Makes the two passes of Oja's rule, over two steps a token and one, with decays of keys."""
    doubled = (t.repeat_interleave(2, 1) for t in (v, v, k, gv, beta))
    known, _ = functional.kimi_delta_attention(*doubled)
    return functional.gated_linear_attention(q, known[:, ::2], v, gv)[0]


def _preconditioned(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: Tensor
) -> Tensor:
    erased = beta[..., None] * k
    return functional.dplr_delta_rule(q, k, v, -erased, k, g)[0]


def _mamba3(q: Tensor, k: Tensor, v: Tensor, adt: Tensor) -> Tensor:
    return functional.gated_linear_attention(q, k, v, adt)[0]


def mamba3_inputs(batch: int, length: int, states: int = 128) -> Named:
    """Makes the inputs of Mamba-3 with one input a step and q and k of each head."""
    rows, heads = (batch, length, HEADS, states), (batch, length, HEADS)
    q, k, v, dt, trap, angles, *biases = tensors(
        *(rows, rows, (*heads, SIZE), heads, heads, (*heads, states // 4)),
        *((HEADS, states),) * 2,
    )
    dt = F.softplus(dt - 2)
    named = {"q": q, "k": k, "v": v, "adt": -dt, "dt": dt, "trap": trap}
    return named | {"q_bias": biases[0], "k_bias": biases[1], "angles": angles}


def composed(batch: int = 1, length: int = LENGTH) -> dict[str, Composed]:
    """Makes the mixers."""
    channels = inputs(length, SIZE, "channels", batch=batch)
    scalars = inputs(length, SIZE, "g", "beta", batch=batch)
    beta, g = scalars["beta"], channels.pop("g")
    slots = channels | {"s": 1 - g.exp(), "g": g}
    memory = {"g_atk": scalars["g"].clone(), "beta_atk": beta.clone()}
    memory["log_atk_scale"] = torch.full((HEADS,), -0.2)
    rows = "gated_linear_attention twice"
    return {
        "gated_slot_attention": Composed(slots, _slots, rows, 1.3),
        "abc_attention": Composed(channels | {"s": slots["s"]}, partial(_slots, g=g), rows, 1.3),
        "gated_oja_rule": Composed(
            channels | {"gv": g, "beta": beta}, _oja, "kimi_delta_attention of 2 N, and GLA", 1.3
        ),
        "preconditioned_delta_rule": Composed(
            scalars | memory, _preconditioned, "dplr_delta_rule", 1.1
        ),
        "mamba3": Composed(
            mamba3_inputs(batch, length), _mamba3, "gated_linear_attention of its sizes", 1.1
        ),
    }


def _output(function: Function) -> Function:
    """Returns a function without its states."""
    return lambda *args, **named: function(*args, **named)[0]


def composed_rows() -> Iterator[Row]:
    """Mixers against the calls that they make."""
    for op, mixer in composed().items():
        size = "N128 P64" if op == "mamba3" else f"D{SIZE}"
        for pass_ in PASSES:
            run = provider(pass_, mixer.named, _output(getattr(functional, op)))
            read = {n: t for n, t in mixer.named.items() if n in signature(mixer.calls).parameters}
            calls = provider(pass_, read, mixer.calls)
            name = f"{op} N{LENGTH} H{HEADS} {size}"
            yield Row(name, pass_, run, calls, mixer.against, mixer.goal)


#: Ops with engines of their own, and the goal for the memory that a call adds, relative to torch's.
ENGINES = {
    "deltaformer_attention": 0.1,
    "mesa_net": 0.0,
    "multi_token_attention": 0.1,
    "parallax_attention": 0.1,
    "atlas_linear": 0.1,
    "dynamic_conv1d": 0.0,
}


def engine_rows() -> Iterator[Row]:
    """Engines of one mixer against the best form in torch."""
    for op, memory in ENGINES.items():
        spec = registry()[op]
        case = spec.benchmarks[0].case
        call, sizes = spec.call(case, torch.float32), case.sizes
        length, width = (sizes[a] if a in sizes else sizes[b] for a, b in (("T", "Tq"), ("K", "D")))
        theirs = next(iter(BASELINES[op].values()))
        for pass_ in PASSES:
            run, form = (prepare(call, _output(f), pass_) for f in (spec.public, theirs))
            name = f"{op} N{length} H{sizes['H']} D{width}"
            yield Row(name, pass_, run, form, "torch's form", 1 / 5, memory=memory, same=True)


def step_rows() -> Iterator[Row]:
    """One token of eight sequences after others, against a step of GLA with a state as large."""
    batch = 8
    made = composed(batch, 1)
    named = {op: mixer.named for op, mixer in made.items()}
    least = inputs(1, SIZE, "g", "beta", batch=batch)
    named["mesa_net"] = least | {"lamb": torch.ones(HEADS, SIZE)}
    for op, given in named.items():
        k, v = given["k"], given["v"]
        g = F.logsigmoid(torch.ones_like(k))
        gla = {"q": given["q"], "k": k, "v": v, "g": g}
        runs = (
            _step(getattr(functional, op), given),
            _step(functional.gated_linear_attention, gla),
        )
        yield Row(f"{op} step B{batch}", "forward", *runs, "a step of GLA", 1.5)


def _step(function: Function, named: Named) -> Provider:
    """Returns a step after the state of another one."""
    state = function(**named)[1]
    return provider("forward", named, function, initial_state=state)


def rows() -> Iterator[Row]:
    yield from composed_rows()
    yield from engine_rows()
    yield from step_rows()
