"""Position tables other than rotary: sinusoidal, 2-D sin-cos, resized learned tables, ALiBi.

No function needs a kernel: tables are small, computed once, and added to the tokens, or to the
scores as the `bias` of :func:`omniattn.functional.attention`. All functions run on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn import reference
from omniattn.checks.arguments import (
    FLOATS,
    require_bool,
    require_choice,
    require_float,
    require_int,
    require_integers,
    require_number,
    require_pair,
)
from omniattn.checks.packed import require_all_tokens

__all__ = [
    "alibi_bias",
    "alibi_slopes",
    "grid_positions",
    "interpolate_grid",
    "interpolate_positions",
    "masked_positions",
    "packed_positions",
    "sincos_2d",
    "sinusoidal",
]


def sinusoidal(
    positions: Tensor,
    dim: int,
    *,
    layout: str = "interleaved",
    freqs: str = "transformer",
    base: float = 10000.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Sinusoidal position encoding, to be added to embeddings (which the paper scales by sqrt(d)).

    ``PE[p, 2i] = sin(p / base^(2i / d))``, ``PE[p, 2i + 1] = cos(p / base^(2i / d))``.

    Args:
        positions: (...,), any integer dtype, any sign.
        dim: d > 0. An odd one drops the last cosine.
        layout: "interleaved" as above, or "concat": all sines before all cosines (Transformer-XL,
            Marian, fairseq).
        freqs: "transformer" as above, or "fairseq": ``base^(-i / (d / 2 - 1))``, for an even d > 2.
        base: > 0.
        dtype: of the result.

    Returns:
        PE (..., dim). Angles are taken in float64 and results rounded once, so the table is right
        at any position: at 10^6 the angle is off by less than 1e-9.

    Raises:
        TypeError: positions that are no integers, a dtype that is not floating-point.
        ValueError: another layout or freqs; a dim or base out of range.

    Reference:
        Vaswani et al., Attention Is All You Need, 2017, arXiv:1706.03762.

    Example:
        >>> sinusoidal(torch.tensor([1]), 4)
        tensor([[0.8415, 0.5403, 0.0100, 0.9999]])
    """
    op = "sinusoidal"
    require_integers(op, "positions", positions)
    require_choice(op, "layout", layout, ("interleaved", "concat"))
    require_choice(op, "freqs", freqs, ("transformer", "fairseq"))
    require_int(op, "dim", dim, 1)
    require_number(op, "base", base, above=0)
    _require_float_dtype(op, dtype)
    if freqs == "fairseq" and (dim % 2 or dim == 2):
        raise ValueError(f"{op}: dim must be even and > 2 for freqs='fairseq', got dim={dim}")
    return reference.sinusoidal(positions, dim, layout=layout, freqs=freqs, base=base, dtype=dtype)


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
    """Sinusoidal encoding of the patches of an image.

    Column x and row y of a row-major grid get ``[sin(x w) | cos(x w) | sin(y w) | cos(y w)]`` with
    ``w_k = base^(-k / (d / 4))``.

    Args:
        dim: d, a multiple of 4.
        height, width: of the grid, in patches.
        prefix: tokens before the patches (class token, registers), which get zeros.
        order: "wh" as above (MAE, MoCo v3), or "hw": the row first.
        base: > 0.
        device, dtype: of the result.

    Returns:
        (prefix + height * width, dim).

    Raises:
        TypeError, ValueError: see :func:`sinusoidal`.

    Reference:
        He et al., Masked Autoencoders Are Scalable Vision Learners, 2021, arXiv:2111.06377.

    Example:
        >>> sincos_2d(4, 1, 2)
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.8415, 0.5403, 0.0000, 1.0000]])
    """
    op = "sincos_2d"
    require_int(op, "dim", dim, 1)
    require_number(op, "base", base, above=0)
    _require_sizes(op, height=height, width=width, prefix=prefix)
    require_choice(op, "order", order, ("wh", "hw"))
    _require_float_dtype(op, dtype)
    if dim % 4:
        raise ValueError(f"{op}: dim must be a multiple of 4, got dim={dim}")
    return reference.sincos_2d(
        dim, height, width, prefix=prefix, order=order, base=base, device=device, dtype=dtype
    )


