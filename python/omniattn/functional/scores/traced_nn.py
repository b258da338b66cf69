"""Handlers of torch.nn.functional's activations for traced values (traced.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from omniattn.functional.scores.trace import FUNCTIONS, Trace, lift


def _softplus(x: Any, beta: float = 1, threshold: float = 20) -> Any:
    x = x * float(beta)
    soft = x.minimum(float(threshold)).exp().log1p()
    return x.where(x > threshold, soft) / beta


def _silu(x: Any, inplace: bool = False) -> Any:
    return x * x.sigmoid()


def _gelu(x: Any, *, approximate: str = "none") -> Any:
    if approximate == "tanh":
        return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())
    if approximate != "none":
        raise TypeError
    return 0.5 * x * (1 + (x * math.sqrt(0.5)).erf())


def _elu(x: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    least = x.masked_fill(x > 0, 0.0)  # where x > 0, expm1 might overflow
    return x.where(x > 0, alpha * least.expm1())


def _leaky_relu(x: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    return x.where(x > 0, negative_slope * x)


def _of_floats(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(trace: Trace, x: Any, *args: Any, **kwargs: Any) -> Any:
        return function(lift(trace, x).float(), *args, **kwargs)

    return apply


_ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "softplus": _softplus,
    "logsigmoid": lambda x: -_softplus(-x),
    "log_sigmoid": lambda x: -_softplus(-x),
    "silu": _silu,
    "gelu": _gelu,
    "elu": _elu,
    "leaky_relu": _leaky_relu,
}

FUNCTIONS |= {name: _of_floats(function) for name, function in _ACTIVATIONS.items()}
