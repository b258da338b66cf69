"""Inputs of losses, and their compositions run as on CUDA."""

import torch

from omniattn.compositions import loss as compositions
from omniattn.ops.loss import REDUCTIONS


def random_tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator, requires_grad=True) for s in shapes]


def composed(name, inputs, options, reduction):
    """Loss and gradients of what CUDA runs, three tokens at a time."""
    number, inputs = REDUCTIONS[reduction], [t.detach() for t in inputs]
    wanted = [reduction == "mean"] * 3
    loss, *found = getattr(compositions, name)(*inputs, *options, number, *wanted)
    if reduction == "none":
        backward = getattr(compositions, f"{name}_backward")
        found = backward(torch.ones_like(loss), *inputs, *options, True, True, True)
    return loss, *found