def grid_positions(
    height: int, width: int, *, prefix: int = 0, device: torch.device | None = None
) -> Tensor:
    """Returns row and column of an image's patches, for :func:`rotary_tables` with `axes`.

    Args:
        height, width: of the row-major grid, in patches.
        prefix: tokens before the patches; at (0, 0), so that they are not rotated.
        device: of the result.

    Returns:
        (2, prefix + height * width), int64.

    Raises:
        ValueError: a negative size.

    Example:
        >>> grid_positions(2, 2, prefix=1)
        tensor([[0, 0, 0, 1, 1],
                [0, 0, 1, 0, 1]])
    """
    _require_sizes("grid_positions", height=height, width=width, prefix=prefix)
    return reference.grid_positions(height, width, prefix=prefix, device=device)


def packed_positions(cu_seqlens: Tensor, total: int) -> Tensor:
    """Returns the positions of packed sequences, each starting at 0.

    Args:
        cu_seqlens: (N + 1,), any integer dtype: where the sequences start, and the end of the last;
            starts at 0 and never decreases.
        total: number of tokens, the last entry of cu_seqlens.

    Returns:
        (total,), int64.

    Raises:
        TypeError: cu_seqlens that are no integers.
        ValueError: a shape or value is invalid, or RuntimeError if values cannot be read at once,
            as in a graph or on a GPU.

    Example:
        >>> packed_positions(torch.tensor([0, 2, 5], dtype=torch.int32), 5)
        tensor([0, 1, 0, 1, 2])
    """
    op = "packed_positions"
    require_int(op, "total", total, 0)
    require_integers(op, "cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(
            f"{op}: cu_seqlens must have shape (N + 1,), "
            f"got cu_seqlens.shape={tuple(cu_seqlens.shape)}"
        )
    require_all_tokens(op, cu_seqlens, total)
    return reference.packed_positions(cu_seqlens, total)


