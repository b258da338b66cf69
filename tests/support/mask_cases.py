"""A small call of attention under a mask, and its gradients."""

from __future__ import annotations

import torch

B, H, TQ, TK = 2, 4, 100, 129


def qkv(tq=TQ, tk=TK, dtype=torch.float64):
    make = torch.Generator().manual_seed(0)
    shapes = ((B, tq, H, 16), (B, tk, 2, 16), (B, tk, 2, 8))
    return [torch.randn(s, generator=make, dtype=dtype) for s in shapes]


def gradients(function, inputs, mask):
    leaves = [t.detach().requires_grad_() for t in inputs]
    out, lse = function(*leaves, mask=mask, return_lse=True)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    grads = torch.autograd.grad((out * weight).sum() + lse[lse.isfinite()].sum(), leaves)
    return [out.detach(), lse.detach(), *grads]
