"""Calls of raw ops, recorded from the OpSpecs, and changes that make arguments wrong.

`Draw` names what hypothesis (tests/ops/test_fuzz.py) and `random.Random` (fuzz_episodes.py) give.
"""

import collections
import functools
import math
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from omniattn import testing
from omniattn.ops.activation import ACTIVATIONS
from omniattn.testing.properties import recorded_ops

ERRORS = (RuntimeError, ValueError, TypeError, IndexError)
INTS = (-1, 0, 1, 3, 2**31, 2**40, 2**63 - 1, -(2**63))
FLOATS = (0.0, -1.0, math.nan, math.inf, -math.inf, 6e4)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
OTHER_DTYPES = (torch.bool, torch.uint8, torch.complex64)

RawCall = tuple[Any, tuple[Any, ...]]


class Draw(Protocol):
    def choice(self, values: Any, /) -> Any:
        """One of a sequence."""

    def randint(self, low: int, high: int, /) -> int:
        """An integer from low to high, both included."""


@functools.cache
def valid_calls(dtype: torch.dtype) -> dict[str, list[RawCall]]:
    """Name of each raw op to the argument tuples that the specs' smaller cases call it with."""
    calls: dict[str, list[RawCall]] = collections.defaultdict(list)
    for spec in testing.registry().values():
        for case in spec.cases:
            if dtype not in spec.dtypes:
                continue
            call = spec.call(case, dtype)
            if sum(t.numel() for t in call.tensors.values()) < 30_000:
                for op, args, kwargs in recorded_ops(call, spec.function):
                    assert args and not kwargs
                    calls[op._schema.name.split("::")[1]].append((op, args))
    for name, args in _inner_calls(dtype).items():
        calls[name].append((getattr(torch.ops.omniattn, name).default, args))
    return calls


def _inner_calls(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Calls of ops that only other ops and layers call."""
    wide = torch.promote_types(dtype, torch.float32)
    ones = [torch.ones(5, 70) for _ in range(4)]
    silu = ACTIVATIONS["silu"]
    row = torch.ones(2, 1, 6, dtype=dtype)
    squares = torch.ones(2, 3, 4, 4, dtype=wide)
    groups, heads = row.view(2, 1, 2, 3), torch.ones(2, 1, 4, 5, dtype=dtype)
    four, dt = torch.ones(4, dtype=wide), torch.ones(2, 1, 4, dtype=dtype)
    taps = torch.ones(6, 3, dtype=dtype)
    wide_row, rates, states = row.to(wide), -torch.ones(6, 3, dtype=wide), groups.to(wide)
    return {
        "causal_conv1d_": (row, taps, taps[:, 0], row.new_ones(2, 6, 2), True),
        "selective_scan_": (
            *(row, row, -torch.ones(6, 3, dtype=wide), groups, groups),
            *(None, row, None, torch.ones(2, 6, 3, dtype=wide), True),
        ),
        "ssd_": (
            *(
                heads,
                dt,
                four,
                groups,
                groups,
                four,
                heads,
                four,
                torch.ones(2, 4, 5, 3, dtype=wide),
            ),
            *(True, 0.0, math.inf),
        ),
        "attention_backward": (
            *(heads, None, heads, heads, heads, [torch.ones(7, 4, 5, dtype=dtype)] * 2, None),
            *(heads, torch.ones(2, 4, 1, dtype=wide), torch.zeros(2, 4, 1, dtype=wide), []),
            *([11, 0, 2, 12, 1, 3], [0.5, 0.0, 3.0, -2.0], [0, 1]),
        ),
        "attention_tangents": (
            *(heads, heads, heads, heads, None, heads, heads, None, heads, None, [], None, heads),
            *(torch.ones(2, 4, 1, dtype=wide), torch.zeros(2, 4, 1, dtype=wide)),
            *([0, -1, 0, -1], [], [0.5, 0.0]),
        ),
        "selective_scan_tangents": (
            *(wide_row, wide_row, rates, states, states, None, None),
            *(wide_row, wide_row, rates, states, states, None, wide_row, None, wide_row, None),
        ),
        "mesa_step": (*[torch.ones(2, 1, 3, 4, dtype=wide)] * 2, squares, 5, 1e-6),
        "decayed_sum": (heads, heads, *[None] * 3, 0, False, False),
        "glu_backward_": (*ones[:3], silu, [], ones[3]),
        "activate": (ones[0], silu),
        "activate_backward_": (*ones[:2], silu),
    }


def mutate_tensor(t: Tensor, draw: Draw) -> Tensor | None:
    dim = draw.randint(0, max(t.dim() - 1, 0))
    kind = draw.choice(["shape", "rank", "dtype", "layout", "values", "none"])
    if kind == "shape" and t.dim():
        size = draw.choice([0, 1, t.shape[dim] + 1, max(t.shape[dim] - 1, 0)])
        shape = [*t.shape[:dim], size, *t.shape[dim + 1 :]]
        return torch.zeros(shape, dtype=t.dtype)
    if kind == "rank":
        return draw.choice([t.flatten(), t[None], t.new_zeros(()), t.new_zeros(0)])
    if kind == "dtype":
        return t.to(draw.choice(DTYPES + OTHER_DTYPES))
    if kind == "layout":
        if draw.choice([False, True]) and t.numel():
            return t.flatten()[0].expand(t.shape)
        return testing.relayout(t, draw.choice(testing.LAYOUTS))
    if kind == "values":
        integers = INTS if t.dtype in (torch.int64, torch.bool) else (0, 1, 3)
        value = draw.choice(FLOATS if t.is_floating_point() else integers)
        return torch.full_like(t, t.dtype != torch.bool and value)
    return None


def mutate(value: Any, draw: Draw) -> Any:
    """Another value in the place of an argument, mostly a wrong one."""
    if isinstance(value, Tensor):
        return mutate_tensor(value, draw)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice(INTS)
    if isinstance(value, float):
        return draw.choice(FLOATS)
    if isinstance(value, list):
        at = draw.randint(0, max(len(value) - 1, 0))
        changed = [mutate(v, draw) if i == at else v for i, v in enumerate(value)]
        return draw.choice([changed, value[:-1], value + value[-1:], value * 40])
    shape = [draw.randint(0, 5) for _ in range(draw.randint(0, 4))]
    return torch.zeros(shape, dtype=draw.choice(DTYPES))


def mutated_call(calls: list[RawCall], draw: Draw) -> RawCall:
    """One of the calls with one or two arguments changed; tensors that it writes to are copies."""
    op, args = draw.choice(calls)
    changed = list(args)
    for _ in range(draw.randint(1, 2)):
        at = draw.randint(0, len(changed) - 1)
        changed[at] = mutate(changed[at], draw)
    if op._schema.is_mutable:
        changed = tree_map_only(Tensor, torch.clone, changed)
    return op, tuple(changed)


def shapes(outputs: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    return [(tuple(t.shape), t.dtype) for t in tree_leaves(list(outputs)) if t is not None]


def check_raw_call(op: Any, args: tuple[Any, ...], *, compare: bool = True) -> None:
    """An error with a message, or outputs of the shapes that torch.compile is told."""
    try:
        outputs = op(*args)
    except ERRORS as error:
        assert str(error)
        return
    if compare:
        assert_like_fakes(op, args, outputs)


def assert_like_fakes(op: Any, args: tuple[Any, ...], outputs: Any) -> None:
    with FakeTensorMode() as mode:
        fakes = tree_map_only(Tensor, mode.from_tensor, args)
        expected = shapes(op(*fakes))
    assert shapes(outputs) == expected
