"""Attention to a window, and to hubs or representatives of earlier keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_choice, shown
from omniattn.functional.masks import GlobalTokens, Representatives
from omniattn.modules.base.fields import Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.sparse.sparse_attention import SparseAttention, SparseConfig


class HubSpokeAttention(SparseAttention):
    """Causal attention to a window and to hubs: `functional.hub_spoke_attention`.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> (B, T, dim). Parameters q_proj, k_proj, v_proj, o_proj; with `dual`
        q_global_proj, k_global_proj and v_global_proj.

    Reference:
        See `functional.hub_spoke_attention`.

    Example:
        >>> layer = HubSpokeAttention(dim=16, num_heads=4, window=2, global_every=4)
        >>> layer(torch.ones(1, 9, 16)).shape
        torch.Size([1, 9, 16])
    """

    @dataclass(frozen=True)
    class Config(SparseConfig):
        """Fields of `SparseConfig`, and the pattern.

        Args:
            window: number of keys before the query.
            global_index, global_every: the hubs: positions, and multiples of a number.
            dual: "disjoint", "longformer" or None, see the function.
        """

        window: Size = 127
        global_index: tuple[int, ...] = (0,)
        global_every: int | None = None
        dual: str | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            GlobalTokens(self.global_index, self.global_every)
            if self.dual not in (None, "disjoint", "longformer"):
                raise ValueError(
                    'HubSpokeAttention: dual must be "disjoint", "longformer" or None, '
                    f"got dual={shown(self.dual)}"
                )

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
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

    @property
    def _second(self) -> bool:
        return bool(self.config.dual)

    def _attend(self, *tensors: Tensor, x: Tensor, **given: Any) -> Tensor:
        c = self.config
        return functional.hub_spoke_attention(
            *tensors,
            window=c.window,
            global_index=c.global_index,
            global_every=c.global_every,
            dual=c.dual,
            **self._score_options(),
        )


class DeterministicSparseAttention(SparseAttention):
    """Causal attention to a window and to representatives: `functional.detsa_attention`.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> (B, T, dim). Parameters q_proj, k_proj, v_proj, o_proj.

    Reference:
        See `functional.detsa_attention`.

    Example:
        >>> layer = DeterministicSparseAttention(dim=16, num_heads=4, window=2, stride=3)
        >>> layer(torch.ones(1, 9, 16)).shape
        torch.Size([1, 9, 16])
    """

    @dataclass(frozen=True)
    class Config(SparseConfig):
        """Fields of `SparseConfig`, and the pattern, see the function."""

        window: Size = 256
        stride: int = 64
        global_index: tuple[int, ...] = (0,)
        anchor: str = "relative"
        representative: str = "token"
        count_bias: bool = False
        levels: tuple[tuple[int, int], ...] | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            Representatives(self.window, self.stride, self.anchor, self.levels)
            op = "DeterministicSparseAttention"
            require_choice(op, "representative", self.representative, ("token", "mean"))
            if self.count_bias and self.representative != "mean":
                raise ValueError(
                    f'{op}: count_bias needs representative="mean", '
                    f"got representative={self.representative!r}"
                )

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
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
        return functional.detsa_attention(
            *tensors,
            window=c.window,
            stride=c.stride,
            global_index=c.global_index,
            anchor=c.anchor,
            representative=c.representative,
            count_bias=c.count_bias,
            levels=c.levels,
            **self._score_options(),
        )
