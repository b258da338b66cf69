"""A decoder by its blocks: any mixers and channel mixers in any order, hybrids among them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from omniattn.models.decoder import Decoder
from omniattn.modules import DecoderBlock, LearnedPositional, RotaryEmbedding
from omniattn.modules.layer import LayerConfig


@dataclass(frozen=True)
class BlocksConfig(Decoder.Config):
    """The configs of the parts.

    Args:
        blocks: of the layers, repeated from the first one on where there are more layers.
        rope: rotary embedding of all layers that rotate.
        positions: added to the embeddings.

    Example:
        >>> from omniattn.modules import Attention, GatedMLP, RMSNorm
        >>> mlp, norm = GatedMLP.Config(8, 16), RMSNorm.Config(8)
        >>> near = DecoderBlock.Config(Attention.Config(8, 2, window_size=(3, 0)), mlp, norm)
        >>> far = DecoderBlock.Config(Attention.Config(8, 2), mlp, norm)
        >>> config = BlocksConfig(dim=8, num_layers=6, blocks=(near, near, far))
        >>> [config.block(layer) == far for layer in range(6)]
        [False, False, True, False, False, True]
    """

    architecture = "blocks"

    blocks: tuple[DecoderBlock.Config, ...] = ()
    rope: RotaryEmbedding.Config | None = None
    positions: LearnedPositional.Config | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.blocks:
            raise ValueError("BlocksConfig: blocks must not be empty, got blocks=()")
        for block in self.blocks:
            if not isinstance(block, DecoderBlock.Config):
                raise TypeError(
                    f"BlocksConfig: blocks must be configs of DecoderBlock, got block={block!r}"
                )
            for name in ("mixer", "norm"):
                dim = getattr(block, name).dim
                if dim != self.dim:
                    raise ValueError(
                        f"BlocksConfig: {name} of a block must have the dim of the model, "
                        f"got {name}.dim={dim}, dim={self.dim}"
                    )

    def block(self, layer: int) -> DecoderBlock.Config:
        block = self.blocks[layer % len(self.blocks)].with_backend(self.backend)
        return replace(block, residual_in_fp32=self.residual_in_fp32 or block.residual_in_fp32)

    @property
    def norm(self) -> LayerConfig:
        return self.block(0).norm
