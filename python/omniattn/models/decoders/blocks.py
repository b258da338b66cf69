"""A decoder built from a list of blocks, with any mixers in any order, including hybrids."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from omniattn.checks.arguments import shown
from omniattn.models.decoders.decoder import Decoder
from omniattn.modules import DecoderBlock, Engram, LearnedPositional, RotaryEmbedding
from omniattn.modules.base.layer import LayerConfig
from omniattn.modules.base.mixer import Norm

#: Named patterns of layers with sliding-window ("swa") or full attention, repeated from the first
#: layer on. gpt3: Brown et al. 2020, arXiv 2005.14165; gemma2: Gemma Team 2024, arXiv 2408.00118;
#: gemma3: Gemma Team 2025, arXiv 2503.19786.
SCHEDULES: dict[str, tuple[str, ...]] = {
    "gpt3": ("full", "swa"),
    "gemma2": ("swa", "full"),
    "gemma3": ("swa", "swa", "swa", "swa", "swa", "full"),
}
#: Kind of layer, also as named by transformers -> index into a config's blocks.
_KINDS = {"swa": 0, "full": 1, "sliding_attention": 0, "full_attention": 1}


def layer_schedule(schedule: str | Sequence[str], num_layers: int) -> tuple[str, ...]:
    """Returns the kind of each layer: "swa" (sliding-window attention) or "full".

    Args:
        schedule: a name of `SCHEDULES`; "n:m" for n layers of "swa", then m of "full", of which
            one may be 0; or a list of kinds, as in `layer_types` of transformers. Repeated from
            the first layer on.
        num_layers: number of layers.

    Raises:
        ValueError: the schedule is invalid.

    Example:
        >>> layer_schedule("2:1", 7)
        ('swa', 'swa', 'full', 'swa', 'swa', 'full', 'swa')
    """
    kinds: Sequence[str] = ()
    if isinstance(schedule, str):
        ratio = re.fullmatch(r"(\d{1,4}):(\d{1,4})", schedule)
        if ratio is not None:
            kinds = ("swa",) * int(ratio[1]) + ("full",) * int(ratio[2])
        kinds = SCHEDULES.get(schedule, kinds)
    elif isinstance(schedule, (tuple, list)):
        kinds = schedule
    if not kinds or not all(isinstance(kind, str) and kind in _KINDS for kind in kinds):
        raise ValueError(
            f"layer_schedule: schedule must be one of {', '.join(SCHEDULES)}, 'n:m' or a list of "
            f"'swa' and 'full', got schedule={shown(schedule)}"
        )
    names = ("swa", "full")
    return tuple(names[_KINDS[kinds[layer % len(kinds)]]] for layer in range(num_layers))


@dataclass(frozen=True)
class BlocksConfig(Decoder.Config):
    """Config of a decoder built from configs of its blocks.

    Args:
        blocks: configs of the layers, repeated if there are more layers.
        rope: rotary embedding of all layers that use one.
        positions: position embedding added to the token embedding.
        schedule: chooses between two blocks, the first for "swa" and the second for "full", by a
            name, a ratio or a list: see :func:`layer_schedule`.
        embedding_norm: norm of the embeddings, which the first block reads (RWKV's ln0).
        engram: config of the Engram of some layers, whose hashes differ by layer.
        engram_layers: numbers of these layers, in their order.

    Example:
        >>> from omniattn.modules import Attention, GatedMLP, RMSNorm
        >>> mlp, norm = GatedMLP.Config(8, 16), RMSNorm.Config(8)
        >>> near = DecoderBlock.Config(Attention.Config(8, 2, window_size=(3, 0)), mlp, norm)
        >>> far = DecoderBlock.Config(Attention.Config(8, 2), mlp, norm)
        >>> config = BlocksConfig(dim=8, num_layers=6, blocks=(near, near, far))
        >>> [config.block(layer) == far for layer in range(6)]
        [False, False, True, False, False, True]
        >>> same = replace(config, blocks=(near, far), schedule="2:1")
        >>> all(same.block(layer) == config.block(layer) for layer in range(6))
        True
    """

    architecture = "blocks"

    blocks: tuple[DecoderBlock.Config, ...] = ()
    rope: RotaryEmbedding.Config | None = None
    positions: LearnedPositional.Config | None = None
    schedule: str | tuple[str, ...] | None = None
    embedding_norm: LayerConfig | None = None
    engram: Engram.Config | None = None
    engram_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.blocks:
            raise ValueError("BlocksConfig: blocks must not be empty, got blocks=()")
        if self.embedding_norm is not None:
            Norm.require_config("BlocksConfig", "embedding_norm", self.embedding_norm)
        for block in self.blocks:
            if not isinstance(block, DecoderBlock.Config):
                raise TypeError(
                    f"BlocksConfig: blocks must be configs of DecoderBlock, "
                    f"got block={shown(block)}"
                )
            for name in ("mixer", "norm"):
                dim = getattr(getattr(block, name), "dim", None)  # None if the layer has no dim
                if dim is not None and dim != self.dim:
                    raise ValueError(
                        f"BlocksConfig: {name} of a block must have the dim of the model, "
                        f"got {name}.dim={dim}, dim={self.dim}"
                    )
        self._check_engram()
        if any(block.streams != self.blocks[0].streams for block in self.blocks):
            raise ValueError(
                "BlocksConfig: all blocks must have the same streams, "
                f"got {[shown(block.streams) for block in self.blocks]}"
            )
        if self.schedule is not None:
            layer_schedule(self.schedule, 0)
            if len(self.blocks) != 2:
                raise ValueError(
                    "BlocksConfig: schedule needs two blocks, for 'swa' and for 'full', "
                    f"got {len(self.blocks)} blocks"
                )

    def _check_engram(self) -> None:
        known = sorted(set(self.engram_layers) & set(range(self.num_layers)))
        if list(self.engram_layers) != known or bool(known) != (self.engram is not None):
            raise ValueError(
                "BlocksConfig: engram_layers must be numbers of layers in their order, given with "
                f"engram, got engram_layers={shown(self.engram_layers)}, "
                f"num_layers={self.num_layers}, engram={shown(self.engram)}"
            )
        for name in ("dim", "vocab_size"):
            size = getattr(self.engram, name, getattr(self, name))
            if size != getattr(self, name):
                raise ValueError(
                    f"BlocksConfig: engram must have the {name} of the model, "
                    f"got engram.{name}={size}, {name}={getattr(self, name)}"
                )

    def block(self, layer: int) -> DecoderBlock.Config:
        place = layer % len(self.blocks)
        if self.schedule is not None:
            place = _KINDS[layer_schedule(self.schedule, layer + 1)[layer]]
        block = self.blocks[place]
        if self.engram is not None and layer in self.engram_layers:
            engram = replace(self.engram, layer_idx=layer, layer_ids=self.engram_layers)
            block = replace(block, engram=engram)
        block = block.with_backend(self.backend)
        if block.streams is not None:
            streams: Any = block.streams
            block = replace(block, streams=replace(streams, place=layer))
        return replace(block, residual_in_fp32=self.residual_in_fp32 or block.residual_in_fp32)

    @property
    def norm(self) -> LayerConfig:
        return self.block(0).norm
