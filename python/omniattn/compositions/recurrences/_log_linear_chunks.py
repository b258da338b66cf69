"""Log-linear attention inside chunks of C tokens: products of queries and keys with weights.

Tensors are q, k (Z, n, C, K), v (Z, n, C, G, V), g (Z, n, C, G) and scales (Z, n, C, G, L). Token i
reads token j with scale 0 if i = j, otherwise with the number of bits of i xor j. The weights of
level l are blocks of 2^(l-1) queries and as many keys before them, whose decay is the product of
those from the border to the query and from the key to the border.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as nnf

__all__ = ["differentiate", "outputs", "sums_after", "sums_before"]

#: Number of weights that are computed at once, few enough for caches.
_WEIGHTS = 1 << 18


def sums_before(t: Tensor, dim: int) -> Tensor:
    """Sums the elements before each one."""
    return nnf.pad(t, (0, 0) * (t.dim() - 1 - dim) + (1, -1)).cumsum(dim)


def sums_after(t: Tensor, dim: int) -> Tensor:
    """Sums the elements after each one."""
    return nnf.pad(t, (0, 0) * (t.dim() - 1 - dim) + (-1, 1)).flip(dim).cumsum(dim).flip(dim)


def levels(size: int) -> range:
    """Levels above 0 of chunks of `size` tokens."""
    return range(1, size.bit_length())


def blocks(weights: Tensor, level: int) -> Tensor:
    """Returns the weights (c, G, C, C) of a level as a view (c, G, h, h, b)."""
    half = 1 << (level - 1)
    pairs = weights.unflatten(-2, (-1, 2, half)).unflatten(-1, (-1, 2, half))
    return pairs[:, :, :, 1, :, :, 0].diagonal(dim1=2, dim2=4)


def halves(t: Tensor, level: int) -> tuple[Tensor, Tensor]:
    """Returns t (c, C, G) of the keys and of the queries of a level's blocks: (c, G, b, h)."""
    pairs = t.mT.unflatten(2, (-1, 2, 1 << (level - 1)))
    return pairs[:, :, :, 0], pairs[:, :, :, 1]


def decays(g: Tensor, level: int) -> tuple[Tensor, Tensor]:
    """Returns the decays from keys to a block's border (c, G, 1, h, b), and from there to queries
    (c, G, h, 1, b)."""
    keys, queries = halves(g, level)
    to_border, from_border = sums_after(keys, 3).exp_(), queries.cumsum(3).exp_()
    return to_border.mT[:, :, None], from_border.mT[:, :, :, None]


def slabs(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """Yields parts of the chunks of tensors (Z, n, ...), as views (c, ...); the third is v."""
    flat = [t.flatten(0, 1) for t in tensors]
    size, groups = flat[2].shape[1:3]
    count = max(1, _WEIGHTS // max(1, groups * size * size))
    for first in range(0, flat[0].shape[0], count):
        yield [t[first : first + count] for t in flat]


def weighed(weights: Tensor, g: Tensor, scales: Tensor) -> Tensor:
    """Multiplies products (c, G, C, C) by decays and scales in place; keys after queries get 0."""
    weights.tril_()
    weights.diagonal(dim1=-2, dim2=-1).mul_(scales[..., 0].mT)
    for level in levels(weights.shape[-1]):
        to_border, from_border = decays(g, level)
        own = halves(scales[..., level], level)[1].mT[:, :, :, None]
        blocks(weights, level).mul_(to_border).mul_(from_border * own)
    return weights


def outputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scales: Tensor) -> Tensor:
    """Computes what the tokens of a chunk read of each other, like v."""
    y, groups = torch.empty_like(v), v.shape[3]
    for pq, pk, pv, pg, ps, into in slabs(q, k, v, g, scales, y):
        products = (pq @ pk.mT)[:, None]
        weights = weighed(products if groups == 1 else products.repeat(1, groups, 1, 1), pg, ps)
        if groups == 1:
            torch.bmm(weights[:, 0], pv[:, :, 0], out=into[:, :, 0])
        else:
            into.copy_((weights @ pv.transpose(1, 2)).transpose(1, 2))
    return y


def differentiate(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scales: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v and scales for the gradient of the outputs."""
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    dscales = torch.zeros_like(scales)
    for part in slabs(q, k, v, g, scales, grad, dq, dk, dv, dscales):
        _differentiate(*part)
    return dq, dk, dv, dscales


def _differentiate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scales: Tensor,
    grad: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dscales: Tensor,
) -> None:
    """Writes the gradients of a part of the chunks."""
    incoming, values, groups = grad.transpose(1, 2), v.transpose(1, 2), v.shape[2]
    products, slope = (q @ k.mT)[:, None], incoming @ values.mT
    terms = slope * products
    dscales[..., 0] = terms.diagonal(dim1=-2, dim2=-1).mT
    weights = products if groups == 1 else products.repeat(1, groups, 1, 1)
    for each in (weights, slope):
        each.tril_()
        each.diagonal(dim1=-2, dim2=-1).mul_(scales[..., 0].mT)
    for level in levels(q.shape[1]):
        to_border, from_border = decays(g, level)
        read = (blocks(terms, level) * to_border).sum(3) * from_border[:, :, :, 0]
        halves(dscales[..., level], level)[1].copy_(read.mT)
        own = halves(scales[..., level], level)[1].mT[:, :, :, None] * from_border
        for each in (weights, slope):
            blocks(each, level).mul_(to_border).mul_(own)
    dproducts = slope[:, 0] if groups == 1 else slope.sum(1)
    torch.bmm(dproducts, k, out=dq)
    torch.bmm(dproducts.mT, q, out=dk)
    if groups == 1:
        torch.bmm(weights[:, 0].mT, grad[:, :, 0], out=dv[:, :, 0])
    else:
        dv.copy_((weights.mT @ incoming).transpose(1, 2))
