"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and its frequency tables.

Pair i of a head turns by the angle p * theta_i at position p, theta_i = base^(-2i / Dr).
"""

import math
from dataclasses import dataclass

import torch

from omniattn.reference.precision import widen


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595): theta / factor."""

    factor: float

    def apply(self, theta: torch.Tensor) -> torch.Tensor:
        return theta / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1 (arXiv 2407.21783): long wavelengths / factor, short ones kept, a ramp between."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def apply(self, theta: torch.Tensor) -> torch.Tensor:
        turns = self.original_max_positions * theta / (2 * math.pi)
        ramp = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        ramp = ramp.clamp(0, 1)
        return theta * (ramp + (1 - ramp) / self.factor)


RopeScaling = LinearScaling | Llama3Scaling


def rope_frequencies(
    rotary_dim: int,
    *,
    base: float = 10000.0,
    scaling: RopeScaling | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """theta (Dr / 2,) fp64, so that the angle p * theta is still right at p = 10^6."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
    theta = base**-exponent
    return theta if scaling is None else scaling.apply(theta)


def rotary_tables(
    theta: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin (..., Dr / 2) of positions (...,): angles in fp64, results rounded."""
    angle = positions[..., None].double() * theta
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # one table for all heads
    turned, rest = widen(x[..., : 2 * half]), x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., :half], turned[..., half:]
    pair = (a * cos - b * sin, a * sin + b * cos)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def _rows(table: torch.Tensor, positions: torch.Tensor | int | None, tokens: int) -> torch.Tensor:
    if positions is None:
        return table
    if isinstance(positions, int):
        return table[..., positions : positions + tokens, :]
    return table[positions]


def apply_rotary(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    positions: torch.Tensor | int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotates the first Dr of D dims of q (B,T,Hq,D) and k (B,T,Hkv,D).

    cos, sin (T,Dr/2) or (B,T,Dr/2), or (P,Dr/2) whose rows are chosen by positions: (T,) or (B,T),
    or the number of the first row. Pairs are (i, i + Dr/2), or (2i, 2i + 1) if `interleaved`.
    """
    cos, sin = (_rows(widen(table), positions, q.shape[1]) for table in (cos, sin))

    def turn(x: torch.Tensor) -> torch.Tensor:
        y = _rotate(x, cos, sin, interleaved)
        return x.copy_(y) if inplace else y

    return turn(q), None if k is None else turn(k)
