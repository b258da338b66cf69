"""Neighborhood attention in grids of tokens, with NATTEN's names."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from omniattn.checks.arguments import require_bool, require_number, require_strided, use_reference
from omniattn.functional.attention._common import autocast, check_shapes
from omniattn.functional.attention.attention import attention
from omniattn.functional.masks import GridNeighborhood
from omniattn.functional.masks.grid import grid_axes

__all__ = ["na1d", "na2d", "na3d"]

#: One value for all axes, or one per axis.
Ints = int | tuple[int, ...]
Bools = bool | tuple[bool, ...]
Found = Tensor | tuple[Tensor, Tensor]


@overload
def na1d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Ints,
    stride: Ints = 1,
    dilation: Ints = 1,
    is_causal: Bools = False,
    scale: float | None = None,
    *,
    return_lse: Literal[False] = False,
    backend: str | None = None,
) -> Tensor: ...
@overload
def na1d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Ints,
    stride: Ints = 1,
    dilation: Ints = 1,
    is_causal: Bools = False,
    scale: float | None = None,
    *,
    return_lse: Literal[True],
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...
def na1d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Ints,
    stride: Ints = 1,
    dilation: Ints = 1,
    is_causal: Bools = False,
    scale: float | None = None,
    *,
    return_lse: bool = False,
    backend: str | None = None,
) -> Found:
    """Neighborhood attention of a sequence: :func:`na2d` with query (B, X, H, D).

    Unlike `masks.Neighborhood` it takes even sizes, strides and causal windows.

    Example:
        >>> x = torch.ones(1, 6, 2, 8)
        >>> na1d(x, x, x, kernel_size=4, stride=2).shape
        torch.Size([1, 6, 2, 8])
    """
    options = kernel_size, stride, dilation, is_causal
    return _neighborhood("na1d", 1, query, key, value, options, scale, return_lse, backend)


@overload
def na2d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Ints,
    stride: Ints = 1,
    dilation: Ints = 1,
    is_causal: Bools = False,
    scale: float | None = None,
    *,
    return_lse: Literal[False] = False,
    backend: str | None = None,
) -> Tensor: ...
@overload
def na2d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Ints,
    stride: Ints = 1,
    dilation: Ints = 1,
    is_causal: Bools = False,
    scale: float | None = None,
    *,
    return_lse: Literal[True],
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...
def na2d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Ints,
    stride: Ints = 1,
    dilation: Ints = 1,
    is_causal: Bools = False,
    scale: float | None = None,
    *,
    return_lse: bool = False,
    backend: str | None = None,
) -> Found:
    """Neighborhood attention of a two-dimensional grid of tokens, with NATTEN's arguments.

    ``O_i = sum_j softmax_j(scale q_i . k_j) v_j`` over the keys j that
    :class:`~omniattn.functional.masks.GridNeighborhood` shows to token i.

    Args:
        query: (B, Y, X, H, D), float64, float32, bfloat16 or float16.
        key: (B, Y, X, Hkv, D), Hkv a divisor of H.
        value: (B, Y, X, Hkv, Dv).
        kernel_size: number of tokens that a query sees along each axis, one number or one per axis.
        stride: number of queries that share a window, at most kernel_size.
        dilation: distance of the tokens of a window; kernel_size * dilation must fit into the grid.
        is_causal: axes along which a query sees only tokens up to its own.
        scale: None is 1 / sqrt(D).
        return_lse: also return the log-sum-exp of the logits.
        backend: see :func:`attention`.

    Returns:
        O (B, Y, X, H, Dv) of the query's dtype, and lse (B, Y, X, H) in float32 (float64 for
        float64).

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`attention`; a window that does not
            fit into the grid.

    Note:
        A mask of :func:`attention`, as deterministic and differentiable, and fused in both passes.
        Blocks of tokens that no window reaches are skipped, along every axis.

    Reference:
        Hassani et al., Neighborhood Attention Transformer, 2022, arXiv:2204.07143.
        Hassani et al., Faster Neighborhood Attention, 2024, arXiv:2403.04690.

    Example:
        >>> x = torch.ones(1, 4, 5, 2, 8)
        >>> na2d(x, x, x, kernel_size=(3, 5), is_causal=(True, False)).shape
        torch.Size([1, 4, 5, 2, 8])
    """
    options = kernel_size, stride, dilation, is_causal
    return _neighborhood("na2d", 2, query, key, value, options, scale, return_lse, backend)


@overload
def na3d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Ints,
    stride: Ints = 1,
    dilation: Ints = 1,
    is_causal: Bools = False,
    scale: float | None = None,
    *,
    return_lse: Literal[False] = False,
    backend: str | None = None,
) -> Tensor: ...
@overload
def na3d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Ints,
    stride: Ints = 1,
    dilation: Ints = 1,
    is_causal: Bools = False,
    scale: float | None = None,
    *,
    return_lse: Literal[True],
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...
def na3d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Ints,
    stride: Ints = 1,
    dilation: Ints = 1,
    is_causal: Bools = False,
    scale: float | None = None,
    *,
    return_lse: bool = False,
    backend: str | None = None,
) -> Found:
    """Neighborhood attention in three dimensions: :func:`na2d` with query (B, Z, Y, X, H, D).

    Example:
        >>> x = torch.ones(1, 2, 4, 5, 2, 8)
        >>> na3d(x, x, x, kernel_size=(2, 3, 3), is_causal=(True, False, False)).shape
        torch.Size([1, 2, 4, 5, 2, 8])
    """
    options = kernel_size, stride, dilation, is_causal
    return _neighborhood("na3d", 3, query, key, value, options, scale, return_lse, backend)


def _neighborhood(
    op: str,
    axes: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: tuple[Ints, Ints, Ints, Bools],
    scale: float | None,
    return_lse: bool,
    backend: str | None,
) -> Found:
    names = ("query", "key", "value")
    query, key, value = autocast(op, query, key, value, names)
    for name, t in zip(names, (query, key, value), strict=True):
        require_strided(op, name, t)
        if t.dim() != axes + 3 or t.shape[: axes + 1] != query.shape[: axes + 1]:
            raise ValueError(
                f"{op}: {name} must have {axes + 3} dimensions, the batch, those of the grid as in "
                f"query, heads and their size, got {name}.shape={tuple(t.shape)}"
            )
    require_bool(op, "return_lse", return_lse)
    q, k, v = (t.flatten(1, axes) for t in (query, key, value))
    if q.shape[1] == 0:
        raise ValueError(f"{op}: query must have tokens, got query.shape={tuple(query.shape)}")
    shape = tuple(query.shape[1 : axes + 1])
    check_shapes(op, q, k, v, names=names)
    grid_axes(op, shape, *options)
    if scale is not None:
        require_number(op, "scale", scale)
    use_reference(op, backend, q)
    mask = GridNeighborhood(shape, *options)
    out, lse = attention(q, k, v, mask=mask, scale=scale, return_lse=True, backend=backend)
    out = out.unflatten(1, shape)
    return (out, lse.transpose(1, 2).unflatten(1, shape)) if return_lse else out
