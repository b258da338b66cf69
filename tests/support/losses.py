"""Inputs of losses."""

import torch


def random_tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator, requires_grad=True) for s in shapes]
