"""Clamp whose gradient is the same in every version of torch."""

import torch

Limit = torch.Tensor | float | None


def clamp(x: torch.Tensor, least: Limit = None, most: Limit = None) -> torch.Tensor:
    """Clamps x to [least, most]; the slope is 1 within and at the limits, 0 beyond and for NaN.

    Kernels have the same slope. torch.clamp's slope at a limit is 1 before torch 2.14, then 0.
    """
    if least is not None:
        x = torch.where(x >= least, x, torch.where(x < least, least, x.detach()))
    return x if most is None else torch.where(x <= most, x, torch.where(x > most, most, x.detach()))
