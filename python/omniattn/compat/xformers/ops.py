"""Norms, feed-forward layers and small functions of `xformers.ops`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import require_distinct, require_shape, shown
from omniattn.compat._errors import errors_as, errors_of, require_form, require_index, require_real

#: A matrix that is cut into tiles: rows of tiles.
Grid = Sequence[Sequence[Tensor]]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """Computes :func:`functional.rms_norm` over the last dimension, with gradients."""
    with errors_of("rms_norm"):
        return functional.rms_norm(x, weight, eps=eps)


def rms_norm_add(x: Tensor, y: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """Adds y to x in place and returns the norm of the sum."""
    require_real("rms_norm_add", x=x, y=y)
    require_shape("rms_norm_add", "y", y, tuple(x.shape))
    with errors_of("rms_norm_add"):
        return functional.rms_norm(x.add_(y), weight, eps=eps)


class RMSNorm(nn.Module):
    """Root mean square norm of width `dim`, see :func:`rms_norm`."""

    weight: Tensor | None

    def __init__(self, dim: int, include_weight: bool = True, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        weight = nn.Parameter(torch.ones(dim)) if include_weight else None
        self.register_parameter("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def increment_and_forward_(self, x: Tensor, y: Tensor) -> Tensor:
        """Adds y to x in place and returns the norm of the sum."""
        return rms_norm_add(x, y, self.weight, self.eps)


def swiglu(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    w3: Tensor,
    b3: Tensor | None,
    *,
    op: Any = None,
) -> Tensor:
    """Computes ``(silu(x w1^T + b1) * (x w2^T + b2)) w3^T + b3``; `op` has no effect."""
    names = {"gate_weight": "w1", "up_weight": "w2", "down_weight": "w3"}
    names |= {"gate_bias": "b1", "up_bias": "b2", "down_bias": "b3"}
    with errors_of("swiglu", **names):
        weights = w1, w2, w3
        return functional.glu_mlp(x, *weights, gate_bias=b1, up_bias=b2, down_bias=b3)


def swiglu_packed(
    x: Tensor,
    w1w2: Tensor,
    b1b2: Tensor | None,
    w3: Tensor,
    b3: Tensor | None,
    *,
    op: Any = None,
) -> Tensor:
    """Computes :func:`swiglu` of w1 and w2 in one tensor, (2, hidden, in), and b1 and b2."""
    require_real("swiglu_packed", x=x, w1w2=w1w2)
    require_form("swiglu_packed", "w1w2", w1w2, "2, hidden_features, in_features")
    require_shape("swiglu_packed", "w1w2", w1w2, (2, *w1w2.shape[1:]))
    b1, b2 = None, None
    if b1b2 is not None:
        require_shape("swiglu_packed", "b1b2", b1b2, tuple(w1w2.shape[:2]))
        b1, b2 = b1b2
    with errors_as("swiglu_packed", "swiglu"):
        return swiglu(x, w1w2[0], b1, w1w2[1], b2, w3, b3)


class SwiGLU(nn.Module):
    """SwiGLU layer, whose weights w12 are those of w1 and w2; see :func:`swiglu`.

    Args:
        in_features: width of x.
        hidden_features: inner width; 0 is in_features.
        out_features: width of y; None and 0 are in_features.
        bias: True for biases.
        _pack_weights: False for weights w1 and w2 of their own.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        *,
        _pack_weights: bool = True,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.hidden_features = hidden_features or in_features
        self.out_features = out_features or in_features
        self.w12: nn.Linear | None = None
        if _pack_weights:
            self.w12 = nn.Linear(in_features, 2 * self.hidden_features, bias=bias)
        else:
            self.w1 = nn.Linear(in_features, self.hidden_features, bias=bias)
            self.w2 = nn.Linear(in_features, self.hidden_features, bias=bias)
        self.w3 = nn.Linear(self.hidden_features, self.out_features, bias=bias)
        self.op: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.w12 is None:
            w1: Tensor = self.w1.weight
            w2: Tensor = self.w2.weight
            biases: Any = self.w1.bias, self.w2.bias
        else:
            w1, w2 = self.w12.weight.chunk(2)
            biases = (None, None) if self.w12.bias is None else self.w12.bias.chunk(2)
        return swiglu(x, w1, biases[0], w2, biases[1], self.w3.weight, self.w3.bias)


