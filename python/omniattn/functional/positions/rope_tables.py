"""Frequencies and tables of rotary position embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from omniattn import reference
from omniattn.checks.arguments import (
    FLOATS,
    require_bool,
    require_float,
    require_int,
    require_integers,
    require_number,
    shown,
)
from omniattn.reference.positions.rope_scaling import RopeScaling as RopeScaling
from omniattn.reference.positions.rope_scaling import scaling_from_hf

__all__ = ["axial_frequencies", "mrope_axes", "rope_frequencies", "rotary_tables"]


def rope_frequencies(
    rotary_dim: int,
    *,
    base: float = 10000.0,
    scaling: RopeScaling | Mapping[str, Any] | None = None,
    seq_len: int | Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Returns the angle per position of each pair of dimensions.

    ``theta_i = base^(-2 i / Dr)`` for ``i = 0 .. Dr / 2 - 1``, then scaled.

    Args:
        rotary_dim: Dr, the number of rotated dimensions; even.
        base: > 0; a larger one gives longer wavelengths.
        scaling: for contexts longer than trained on: `LinearScaling`, `NTKScaling`,
            `DynamicNTKScaling`, `YarnScaling`, `Llama3Scaling` or `LongRopeScaling`, or Hugging
            Face's dictionary, `{"rope_type": "yarn", "factor": 4.0, ...}`, as
            :func:`scaling_from_hf` reads it. Pass its `magnitude` to :func:`rotary_tables`.
        seq_len: length of the whole context, cached tokens included, for the dynamic and LongRoPE
            scalings: an int, or a 0-d tensor, which needs no wait for a GPU. None: not longer than
            trained on.
        device: of the result.

    Returns:
        theta (Dr / 2,), float64, so that ``p * theta`` is off by less than 1e-9 at position 10^6.

    Raises:
        ValueError: an odd or negative rotary_dim, a base out of range, a scaling of another size.
        TypeError: a scaling of another type.

    Reference:
        Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021,
        arXiv:2104.09864.

    Example:
        >>> rope_frequencies(4)
        tensor([1.0000, 0.0100], dtype=torch.float64)
    """
    op = "rope_frequencies"
    require_int(op, "rotary_dim", rotary_dim)
    if rotary_dim < 0 or rotary_dim % 2 != 0:
        raise ValueError(f"{op}: rotary_dim must be even and >= 0, got rotary_dim={rotary_dim}")
    require_number(op, "base", base, above=0)
    scaling = rope_scaling(op, scaling)
    if seq_len is not None:
        if not isinstance(seq_len, Tensor):
            require_int(op, "seq_len", seq_len, 0)
        elif seq_len.dim() != 0:
            raise ValueError(f"{op}: seq_len must be 0-d, got seq_len.shape={tuple(seq_len.shape)}")
    return reference.rope_frequencies(
        rotary_dim, base=base, scaling=scaling, seq_len=seq_len, device=device
    )


def rope_scaling(op: str, scaling: object) -> RopeScaling | None:
    """Converts `scaling` to a `RopeScaling`."""
    if isinstance(scaling, Mapping):
        return scaling_from_hf(scaling)
    if scaling is not None and not isinstance(scaling, RopeScaling):
        raise TypeError(
            f"{op}: scaling must be None, a RopeScaling or a mapping with a rope_type, "
            f"got scaling={shown(scaling)}"
        )
    return scaling


def axial_frequencies(
    rotary_dim: int,
    *,
    num_axes: int = 2,
    base: float = 10000.0,
    device: torch.device | None = None,
) -> tuple[Tensor, tuple[int, ...]]:
    """Returns frequencies for positions with several coordinates, which share the pairs evenly.

    With two axes pairs ``0 .. Dr / 4 - 1`` rotate by the row, the rest by the column, both with
    ``theta_i = base^(-4 i / Dr)``.

    Args:
        rotary_dim: Dr, a multiple of 2 * num_axes.
        num_axes: coordinates of a position.
        base: > 0.
        device: of theta.

    Returns:
        theta (Dr / 2,), float64, and the axis of each pair, both for :func:`rotary_tables`.

    Raises:
        ValueError: a rotary_dim, num_axes or base out of range.

    Reference:
        Fang et al., EVA-02, 2023, arXiv:2303.11331; Wang et al., Qwen2-VL, 2024, arXiv:2409.12191.

    Example:
        >>> axial_frequencies(8)
        (tensor([1.0000, 0.0100, 1.0000, 0.0100], dtype=torch.float64), (0, 0, 1, 1))
    """
    op = "axial_frequencies"
    require_int(op, "num_axes", num_axes, 1)
    require_int(op, "rotary_dim", rotary_dim, 0)
    if rotary_dim % (2 * num_axes):
        raise ValueError(
            f"{op}: rotary_dim must be a multiple of 2 * num_axes, "
            f"got rotary_dim={rotary_dim}, num_axes={num_axes}"
        )
    require_number(op, "base", base, above=0)
    return reference.axial_frequencies(rotary_dim, num_axes=num_axes, base=base, device=device)


