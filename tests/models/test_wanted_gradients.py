"""Frozen parameters: any subset of wanted gradients equals all, in every model and layer.

Ops give equal bits (tests/ops/test_specs.py), but torch's products depend on what needs a gradient.
"""

import copy
import zlib
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from small_calls import (
    ARGUMENTS,
    BATCH,
    PRESETS,
    TRAINABLE,
    is_float,
    layer_call,
    model_call,
    random,
)
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from omniattn.testing.wanted import subsets


class Calls:
    """A module with arguments, called with other parts of it frozen each time."""

    def __init__(self, module: nn.Module, arguments: dict[str, Any]) -> None:
        self.module, self.arguments = module, arguments
        self.names = [name for name, _ in module.named_parameters()]
        self.names += [n for n, t in arguments.items() if is_float(t)]

    def gradients(self, wanted: Iterable[str]) -> dict[str, Tensor | None]:
        """Returns gradients, by name, of a fixed random function of all outputs; dropout and
        routers draw the same numbers in each call."""
        module, wanted = copy.deepcopy(self.module), list(wanted)
        arguments = {n: t.clone() if is_float(t) else t for n, t in self.arguments.items()}
        leaves = {**arguments, **dict(module.named_parameters())}
        for name in self.names:
            leaves[name].requires_grad_(name in wanted)
        torch.manual_seed(0)
        found = tree_leaves(module(**arguments))
        outputs = [t for t in found if is_float(t) and t.requires_grad]
        inputs = [leaves[name] for name in wanted]
        grads = [random(*t.shape).to(t) for t in outputs]
        each = torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
        return dict(zip(wanted, each, strict=True))


def check(calls: Calls, choices: Iterable[tuple[str, ...]]) -> None:
    every = calls.gradients(calls.names)
    largest = max(float(g.abs().max()) for g in every.values() if g is not None and g.numel())
    used = [name for name, gradient in every.items() if gradient is not None]
    for wanted in choices:
        wanted = tuple(name for name in wanted if name in used)
        for name, gradient in calls.gradients(wanted).items() if wanted else ():
            assert gradient is not None, f"{name}: no gradient where {wanted} are wanted"
            what = f"{name} of {wanted}: {{}}".format
            torch.testing.assert_close(
                gradient, every[name], rtol=0, atol=1e-5 * largest, equal_nan=False, msg=what
            )


def few(names: list[str], seed: str) -> list[tuple[str, ...]]:
    """The first parameters alone, as of adapters before frozen layers; all but one; two halves."""
    draw = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    chosen = (torch.rand(len(names), generator=draw) < 0.5).tolist()
    half = tuple(n for n, c in zip(names, chosen, strict=True) if c)
    rest = tuple(n for n in names if n not in half)
    left_out = names[int(torch.randint(len(names), (1,), generator=draw))]
    return [(names[0],), tuple(n for n in names if n != left_out), half, rest]


def model(name: str) -> Calls:
    return Calls(*model_call(name))


def layer(name: str) -> Calls:
    return Calls(*layer_call(name))


@pytest.mark.parametrize("name", TRAINABLE)
def test_layers(name, one_thread):
    calls = layer(name)
    check(calls, subsets(calls.names, name))


@pytest.mark.parametrize("shape", [(0, 5, 8), (BATCH, 0, 8), (BATCH, 1, 8)], ids=str)
@pytest.mark.parametrize("name", [name for name in TRAINABLE if name not in ARGUMENTS])
def test_layers_of_few_tokens(name, shape, one_thread):
    """All parameters have gradients, which are zeros where there are no tokens."""
    calls = layer(name)
    used = [name for name, gradient in calls.gradients(calls.names).items() if gradient is not None]
    calls.arguments["x"] = random(*shape)
    for name, gradient in calls.gradients(used).items():
        assert gradient is not None, f"{name}: no gradient"
        assert gradient.isfinite().all() and (shape[1] > 0 or not gradient.any())


@pytest.mark.parametrize("name", PRESETS)
def test_models(name, one_thread):
    calls = model(name)
    check(calls, few(calls.names, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_every_subset_of_models(name, one_thread):
    calls = model(name)
    check(calls, subsets(calls.names, name, drawn=10))
