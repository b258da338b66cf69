"""Checks of what the routing functions share beyond `functional._checks`."""

from __future__ import annotations

from torch import Tensor

from omniattn.functional._checks import require_device, require_float, require_integers


def require_float_beside(op: str, name: str, t: Tensor, x: Tensor, x_name: str) -> None:
    """`t` must be floating point, of any dtype, on the device of `x`."""
    require_float(op, name, t)
    require_device(op, name, t, x, x_name)


def require_integers_beside(op: str, name: str, t: Tensor, x: Tensor, x_name: str) -> None:
    """`t` must be integers on the device of `x`."""
    require_integers(op, name, t)
    require_device(op, name, t, x, x_name)
