"""Limits with the same gradient under every version of torch."""

import torch

Limit = torch.Tensor | float | None


def clamp(x: torch.Tensor, least: Limit = None, most: Limit = None) -> torch.Tensor:
    """x within [least, most]; the slope is 1 up to the limits, and 0 beyond and for NaN, as in the
    kernels.

    The slope of torch.clamp at a limit is 1 before torch 2.14, and from there on 0.
    """
    if least is not None:
        x = torch.where(x >= least, x, torch.where(x < least, least, x.detach()))
    return x if most is None else torch.where(x <= most, x, torch.where(x > most, most, x.detach()))
