"""Gradients of empty problems, whose results are made without their inputs."""

import torch


def nothing_of(*tensors: torch.Tensor) -> torch.Tensor:
    """0 with a gradient of zeros, instead of none, to each tensor.

    No element is read, because 0 * inf is NaN.
    """
    nothing = tensors[0].new_zeros(())
    for t in tensors:
        nothing = nothing + t.reshape(-1)[:0].sum()
    return nothing
