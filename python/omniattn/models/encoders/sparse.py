"""Longformer and BigBird: encoders of long texts, whose tokens see patterns of others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omniattn.checks.arguments import shown
from omniattn.models.encoders.bert import HF_HEAD as BERT_HEAD
from omniattn.models.encoders.bert import MaskedConfig
from omniattn.models.encoders.roberta import HF_HEAD, PaddedPositionsConfig
from omniattn.models.encoders.text_encoder import HF_FIXED, HF_OPTIONS, hf_weights
from omniattn.models.hf import Conversion, Counterpart
from omniattn.modules import BigBirdAttention, LongformerAttention
from omniattn.modules.base.fields import Size, SizeOrZero

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _windows_from_hf(theirs: PreTrainedConfig) -> dict[str, Any]:
    windows = theirs.attention_window
    if isinstance(windows, int):
        return {"window": windows}
    return {"window": windows[0] if len(set(windows)) == 1 else tuple(windows)}


@dataclass(frozen=True)
class LongformerConfig(PaddedPositionsConfig):
    """Config of a Longformer: windows, and global tokens with projections of their own.

    A call of the model takes `global_index` (B, G) int, the positions of the global tokens of each
    sequence, -1 for none; without it there are none.

    Args:
        vocab_size, dim, num_layers, num_heads, hidden_dim, token_types, dropout_p: as in
            BertConfig.
        max_positions, padding_id: as in RobertaConfig.
        window: number of keys on both sides of a query together, even; or one number per layer.

    Reference:
        Beltagy et al., "Longformer", 2020, arXiv 2004.05150.
    """

    architecture = "longformer"
    hf = Counterpart(
        "LongformerForMaskedLM",
        HF_OPTIONS | {"padding_id": "pad_token_id"},
        (
            (r"([qkv])_global_proj", r"\1_proj_global"),
            *hf_weights("longformer"),
            *HF_HEAD,
        ),
        fixed=HF_FIXED | {"onnx_export": False, "tie_word_embeddings": True},
        conversions=(
            Conversion(lambda ours: {"attention_window": list(ours.windows)}, _windows_from_hf),
        ),
    )
    takes_key_padding = True
    first_is_global = True

    max_positions: Size = 4098
    window: int | tuple[int, ...] = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.windows) != self.num_layers:
            raise ValueError(
                "LongformerConfig: window must be a number or one number per layer, "
                f"got window={shown(self.window)}, num_layers={self.num_layers}"
            )
        for layer in range(self.num_layers):
            self.mixer(layer)  # checks its window

    @property
    def windows(self) -> tuple[int, ...]:
        """Number of keys of each layer."""
        return (self.window,) * self.num_layers if isinstance(self.window, int) else self.window

    def mixer(self, layer: int) -> LongformerAttention.Config:
        return LongformerAttention.Config(
            self.dim,
            self.num_heads,
            bias=True,
            out_bias=True,
            dropout_p=self.dropout_p,
            window=self.windows[layer],
            global_index=(),
            **self.common,
        )


@dataclass(frozen=True)
class BigBirdConfig(MaskedConfig):
    """Config of a BigBird: each block sees its neighbors, the first and last, and random blocks.

    Texts of up to 5 + 2 n_random blocks have full attention. transformers draws other random
    blocks, in evaluation none; a call of the model takes them as `rand_blocks`. Attention weights
    have no dropout, as there.

    Args:
        vocab_size, dim, num_layers, num_heads, hidden_dim, token_types, dropout_p: as in
            BertConfig.
        block: number of tokens in a block.
        n_random: number of random blocks that a block sees; each layer draws its own.
        seed: seed of the random blocks.

    Reference:
        Zaheer et al., "Big Bird", 2020, arXiv 2007.14062.
    """

    architecture = "bigbird"
    hf = Counterpart(
        "BigBirdForMaskedLM",
        HF_OPTIONS | {"block": "block_size", "n_random": "num_random_blocks"},
        (*hf_weights("bert"), *BERT_HEAD),
        fixed=HF_FIXED
        | {
            "hidden_act": "gelu_new",
            "attention_type": "block_sparse",
            "use_bias": True,
            "rescale_embeddings": False,
            "is_decoder": False,
            "tie_word_embeddings": True,
        },
        unused=r"^bert\.pooler",
    )
    activation = "gelu_tanh"
    takes_key_padding = True
    drops_before_norm = True

    max_positions: Size = 4096
    block: Size = 64
    n_random: SizeOrZero = 3
    seed: int = 0

    def mixer(self, layer: int) -> BigBirdAttention.Config:
        return BigBirdAttention.Config(
            self.dim,
            self.num_heads,
            bias=True,
            out_bias=True,
            block=self.block,
            n_random=self.n_random,
            seed=self.seed,
            draw=layer,
            count_duplicates=True,
            **self.common,
        )
