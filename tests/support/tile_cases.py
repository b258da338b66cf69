"""Levels of products; experts of few tokens and of many, and their results and gradients."""

import torch

from omniattn import testing
from omniattn.functional import moe_experts
from omniattn.ops.dispatch import level_choice

ON_TILES = "amx_bf16" in testing.isas()
#: The best level that multiplies all types on vectors of fp32.
VECTORS = [isa for isa in testing.isas() if isa not in level_choice.product_levels()][-1]


def experts(transposed=False):
    """x, up, up_bias, down and down_bias of three experts, and the experts of tokens: two have many
    tokens and one has four."""
    generator = torch.Generator().manual_seed(0)
    x, up, up_bias, down, down_bias = (
        torch.randn(s, generator=generator)
        for s in ((40, 48), (3, 70, 48), (3, 70), (3, 48, 70), (3, 48))
    )
    if transposed:
        up, down = (t.mT.contiguous().mT for t in (up, down))
    index = torch.arange(40)[:, None] % 2
    index[7:11] = 2
    return (x, up, up_bias, down, down_bias), index


def by_experts(x, up, up_bias, down, down_bias, index, **options):
    """Each token by one expert with weight 1, which rounds nothing."""
    return moe_experts(
        x, index, torch.ones(index.shape), up, down, up_bias=up_bias, down_bias=down_bias,
        activation="relu", **options,
    )  # fmt: skip


def gradients(function, tensors, index, **options):
    """y and the gradients of all tensors."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = function(*leaves, index, **options)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]
