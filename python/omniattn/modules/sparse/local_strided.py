"""Gated mean of local and strided attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import require_choice
from omniattn.modules.base.fields import Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.sparse.sparse_attention import SparseAttention, SparseConfig


class LocalStridedAttention(SparseAttention):
    """Computes y = W_o (g O_local + (1 - g) O_strided), g = sigmoid(W_l x + b_l), causal.

    O_local and O_strided are attention to the last `window` keys and to every `stride`-th key, each
    with its own softmax: `functional.local_strided_attention`. b_l is initialised to ln 4, so that
    g starts near 0.8.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> (B, T, dim). Parameters q_proj, k_proj, v_proj, l_proj, and o_proj unless
        residual_inside.

    Reference:
        No paper; the patterns come from Child et al., Generating Long Sequences with Sparse
        Transformers, 2019, arXiv 1904.10509.

    Example:
        >>> layer = LocalStridedAttention(dim=16, num_heads=4, window=2, stride=3)
        >>> layer(torch.ones(1, 9, 16)).shape
        torch.Size([1, 9, 16])
    """

    @dataclass(frozen=True)
    class Config(SparseConfig):
        """Fields of `SparseConfig`, and the pattern.

        Args:
            window: number of keys of O_local, including the query's own.
            stride: distance between the keys of O_strided.
            gate: "elementwise", or "headwise" for one g per head.
            residual_inside: True for y = x + g O_local + (1 - g) O_strided, without W_o; x is the
                layer's input, after the block's norm. Requires num_heads * head_dim = dim.
        """

        window: Size = 2048
        stride: Size = 64
        gate: str = "elementwise"
        residual_inside: bool = False

        def __post_init__(self) -> None:
            super().__post_init__()
            op = "LocalStridedAttention"
            require_choice(op, "gate", self.gate, ("elementwise", "headwise"))
            if self.residual_inside and self.num_heads * self.head_size != self.dim:
                raise ValueError(
                    f"{op}: residual_inside needs num_heads * head_dim = dim, "
                    f"got num_heads={self.num_heads}, head_dim={self.head_size}, dim={self.dim}"
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
        self.config = c = config
        self._build(device, dtype)
        gates = c.num_heads * (c.head_size if c.gate == "elementwise" else 1)
        own = Linear.Config(c.dim, gates, True, c.init_std, c.backend)
        self.l_proj = Linear(own, device=device, dtype=dtype)
        self.draws("l_proj")
        self.reset_parameters()

    @property
    def _projects_out(self) -> bool:
        return not self.config.residual_inside

    def reset_parameters(self) -> None:
        """Draws l_proj's weight and sets its bias to ln 4 = logit(0.8)."""
        nn.init.normal_(self.l_proj.weight, std=self.config.init_std)
        assert self.l_proj.bias is not None
        nn.init.constant_(self.l_proj.bias, math.log(4))

    def _attend(self, *tensors: Tensor, x: Tensor, **given: Any) -> Tensor:
        c = self.config
        q, k, v = tensors
        return functional.local_strided_attention(
            *(q, k, v, self.l_proj(x).unflatten(-1, (c.num_heads, -1))),
            window=c.window,
            stride=c.stride,
            **self._score_options(),
        )

    def _output(self, out: Tensor, x: Tensor) -> Tensor:
        return x + out if self.config.residual_inside else super()._output(out, x)
