"""Counter-based random numbers, functions of a seed and an element's index: dropout and noise.

The bits are equal on every device, for any strides, threads and instruction set, and can be
regenerated from the seed alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    implementation,
    refuse_nested,
    require_float,
    require_number,
    require_seed,
    require_tensor,
)
from omniattn.checks.jagged import token_wise
from omniattn.ops import random as ops

__all__ = ["dropout", "normal_like", "uniform_like"]


@token_wise()
def dropout(
    x: Tensor,
    p: float = 0.5,
    *,
    training: bool = True,
    seed: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Zeroes random elements and scales the others to keep the mean.

    ``y_n = x_n / (1 - p)`` where ``word_n >= floor(p 2^32)``, else 0

    with ``word_n`` word ``n mod 4`` of ``Philox4x32-10(counter = (n // 4, "ELEM", offset), key =
    seed)`` for the element's index n in row-major order.

    Args:
        x: any shape, float64, float32, bfloat16 or float16; or a jagged nested tensor, as its
            values. Copied where it is not contiguous.
        p: probability to drop an element, in [0, 1]; 1 gives zeros.
        training: False returns x itself, as p = 0 does.
        seed: int64 (2,), [seed, offset], on the CPU or on x's device. None draws one from torch's
            generator. On CUDA the kernel reads a seed in GPU memory, so that a captured graph can
            have another seed in each replay; a seed on the CPU is fixed at capture.
        backend: None for the native kernel of x's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        A tensor of x's shape and dtype.

    Raises:
        TypeError: an unsupported dtype.
        ValueError: a p out of range, a seed of another shape or dtype.
        NotImplementedError: no native kernel for the device.

    Note:
        The gradient is the same function of dy: only the seed is saved, and the backward
        regenerates the mask. The bits differ from torch.nn.functional.dropout's, which depend on
        device and size. Half inputs are scaled in fp32 and rounded once. Dropped NaN and infinities
        become 0.

    Reference:
        Srivastava et al., Dropout: A Simple Way to Prevent Neural Networks from Overfitting, JMLR
        2014; Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.

    Example:
        >>> dropout(torch.ones(6), 0.5, seed=torch.tensor([1, 0]))
        tensor([...])
    """
    op = "dropout"
    require_float(op, "x", x)
    require_number(op, "p", p, 0, 1)
    if not training or p == 0.0:
        return x
    seed = require_seed(op, seed, x)
    y: Tensor = implementation(op, backend, x, ops.dropout)(x, seed, p)
    return y


def uniform_like(x: Tensor, *, seed: Tensor | None = None, backend: str | None = None) -> Tensor:
    """Uniform numbers in [0, 1), one per element of x.

    ``u_n = floor(word_n / 2^8) 2^-24`` with the words of :func:`dropout`

    Args:
        x: any shape and dtype; its values do not matter.
        seed, backend: see :func:`dropout`.

    Returns:
        float32 of x's shape, on its device, without gradient.

    Raises:
        ValueError, NotImplementedError: see :func:`dropout`.

    Reference:
        Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.

    Example:
        >>> u = uniform_like(torch.empty(1000), seed=torch.tensor([1, 0]))
        >>> bool((u >= 0).all() and (u < 1).all())
        True
    """
    op = "uniform_like"
    require_tensor(op, "x", x)
    if x.is_nested:
        refuse_nested(op, "x", x)
    seed = require_seed(op, seed, x)
    u: Tensor = implementation(op, backend, x, ops.uniform_like)(x.detach(), seed)
    return u


def normal_like(x: Tensor, *, seed: Tensor | None = None) -> Tensor:
    """Standard normal numbers, one per element of x.

    ``z_n = sqrt(-2 log(1 - u_2n)) cos(2 pi u_2n+1)`` with the numbers of :func:`uniform_like`

    Args:
        x: any shape and dtype; its values do not matter.
        seed: see :func:`dropout`.

    Returns:
        float32 of x's shape, on its device, without gradient.

    Raises:
        ValueError, NotImplementedError: see :func:`dropout`.

    Reference:
        Box and Muller, A Note on the Generation of Random Normal Deviates, 1958.

    Example:
        >>> normal_like(torch.empty(2, 3), seed=torch.tensor([1, 0])).shape
        torch.Size([2, 3])
    """
    require_float("normal_like", "x", x)
    seed = require_seed("normal_like", seed, x)
    pairs = x.new_empty((*x.shape, 2))
    radius, angle = uniform_like(pairs, seed=seed).unbind(-1)
    return (-2 * torch.log1p(-radius)).sqrt() * torch.cos(2 * math.pi * angle)
