"""Position tables other than rotary, and position ids.

Angles and slopes are computed in fp64 and rounded once, so they are accurate at any position.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from omniattn.reference.precision import widen
from omniattn.reference.values import require_all_rows


def sinusoidal(
    positions: Tensor,
    dim: int,
    *,
    layout: str = "interleaved",
    freqs: str = "transformer",
    base: float = 10000.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns (..., dim): sin and cos of p * base^(-2i / dim), i = 0, 1, ....

    Layout "interleaved" has pairs of sine and cosine, "concat" all sines before all cosines. An odd
    dim drops the last cosine. freqs="fairseq" uses base^(-i / (dim / 2 - 1)).
    """
    i = torch.arange((dim + 1) // 2, dtype=torch.float64, device=positions.device)
    exponent = 2 * i / dim if freqs == "transformer" else i / (dim / 2 - 1)
    angle = positions[..., None].double() * base**-exponent
    pair = (angle.sin(), angle.cos())
    both = torch.stack(pair, -1).flatten(-2) if layout == "interleaved" else torch.cat(pair, -1)
    return both[..., :dim].to(dtype)


def sincos_2d(
    dim: int,
    height: int,
    width: int,
    *,
    prefix: int = 0,
    order: str = "wh",
    base: float = 10000.0,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns (prefix + height * width, dim) for a row-major grid; zeros for the prefix.

    The first half of dim has [sin | cos] of the column, the second of the row; order "hw" swaps
    them.
    """
    rows, columns = grid_positions(height, width, device=device)
    first, second = (columns, rows) if order == "wh" else (rows, columns)
    halves = [
        sinusoidal(p, dim // 2, layout="concat", base=base, dtype=dtype) for p in (first, second)
    ]
    return F.pad(torch.cat(halves, -1), (0, 0, prefix, 0))


def grid_positions(
    height: int, width: int, *, prefix: int = 0, device: torch.device | None = None
) -> Tensor:
    """Returns rows and columns (2, prefix + height * width) of a row-major grid; prefix: 0, 0."""
    sizes = (torch.arange(n, device=device) for n in (height, width))
    grid = torch.stack(torch.meshgrid(*sizes, indexing="ij"))
    return F.pad(grid.flatten(1), (prefix, 0))


def packed_positions(cu_seqlens: Tensor, total: int) -> Tensor:
    """Returns (total,): the position of every packed token in its sequence."""
    require_all_rows("packed_positions", cu_seqlens, total)
    token = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens.long(), token, right=True) - 1
    return token - cu_seqlens.long()[sequence]


def masked_positions(mask: Tensor) -> Tensor:
    """Returns (B, T): the position among the tokens where `mask` is True; 0 before the first."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def interpolate_positions(table: Tensor, length: int) -> Tensor:
    """Interpolates (P, d) linearly to (length, d), with align_corners=False."""
    stretched = F.interpolate(widen(table).T[None], length, mode="linear", align_corners=False)
    return stretched[0].T.to(table.dtype)


def interpolate_grid(
    table: Tensor,
    old: tuple[int, int],
    new: tuple[int, int],
    *,
    prefix: int = 0,
    offset: float = 0.0,
    antialias: bool = False,
) -> Tensor:
    """Interpolates (prefix + old h * w, d) to (prefix + new h * w, d), bicubic (a = -0.75).

    With `offset`, row i of P' reads coordinate (i + 1/2) P / (P' + offset) - 1/2 of P rows.
    """
    image = widen(table[prefix:]).unflatten(0, old).permute(2, 0, 1)[None]
    scale = [(n + offset) / o for n, o in zip(new, old, strict=True)] if offset else None
    image = F.interpolate(
        image,
        size=None if scale else new,
        scale_factor=scale,
        mode="bicubic",
        align_corners=False,
        antialias=antialias,
    )
    grid = image[0].flatten(1).T.to(table.dtype)
    return torch.cat([table[:prefix], grid])


def alibi_slopes(
    num_heads: int, *, max_exponent: float = 8.0, device: torch.device | None = None
) -> Tensor:
    """Returns (H,) fp32: 2^(-max_exponent (h + 1) / H) if H is a power of two.

    Otherwise: the slopes for the power of two c below H, then every other slope for 2c.
    """

    def powers(count: int) -> Tensor:
        exponent = torch.arange(1, count + 1, dtype=torch.float64, device=device) / count
        return 2.0 ** (-max_exponent * exponent)

    c = 2 ** int(math.log2(num_heads))
    return torch.cat([powers(c), powers(2 * c)[0::2][: num_heads - c]]).float()


def alibi_bias(slopes: Tensor, q_len: int, k_len: int, *, form: str = "distance") -> Tensor:
    """Returns the bias of scores (1, H, q_len, k_len): ``-slope |i + k_len - q_len - j|``.

    Query i is at key position i + k_len - q_len. form="bloom": (1, H, 1, k_len), slope j.
    """
    key = torch.arange(k_len, device=slopes.device)
    if form == "bloom":
        return (slopes[:, None] * key)[None, :, None]
    query = torch.arange(k_len - q_len, k_len, device=slopes.device)
    return -slopes[:, None, None] * (query[:, None] - key).abs()[None, None]
