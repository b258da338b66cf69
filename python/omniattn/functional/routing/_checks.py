"""Checks shared by the routing functions."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.checks.arguments import require_device, require_float, require_integers, require_shape


def require_float_on(op: str, name: str, t: Tensor, x: Tensor, x_name: str) -> None:
    """Requires a floating-point `t` of any dtype on the device of `x`."""
    require_float(op, name, t)
    require_device(op, name, t, x, x_name)


def require_integers_on(op: str, name: str, t: Tensor, x: Tensor, x_name: str) -> None:
    """Requires integers on the device of `x`."""
    require_integers(op, name, t)
    require_device(op, name, t, x, x_name)


def require_mask(op: str, token_mask: Tensor, x: Tensor, x_name: str) -> None:
    """Requires a bool for each row of x."""
    if not isinstance(token_mask, Tensor) or token_mask.dtype != torch.bool:
        got = getattr(token_mask, "dtype", type(token_mask).__name__)
        raise TypeError(f"{op}: token_mask must be a bool tensor, got {got}")
    require_device(op, "token_mask", token_mask, x, x_name)
    require_shape(op, "token_mask", token_mask, x.shape[:-1])
