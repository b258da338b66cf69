"""Rows of position encodings: tables, and rotary embeddings with each scaling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniattn import functional as F
from omniattn import reference as r
from omniattn.modules import RotaryEmbedding
from system_rows.system import Provider, System, functions, normal, rotate_half

T, SIZE = 1024, 64


def _rotation(positions: Tensor | None = None, **options: Any) -> dict[str, Provider]:
    """Makes tables and rotates queries and keys, as transformers does at each call."""
    rope = RotaryEmbedding(RotaryEmbedding.Config(SIZE, **options))
    place = torch.arange(T) if positions is None else positions
    q, k = normal(1, T, 8, SIZE), normal(1, T, 2, SIZE, seed=1)
    scaling, sections = rope.config.scaling, rope.config.sections
    if rope.config.num_axes > 1:
        theta, axes = F.axial_frequencies(SIZE, num_axes=rope.config.num_axes)
    else:
        theta = F.rope_frequencies(SIZE, scaling=scaling, seq_len=None if scaling is None else T)
        axes = None if sections is None else F.mrope_axes(sections)
    factor = 1.0 if scaling is None else scaling.magnitude

    def ours(q: Tensor, k: Tensor) -> Any:
        return F.apply_rotary(q, k, *rope(place))

    def hf(q: Tensor, k: Tensor) -> Any:
        rows = place[:, None] if axes is None else place[list(axes)].T
        angle = rows.float() * theta.float()
        angle = torch.cat((angle, angle), -1)
        cos, sin = angle.cos() * factor, angle.sin() * factor
        return rotate_half(q, cos, sin), rotate_half(k, cos, sin)

    return functions([q, k], ours=ours, hf=hf)


def _row(name: str, positions: Tensor | None = None, **options: Any) -> System:
    return System(f"{name}-T{T}H8D{SIZE}", lambda: _rotation(positions, **options))


def _sinusoid(positions: Tensor) -> Tensor:
    angle = positions[:, None] * 10000.0 ** -(torch.arange(0, 512, 2, dtype=torch.float64) / 512)
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2).float()


def _sincos(side: int) -> Tensor:
    theta = 10000.0 ** -(torch.arange(128, dtype=torch.float64) / 128)
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    halves = [t.flatten()[:, None] * theta for t in (columns, rows)]
    return torch.cat([f(t) for t in halves for f in (torch.sin, torch.cos)], -1).float()


def _resized(table: Tensor) -> Tensor:
    grid = table.view(1, 14, 14, -1).permute(0, 3, 1, 2)
    grown = torch.nn.functional.interpolate(
        grid, (24, 24), mode="bicubic", align_corners=False, antialias=False
    )
    return grown.permute(0, 2, 3, 1).flatten(0, 2)


def _packed() -> dict[str, Provider]:
    lengths = torch.randint(1, 64, (256,), generator=torch.Generator().manual_seed(0))
    ends = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    total = int(ends[-1])

    def eager() -> Tensor:
        return torch.arange(total) - ends[:-1].repeat_interleave(lengths)

    return functions([], ours=lambda: F.packed_positions(ends, total), eager=eager)


def _grid() -> Tensor:
    return F.grid_positions(32, 32)


LONG = r.LongRopeScaling((1.0,) * 32, tuple(1.0 + n / 4 for n in range(32)), 4.0, 512)
POSITIONS: dict[str, tuple[System, ...]] = {
    "RoPE with linear scaling": (_row("linear", scaling=r.LinearScaling(4.0)),),
    "RoPE with NTK and dynamic NTK scaling": (
        _row("ntk", scaling=r.NTKScaling(4.0)),
        _row("dynamicntk", scaling=r.DynamicNTKScaling(4.0, 512)),
    ),
    "RoPE with YaRN scaling": (_row("yarn", scaling=r.YarnScaling(4.0, 512)),),
    "RoPE with Llama 3 scaling": (_row("llama3", scaling=r.Llama3Scaling()),),
    "RoPE with LongRoPE scaling": (_row("longrope", scaling=LONG),),
    "M-RoPE, contiguous or interleaved sections": (
        _row("mrope", torch.arange(3 * T).view(3, T) % T, sections=(8, 12, 12)),
    ),
    "2-D RoPE": (_row("axial", F.grid_positions(32, 32), num_axes=2),),
    "sinusoidal positions": (
        System(
            "sinusoid-T4096C512",
            lambda: functions(
                [],
                ours=lambda: F.sinusoidal(torch.arange(4096), 512),
                eager=lambda: _sinusoid(torch.arange(4096)),
            ),
        ),
    ),
    "learned positions, 1-D and 2-D interpolation": (
        System(
            "resized-S14to24C256",
            lambda: functions(
                [normal(196, 256)],
                ours=lambda t: F.interpolate_grid(t, (14, 14), (24, 24)),
                hf=_resized,
            ),
        ),
    ),
    "2-D sin-cos positions": (
        System(
            "sincos-S64C512",
            lambda: functions([], ours=lambda: F.sincos_2d(512, 64, 64), eager=lambda: _sincos(64)),
        ),
    ),
    "position ids of packed and padded sequences": (System("packed-N256", _packed),),
}