def mrope_axes(sections: Sequence[int], *, interleaved: bool = False) -> tuple[int, ...]:
    """Returns the coordinate of (time, height, width) that rotates each pair in M-RoPE.

    Args:
        sections: pairs of each coordinate, Dr / 2 together; (16, 24, 24) in Qwen2-VL.
        interleaved: t h w t h w ... as long as a coordinate has pairs left, then t (Qwen3-VL),
            instead of consecutive sections.

    Returns:
        (Dr / 2,) coordinates, the `axes` of :func:`rotary_tables`. Text tokens carry three equal
        position ids, and so are rotated as without M-RoPE.

    Raises:
        ValueError: negative sections; interleaved ones with less than a third for the first.

    Reference:
        Wang et al., Qwen2-VL, 2024, arXiv:2409.12191; interleaved: Qwen3-VL, 2025.

    Example:
        >>> mrope_axes((1, 2, 1)), mrope_axes((2, 1, 1), interleaved=True)
        ((0, 1, 1, 2), (0, 1, 2, 0))
    """
    op = "mrope_axes"
    if not isinstance(sections, Sequence):
        raise TypeError(
            f"{op}: sections must be a sequence of ints, got sections={shown(sections)}"
        )
    for size in sections:
        require_int(op, "each of sections", size, 0)
    require_bool(op, "interleaved", interleaved)
    if interleaved and any(size > sections[0] for size in sections):
        raise ValueError(
            f"{op}: sections must not exceed the first one where they are interleaved, "
            f"got sections={tuple(sections)}"
        )
    return reference.mrope_axes(sections, interleaved=interleaved)


def rotary_tables(
    theta: Tensor,
    positions: Tensor,
    dtype: torch.dtype = torch.float32,
    *,
    axes: Sequence[int] | None = None,
    magnitude: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of the angles ``positions * theta``.

    Args:
        theta: (Dr / 2,), as :func:`rope_frequencies` gives it.
        positions: (...,), any integer dtype, any sign, on theta's device: offset while decoding,
            :func:`packed_positions` for packed sequences. (A, ...) with `axes`.
        dtype: dtype of the tables. :func:`apply_rotary` computes in float32 (float64 for float64
            q), and converts tables of other dtypes at each call.
        axes: which of A coordinates rotates each pair, from :func:`mrope_axes` or
            :func:`axial_frequencies`.
        magnitude: factor of cos and sin, `RopeScaling.magnitude`.

    Returns:
        cos, sin (..., Dr / 2) of `dtype`. The angles are taken in float64 and the results rounded
        once, so that no position loses precision: in float32 an angle of 10^6 would be off by 0.03.

    Raises:
        TypeError: a dtype that does not fit.
        ValueError: theta is not a vector; axes that do not fit.

    Example:
        >>> cos, sin = rotary_tables(rope_frequencies(2), torch.arange(2))
        >>> sin
        tensor([[0.0000],
                [0.8415]])
    """
    op = "rotary_tables"
    require_float(op, "theta", theta)
    if theta.dim() != 1:
        raise ValueError(f"{op}: theta must have 1 dimension, got theta.shape={tuple(theta.shape)}")
    require_integers(op, "positions", positions)
    if dtype not in FLOATS:
        raise TypeError(f"{op}: dtype must be a floating-point dtype, got dtype={shown(dtype)}")
    require_number(op, "magnitude", magnitude)
    if axes is not None:
        if not isinstance(axes, Sequence):
            raise TypeError(f"{op}: axes must be a sequence of ints, got axes={shown(axes)}")
        for axis in axes:
            require_int(op, "each of axes", axis)
        count = positions.shape[0] if positions.dim() else 0
        if len(axes) != theta.numel() or not all(0 <= a < count for a in axes):
            raise ValueError(
                f"{op}: axes must have one entry in [0, {count}), the rows of positions, for each "
                f"of the {theta.numel()} pairs, got axes={tuple(axes)}"
            )
    return reference.rotary_tables(theta, positions, dtype, axes=axes, magnitude=magnitude)
