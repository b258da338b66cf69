"""BigBird: near, global and random blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omniattn import functional
from omniattn.modules import _signatures
from omniattn.modules.layer import config_or_fields
from omniattn.modules.sparse_attention import SparseAttention, SparseConfig


class BigBirdAttention(SparseAttention):
    """Attention to near, global and random blocks: `functional.bigbird_attention`.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Shape:
        x (B, T, dim) -> (B, T, dim). Parameters q_proj, k_proj, v_proj, o_proj.

    Reference:
        Zaheer et al., Big Bird: Transformers for Longer Sequences, 2020, arXiv 2007.14062.

    Example:
        >>> layer = BigBirdAttention(dim=16, num_heads=4, block=4, n_random=1)
        >>> layer(torch.ones(1, 40, 16)).shape
        torch.Size([1, 40, 16])
    """

    @dataclass(frozen=True)
    class Config(SparseConfig):
        """The fields of `SparseConfig`, and the pattern.

        Args:
            block: tokens of a block.
            n_random, seed, draw: of the random blocks; layers of a model have their own draw.
            causal: query i sees keys up to its own position, and random blocks are drawn from those
                before; then the last block that sees all is that of max_length.
            max_length: tokens of which blocks are counted, so that texts of any length have the
                same pattern; None for those of x, without a state.
        """

        block: int = 64
        n_random: int = 3
        seed: int = 0
        draw: int = 0
        causal: bool = False
        max_length: int | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.causal and self.max_length is None:
                raise ValueError("BigBirdAttention: causal=True needs max_length, got None")

    @config_or_fields(Config, _signatures.BigBirdAttention)
    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self._build(device, dtype)

    def _attend(self, *tensors: Tensor, x: Tensor, **given: Any) -> Tensor:
        c = self.config
        return functional.bigbird_attention(
            *tensors,
            block=c.block,
            n_random=c.n_random,
            seed=c.seed,
            draw=c.draw,
            length=c.max_length,
            causal=c.causal,
            scale=c.scale,
            backend=c.backend,
        )
