"""Rotary tables, computed once per forward pass and shared by a model's layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_integers, require_number
from omniattn.functional.positions.rope_tables import RopeScaling, rope_scaling
from omniattn.modules.base.fields import Positive, Size
from omniattn.modules.base.forms import ConfigAlone, either
from omniattn.modules.base.layer import Layer, LayerConfig, config_or_fields


class RotaryEmbedding(Layer):
    """Computes cos and sin of p * theta_i, theta_i = base^(-2i / rotary_dim), possibly scaled.

    Each call computes the tables from the positions in fp64. They are not stored in a buffer, so
    `module.to(torch.bfloat16)` cannot round the angles.

    Args:
        config: frequencies and options.

    Shape:
        positions (T,) or (B, T) int -> cos, sin (T, rotary_dim / 2) or (B, T, rotary_dim / 2) fp32.
        With `sections` (M-RoPE) or `num_axes` > 1 positions are (A, T) or (A, B, T), with one row
        per coordinate.

    Notes:
        The dynamic and LongRoPE scalings depend on the largest position of each call, computed on
        the device without synchronisation; `seq_len` overrides it.

    Reference:
        Su et al., "RoFormer", 2021, arXiv 2104.09864; M-RoPE: Wang et al., "Qwen2-VL", 2024, arXiv
        2409.12191.

    Example:
        >>> cos, sin = RotaryEmbedding(RotaryEmbedding.Config(4))(torch.arange(3))
        >>> cos.shape
        torch.Size([3, 2])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Frequencies of the rotation.

        Args:
            rotary_dim: number of rotated dimensions, even, at most the head size.
            base: base of the geometric series of wavelengths.
            scaling: for contexts longer than the trained length, see functional.rope_frequencies; a
                mapping in Hugging Face's form, {"rope_type": "llama3", ...}, becomes a RopeScaling.
            sticky: True to use the largest length so far until a call within the trained length
                (Hugging Face); by default each call uses its own length.
            sections: numbers of pairs for time, height and width (M-RoPE).
            sections_interleaved: t h w t h w ... (Qwen3-VL) instead of contiguous sections.
            num_axes: 2 for images: row and column each rotate half of the pairs.
        """

        rotary_dim: Size
        base: Positive = 10000.0
        scaling: RopeScaling | None = None
        sticky: bool = False
        sections: tuple[int, ...] | None = None
        sections_interleaved: bool = False
        num_axes: Size = 1

        def __post_init__(self) -> None:
            super().__post_init__()
            require_number("RotaryEmbedding", "base", self.base, above=0)
            object.__setattr__(self, "scaling", rope_scaling("RotaryEmbedding", self.scaling))
            if self.sections is not None:
                functional.mrope_axes(self.sections, interleaved=self.sections_interleaved)
            if self.rotary_dim <= 0 or self.rotary_dim % (2 * self.num_axes):
                raise ValueError(
                    "RotaryEmbedding: rotary_dim must be a positive multiple of 2 * num_axes, "
                    f"got rotary_dim={self.rotary_dim}, num_axes={self.num_axes}"
                )
            if self.sections is not None and 2 * sum(self.sections) != self.rotary_dim:
                raise ValueError(
                    "RotaryEmbedding: sections must add up to rotary_dim / 2, "
                    f"got sections={self.sections}, rotary_dim={self.rotary_dim}"
                )
            if self.num_axes > 1 and (self.scaling is not None or self.sections is not None):
                raise ValueError(
                    "RotaryEmbedding: num_axes must be 1 with a scaling or sections, "
                    f"got num_axes={self.num_axes}"
                )
            trained = getattr(self.scaling, "original_max_positions", None)
            if self.sticky and trained is None:
                raise ValueError(
                    "RotaryEmbedding: sticky requires a scaling with a trained length, "
                    f"got scaling={self.scaling}"
                )

    longest: Tensor

    @config_or_fields(Config, either(ConfigAlone[Config], Config).init)
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        if config.sticky:
            self.register_buffer("longest", torch.tensor(0), persistent=False)

    def reset_parameters(self) -> None:
        """Resets the largest length so far."""
        if self.config.sticky:
            self.longest.zero_()

    def forward(self, positions: Tensor, seq_len: int | None = None) -> tuple[Tensor, Tensor]:
        """Maps positions (..., T) to cos, sin (..., T, rotary_dim / 2).

        `seq_len` is the length of the whole context; default: the largest position + 1.
        """
        require_integers("RotaryEmbedding", "positions", positions)
        c, device = self.config, positions.device
        axes = c.num_axes if c.sections is None else len(c.sections)
        several = c.num_axes > 1 or c.sections is not None
        if several and (positions.dim() < 2 or positions.shape[0] != axes):
            raise ValueError(
                f"RotaryEmbedding: positions must have shape ({axes}, ..., T), one row per "
                f"coordinate, got positions.shape={tuple(positions.shape)}"
            )
        if c.num_axes > 1:
            theta, axis = functional.axial_frequencies(
                c.rotary_dim, num_axes=c.num_axes, base=c.base, device=device
            )
            return functional.rotary_tables(theta, positions, axes=axis)
        theta = functional.rope_frequencies(
            c.rotary_dim,
            base=c.base,
            scaling=c.scaling,
            seq_len=None if c.scaling is None else self._length(positions, seq_len),
            device=device,
        )
        return functional.rotary_tables(
            theta,
            positions,
            axes=None
            if c.sections is None
            else functional.mrope_axes(c.sections, interleaved=c.sections_interleaved),
            magnitude=1.0 if c.scaling is None else c.scaling.magnitude,
        )

    def _length(self, positions: Tensor, seq_len: int | None) -> int | Tensor | None:
        if seq_len is None and positions.numel() == 0:
            return None
        length = positions.long().max() + 1 if seq_len is None else seq_len
        if not self.config.sticky:
            return length
        now = torch.as_tensor(length, device=self.longest.device)
        within = now < self.config.scaling.original_max_positions  # type: ignore[union-attr]
        self.longest.copy_(torch.where(within, now, now.maximum(self.longest)))
        return self.longest
