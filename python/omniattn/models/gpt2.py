"""GPT-2: learned positions, LayerNorm in front, GELU, biases, a tied head."""

from __future__ import annotations

from dataclasses import dataclass

from omniattn.models.decoder import Decoder
from omniattn.modules import MLP, Attention, DecoderBlock, LayerNorm, LearnedPositional


@dataclass(frozen=True)
class GPT2Config(Decoder.Config):
    """Sizes and options.

    Args:
        num_heads: a divisor of dim; the feed-forward layer is 4 dim wide.
        max_positions: number of learned positions.
        norm_eps: of the norms.

    Reference:
        Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """

    architecture = "gpt2"

    tie_embeddings: bool = True
    num_heads: int = 6
    max_positions: int = 1024
    norm_eps: float = 1e-5

    @property
    def norm(self) -> LayerNorm.Config:
        return LayerNorm.Config(self.dim, self.norm_eps, backend=self.backend)

    @property
    def positions(self) -> LearnedPositional.Config:
        return LearnedPositional.Config(self.max_positions, self.dim, self.init_std)

    def block(self, layer: int) -> DecoderBlock.Config:
        attention = Attention.Config(
            self.dim,
            self.num_heads,
            bias=True,
            out_bias=True,
            dropout_p=self.dropout_p,
            **self.common,
        )
        mlp = MLP.Config(self.dim, 4 * self.dim, "gelu_tanh", **self.common)
        return DecoderBlock.Config(attention, mlp, self.norm, dropout_p=self.dropout_p)
