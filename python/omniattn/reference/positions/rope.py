"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and its frequency tables.

Pair i of a head is rotated by the angle p * theta_i at position p, theta_i = base^(-2i / Dr).
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from omniattn.reference.layers.norm import norm
from omniattn.reference.positions.rope_scaling import RopeScaling
from omniattn.reference.precision import widen
from omniattn.reference.values import require_values

#: Type of optional keys, and of their result.
OptionalTensor = TypeVar("OptionalTensor", torch.Tensor, None, torch.Tensor | None)


def rope_frequencies(
    rotary_dim: int,
    *,
    base: float = 10000.0,
    scaling: RopeScaling | None = None,
    seq_len: int | torch.Tensor | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Returns theta (Dr / 2,) in fp64, which keeps the angle p * theta accurate at p = 10^6."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
    theta = base**-exponent
    return theta if scaling is None else scaling.apply(theta, base=base, seq_len=seq_len)


def axial_frequencies(
    rotary_dim: int,
    *,
    num_axes: int = 2,
    base: float = 10000.0,
    device: torch.device | None = None,
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Returns theta and axes for positions of `num_axes` coordinates, Dr / num_axes dims each."""
    theta = rope_frequencies(rotary_dim // num_axes, base=base, device=device)
    pairs = theta.numel()
    return theta.repeat(num_axes), tuple(a for a in range(num_axes) for _ in range(pairs))


def mrope_axes(sections: Sequence[int], *, interleaved: bool = False) -> tuple[int, ...]:
    """Returns the coordinate (0 t, 1 h, 2 w) of each pair, in sections or `interleaved`."""
    if not interleaved:
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    return tuple(
        axis if i < len(sections) * sections[axis] else 0
        for i in range(sum(sections))
        for axis in [i % len(sections)]
    )


def rotary_tables(
    theta: torch.Tensor,
    positions: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    *,
    axes: Sequence[int] | None = None,
    magnitude: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cos, sin (..., Dr / 2) for positions (...,), with angles in fp64, rounded to `dtype`.

    With `axes` (Dr / 2,), positions (A, ...) have A coordinates, and coordinate axes[i] rotates
    pair i.
    """
    if axes is None:
        angle = positions[..., None].double() * theta
    else:
        chosen = torch.tensor(axes, dtype=torch.int64, device=positions.device)
        angle = positions.movedim(0, -1)[..., chosen].double() * theta
    return (angle.cos() * magnitude).to(dtype), (angle.sin() * magnitude).to(dtype)


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, start: int, interleaved: bool
) -> torch.Tensor:
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # one table for all heads
    before, turned, rest = x.tensor_split((start, start + 2 * half), -1)
    turned = widen(turned)
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., :half], turned[..., half:]
    pair = (a * cos - b * sin, a * sin + b * cos)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([before, turned.to(x.dtype), rest], -1)


def _rows(table: torch.Tensor, positions: torch.Tensor | int | None, tokens: int) -> torch.Tensor:
    if positions is None:
        return table
    if isinstance(positions, int):
        return table[..., positions : positions + tokens, :]
    rows = positions.long()  # uint8 would be a mask
    error = "apply_rotary, qk_norm_rotary: positions must be in [0, P), the rows of cos and sin"
    require_values(error, (rows >= 0) & (rows < table.shape[-2]))
    return table[rows]


def apply_rotary(
    q: torch.Tensor,
    k: OptionalTensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    positions: torch.Tensor | int | None = None,
    rotary_start: int = 0,
    interleaved: bool = False,
    inverse: bool = False,
    inplace: bool = False,
) -> tuple[torch.Tensor, OptionalTensor]:
    """Rotates dims rotary_start, ..., rotary_start + Dr - 1 of q (B,T,Hq,D) and k (B,T,Hkv,D).

    cos, sin are (T,Dr/2) or (B,T,Dr/2); or (P,Dr/2), from which positions (T,) or (B,T) select
    rows, or an int is the first row. Pairs are (i, i + Dr/2), or (2i, 2i + 1) if `interleaved`.
    `inverse` rotates by the negative angle.
    """
    cos, sin = (
        _rows(widen(table), positions, q.shape[1]) for table in (cos, -sin if inverse else sin)
    )

    def turn(x: torch.Tensor) -> torch.Tensor:
        y = _rotate(x, cos, sin, rotary_start, interleaved)
        return x.copy_(y) if inplace else y

    return turn(q), None if k is None else turn(k)


def norm_rotary(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | int | None,
    rotary_start: int,
    interleaved: bool,
    eps: float,
    offset: float,
    cast_first: bool,
) -> torch.Tensor:
    """apply_rotary of rms_norm(x, weight), rounded once.

    With `cast_first` it rounds where apply_rotary and rms_norm with casting "llama" round.
    """
    inputs = (x, weight)
    if not cast_first:
        inputs = (widen(x), None if weight is None else widen(weight))
    normed: Any = norm(
        inputs[0],
        None,
        inputs[1],
        None,
        center=False,
        eps=eps,
        offset=offset,
        cast_first=cast_first,
    )
    y, _ = apply_rotary(
        normed,
        None,
        cos,
        sin,
        positions=positions,
        rotary_start=rotary_start,
        interleaved=interleaved,
    )
    return y.to(x.dtype)


def qk_norm_rotary(
    q: torch.Tensor,
    k: OptionalTensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "fp32",
    positions: torch.Tensor | int | None = None,
    rotary_start: int = 0,
    interleaved: bool = False,
) -> tuple[torch.Tensor, OptionalTensor]:
    """apply_rotary of rms_norm(q, q_weight) and rms_norm(k, k_weight), rounded once.

    With casting "llama" it rounds where the two functions round.
    """
    rest = (cos, sin, positions, rotary_start, interleaved, eps, offset, casting == "llama")
    return (
        norm_rotary(q, q_weight, *rest),
        None if k is None else norm_rotary(k, k_weight, *rest),
    )
