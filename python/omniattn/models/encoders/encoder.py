"""Base class of encoder configs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omniattn.models.model import ModelConfig
from omniattn.modules import MLP, Attention, LayerNorm, Linear
from omniattn.modules.base.fields import Epsilon


@dataclass(frozen=True)
class EncoderConfig(ModelConfig):
    """Config of an encoder with LayerNorms, biases and bidirectional attention.

    Args:
        norm_eps: epsilon of the norms.
        init_std: standard deviation of all initial weights.
    """

    norm_eps: Epsilon = 1e-6
    init_std: float = 0.02

    @property
    def common(self) -> dict[str, Any]:
        """Options that the configs of all layers share."""
        return {"init_std": self.init_std, "out_init_std": self.init_std, "backend": self.backend}

    def linear(self, n_in: int, n_out: int) -> Linear.Config:
        """Returns the config of a linear layer."""
        return Linear.Config(n_in, n_out, True, self.init_std, self.backend)

    def layer_norm(self, dim: int) -> LayerNorm.Config:
        """Returns the config of a norm."""
        return LayerNorm.Config(dim, self.norm_eps, backend=self.backend)

    def attention(self, dim: int, num_heads: int, dropout_p: float = 0.0) -> Attention.Config:
        """Returns the config of a layer's token mixer."""
        return Attention.Config(
            dim,
            num_heads,
            causal=False,
            bias=True,
            out_bias=True,
            dropout_p=dropout_p,
            **self.common,
        )

    def mlp(self, dim: int, hidden_dim: int) -> MLP.Config:
        """Returns the config of a layer's channel mixer."""
        return MLP.Config(dim, hidden_dim, **self.common)