def unbind(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """Computes :func:`torch.unbind`."""
    return x.unbind(dim)


def get_stack_strides(tensors: Sequence[Tensor], dim: int) -> tuple[int, ...] | None:
    """Returns the strides of a stack along `dim`, None if the tensors are not one in memory."""
    first = tensors[0] if tensors else None
    if first is None or len(tensors) <= 1 or dim > first.ndim:
        return None
    step = int(tensors[1].storage_offset() - first.storage_offset())
    for n, x in enumerate(tensors):
        same = x.shape == first.shape and x.stride() == first.stride()
        place = first.storage_offset() + n * step
        memory = x.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or not memory or x.storage_offset() != place:
            return None
    strides = list(first.stride())
    return (*strides[:dim], step, *strides[dim:])


def stack_or_none(tensors: Sequence[Tensor], dim: int) -> Tensor | None:
    """Returns a stack of tensors that are one in memory, and None of others.

    The stack is a copy where a gradient is wanted, and otherwise a view.
    """
    strides = get_stack_strides(tensors, dim)
    if strides is None:
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return torch.stack(list(tensors), dim)
    shape = list(tensors[0].shape)
    shape.insert(dim, len(tensors))
    return tensors[0].as_strided(shape, strides)


def index_select_cat(sources: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
    """Returns the rows ``source[index]`` of each pair in one tensor of one dimension."""
    if len(sources) != len(indices):
        raise ValueError(
            f"index_select_cat: sources and indices must have the same length, got "
            f"{len(sources)} and {len(indices)}"
        )
    pairs = zip(sources, indices, strict=True)
    return torch.cat([source.index_select(0, index).flatten() for source, index in pairs])


def scaled_index_add(
    input: Tensor,
    index: Tensor,
    source: Tensor,
    scaling: Tensor | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """Adds ``alpha * scaling * source`` to the rows `index` of input in place, and returns it.

    Args:
        input: (B, T, D).
        index: (N,) int64, distinct rows of input.
        source: (N, T, D).
        scaling: (D,), or None for ones.
        alpha: factor of source.
    """
    op = "scaled_index_add"
    require_real(op, input=input, source=source)
    require_form(op, "input", input, "B, T, D")
    require_index(op, "index", index, (len(source),), input, "input")
    require_distinct(op, "index", index)
    require_shape(op, "source", source, (len(source), *input.shape[1:]))
    added = source if scaling is None else source * scaling
    return input.index_add_(0, index, added, alpha=alpha)


def masked_matmul(a: Tensor, b: Tensor, mask: Tensor | None = None) -> Tensor:
    """Computes a b, with -inf where a boolean mask is False, or plus an additive mask."""
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(f"masked_matmul: mask must be a tensor or None, got {shown(mask)}")
    product = a @ b
    if mask is None:
        return product
    return product.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else product + mask


def tiled_matmul(a: Grid, b: Grid) -> list[list[Tensor]]:
    """Multiplies two matrices that are cut into tiles: ``out[m][n] = sum_k a[m][k] b[k][n]``.

    Args:
        a: rows of tiles, whose tiles have shape (M_m, K_k).
        b: rows of tiles, whose tiles have shape (K_k, N_n).
    """
    _require_tiles("tiled_matmul", a=a, b=b)
    product = _whole(a) @ _whole(b)
    rows = product.split([row[0].shape[0] for row in a])
    columns = [tile.shape[1] for tile in b[0]]
    return [list(row.split(columns, 1)) for row in rows]


def tiled_matmul_out(a: Grid, b: Grid, out: Grid) -> None:
    """Writes :func:`tiled_matmul` to the tiles of `out`, without gradients."""
    op = "tiled_matmul_out"
    _require_tiles(op, a=a, b=b)
    with torch.no_grad():
        product = tiled_matmul(a, b)
        if [len(row) for row in out] != [len(row) for row in product]:
            raise ValueError(
                f"{op}: out must have {len(a)} rows of {len(b[0])} tiles, got rows of "
                f"{[len(row) for row in out]}"
            )
        for tiles, found in zip(out, product, strict=True):
            for tile, value in zip(tiles, found, strict=True):
                require_real(op, out=tile)
                require_shape(op, "out", tile, tuple(value.shape))
                tile.copy_(value)


def _require_tiles(op: str, a: Grid, b: Grid) -> None:
    """Requires grids of matrices that fit each other."""
    for name, grid in (("a", a), ("b", b)):
        if not grid or not grid[0] or any(len(row) != len(grid[0]) for row in grid):
            raise ValueError(
                f"{op}: {name} must have equally many tiles in each row, got rows of "
                f"{[len(row) for row in grid]}"
            )
        for tile in (tile for row in grid for tile in row):
            require_real(op, **{name: tile})
            require_form(op, name, tile, "M, K" if name == "a" else "K, N")
        for row in grid:
            for tile, top in zip(row, grid[0], strict=True):
                require_shape(op, name, tile, (row[0].shape[0], top.shape[1]))
    inner = [tile.shape[1] for tile in a[0]], [row[0].shape[0] for row in b]
    if inner[0] != inner[1]:
        raise ValueError(
            f"{op}: b must have rows of the sizes of a's columns, got {inner[1]} and {inner[0]}"
        )


def _whole(grid: Grid) -> Tensor:
    """Returns the matrix of a grid of tiles."""
    return torch.cat([torch.cat(list(row), 1) for row in grid])