def masked_positions(mask: Tensor) -> Tensor:
    """Returns the positions of padded sequences, counting real tokens (Hugging Face's GPT-2).

    Args:
        mask: (B, T), bool or integer: non-zero where a token is real.

    Returns:
        (B, T), int64: ``max(cumsum(mask) - 1, 0)``.

    Raises:
        TypeError: a floating-point mask.

    Example:
        >>> masked_positions(torch.tensor([[0, 0, 1, 1]]))
        tensor([[0, 0, 0, 1]])
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        require_integers("masked_positions", "mask", mask)
    return reference.masked_positions(mask != 0)


def interpolate_positions(table: Tensor, length: int) -> Tensor:
    """Resizes a learned position table to another length by linear interpolation.

    Args:
        table: (P, d), P > 0, floating-point; has a gradient.
        length: P' > 0.

    Returns:
        (P', d) of the table's dtype: row i is read at ``(i + 1/2) P / P' - 1/2``.

    Raises:
        TypeError, ValueError: a dtype, shape or length that does not fit.

    Example:
        >>> interpolate_positions(torch.tensor([[0.0], [1.0]]), 4).flatten()
        tensor([0.0000, 0.2500, 0.7500, 1.0000])
    """
    op = "interpolate_positions"
    _require_table(op, table)
    require_int(op, "length", length, 1)
    return reference.interpolate_positions(table, length)


def interpolate_grid(
    table: Tensor,
    old: tuple[int, int],
    new: tuple[int, int],
    *,
    prefix: int = 0,
    offset: float = 0.0,
    antialias: bool = False,
) -> Tensor:
    """Resizes a learned position table of image patches to another grid by bicubic interpolation.

    Args:
        table: (prefix + h w, d), the patches row by row; has a gradient.
        old: grid (h, w) of the table.
        new: new grid (h', w').
        prefix: leading rows that are kept unchanged (class token, registers).
        offset: row i of h' is read at ``(i + 1/2) h / (h' + offset) - 1/2``: 0 for Hugging Face's
            ViT and DINOv2 with registers, 0.1 for the official DINO and DINOv2.
        antialias: filter when the grid shrinks (DINOv2 with registers).

    Returns:
        (prefix + h' w', d) of the table's dtype.

    Raises:
        TypeError, ValueError: a dtype, shape, grid or offset that does not fit.

    Reference:
        Dosovitskiy et al., An Image is Worth 16x16 Words, 2020, arXiv:2010.11929; Caron et al.,
        Emerging Properties in Self-Supervised Vision Transformers, 2021, arXiv:2104.14294.

    Example:
        >>> interpolate_grid(torch.ones(5, 3), (2, 2), (4, 3), prefix=1).shape
        torch.Size([13, 3])
    """
    op = "interpolate_grid"
    _require_table(op, table)
    require_int(op, "prefix", prefix, 0)
    require_pair(op, "old", old, 1)
    require_pair(op, "new", new, 1)
    if table.shape[0] != prefix + old[0] * old[1]:
        raise ValueError(
            f"{op}: table must have prefix + h * w = {prefix} + {old[0] * old[1]} rows, "
            f"got table.shape={tuple(table.shape)}"
        )
    require_number(op, "offset", offset, 0, below=1)
    require_bool(op, "antialias", antialias)
    return reference.interpolate_grid(
        table, old, new, prefix=prefix, offset=offset, antialias=antialias
    )


def alibi_slopes(
    num_heads: int, *, max_exponent: float = 8.0, device: torch.device | None = None
) -> Tensor:
    """Returns the slopes per head of attention with linear biases (ALiBi).

    ``m_h = 2^(-8 (h + 1) / H)`` for a power of two H. Otherwise the slopes for the power of two c
    below H, followed by the first H - c of every other slope for 2c.

    Args:
        num_heads: H > 0, of the whole model: a tensor-parallel rank takes its part of the result.
        max_exponent: the 8 above (MPT's alibi_bias_max).
        device: of the result.

    Returns:
        (H,), float32.

    Raises:
        ValueError: a head count or exponent out of range.

    Reference:
        Press, Smith and Lewis, Train Short, Test Long: Attention with Linear Biases Enables Input
        Length Extrapolation, 2021, arXiv:2108.12409.

    Example:
        >>> alibi_slopes(3)
        tensor([0.0625, 0.0039, 0.2500])
    """
    require_int("alibi_slopes", "num_heads", num_heads, 1)
    require_number("alibi_slopes", "max_exponent", max_exponent, above=0)
    return reference.alibi_slopes(num_heads, max_exponent=max_exponent, device=device)


def alibi_bias(slopes: Tensor, q_len: int, k_len: int, *, form: str = "distance") -> Tensor:
    """Returns ALiBi's bias, for `attention(..., bias=...)`.

    ``-m_h |i + Tk - Tq - j|``: the last query is aligned with the last key, so a decoding step has
    Tq = 1.

    Args:
        slopes: (H,), one per query head; has a gradient.
        q_len, k_len: Tq, Tk.
        form: "distance" as above, or "bloom": ``m_h j``, which under a causal mask differs by a
            constant in each row and so gives the same attention in 1/Tq of the memory.

    Returns:
        (1, H, Tq, Tk) of the slopes' dtype; (1, H, 1, Tk) for "bloom".

    Raises:
        TypeError, ValueError: slopes, lengths or a form that do not fit.

    Reference:
        See :func:`alibi_slopes`; the BLOOM models use the other form, arXiv:2211.05100.

    Example:
        >>> alibi_bias(torch.tensor([0.5]), 1, 3)
        tensor([[[[-1.0000, -0.5000, -0.0000]]]])
    """
    op = "alibi_bias"
    require_float(op, "slopes", slopes)
    if slopes.dim() != 1:
        raise ValueError(
            f"{op}: slopes must have shape (H,), got slopes.shape={tuple(slopes.shape)}"
        )
    _require_sizes(op, q_len=q_len, k_len=k_len)
    require_choice(op, "form", form, ("distance", "bloom"))
    return reference.alibi_bias(slopes, q_len, k_len, form=form)


def _require_sizes(op: str, **values: int) -> None:
    for name, value in values.items():
        require_int(op, name, value, 0)


def _require_float_dtype(op: str, dtype: torch.dtype) -> None:
    if dtype not in FLOATS:
        raise TypeError(f"{op}: dtype must be a floating-point dtype, got dtype={dtype}")


def _require_table(op: str, table: Tensor) -> None:
    require_float(op, "table", table)
    if table.dim() != 2 or table.numel() == 0:
        raise ValueError(
            f"{op}: table must have shape (P, d) with P, d > 0, got "
            f"table.shape={tuple(table.shape)}"
        )
