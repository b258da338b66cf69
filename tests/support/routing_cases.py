"""Inputs of routers."""

import torch

F64 = torch.float64


def logits(n=12, experts=8, seed=0, dtype=F64):
    return torch.randn(n, experts, generator=torch.Generator().manual_seed(seed), dtype=dtype)
