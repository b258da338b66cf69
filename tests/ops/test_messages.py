"""Messages of errors are short: they show the sizes of tensors and arrays, never their contents."""

import inspect
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from omniattn import compat
from omniattn.testing import registry

pytestmark = pytest.mark.usefixtures("one_thread")
F32 = torch.float32
#: No other number of these calls has these digits.
CONTENT = "0.8125"
TENSOR = torch.full((6, 5, 4, 3), float(CONTENT))
WRONG = {
    "tensor": TENSOR,
    "vector": TENSOR[:, 0, 0, 0],
    "array": TENSOR.numpy(),
    "list of tensors": [TENSOR, TENSOR],
    "list": TENSOR.flatten().tolist(),
    "dict": {"a": TENSOR},
    "object array": np.array([TENSOR.numpy(), None], dtype=object),
}
LONGEST = 700


def check(function, arguments: dict) -> None:
    """With a wrong value for each argument in turn."""
    for name in inspect.signature(function).parameters:
        if name in ("unknown", "kwargs", "options"):
            continue
        for what, wrong in WRONG.items():
            try:
                with warnings.catch_warnings(action="ignore"):
                    function(**arguments | {name: wrong})
            except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
                message, place = str(error), f"{name} is a {what}: {error}"
                shown = message.count(CONTENT)
                assert len(message) <= LONGEST and "\n" not in message, place
                assert shown <= 1 or (shown <= 25 and "..." in message), place
                # An element of a vector that is read as a list may be shown.
                assert not isinstance(wrong, Tensor | np.ndarray) or shown <= 1, place


SPECS = {name: spec for name, spec in registry().items() if spec.cases}


@pytest.mark.parametrize("name", SPECS)
def test_of_a_function(name):
    spec = SPECS[name]
    sizes = [sum(t.numel() for t in spec.call(c, F32).tensors.values()) for c in spec.cases]
    call = spec.call(spec.cases[min(range(len(sizes)), key=sizes.__getitem__)], F32)
    check(spec.function, {**call.tensors, **call.options})


SHAPES = {
    "beta": (1, 3, 2),
    "A": (2,),
}


@pytest.mark.parametrize("name", compat.__all__)
def test_of_an_alias(name):
    function = getattr(compat, name)
    needed = {
        n: torch.ones(SHAPES.get(n, (1, 3, 2, 2)))
        for n, p in inspect.signature(function).parameters.items()
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    }
    check(function, needed)
